"""Small processors of vision-language models, as folders: a config, an image processor, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from tests.tiny.checkpoint import byte_tokenizer
from tests.tiny.vision_models import FAMILIES, vision_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# what each class needs: tokens of the tokenizer, its placeholder in a template, and its files
SPECIALS: dict[str, list[str]] = {
    "llava": ["<image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{i}_col_{j}>" for i in range(1, 3) for j in range(1, 3)],
    "smolvlm": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{i}_col_{j}>" for i in range(1, 3) for j in range(1, 3)],
    "qwen2_5_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
}
PLACEHOLDER = {
    "llava": "<image>\n",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
NAMED = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
TOKENS = {  # of a config
    "llava": {"image_token_index": "<image>"},
    "idefics3": {"image_token_id": "<image>"},
    "smolvlm": {"image_token_id": "<image>"},
    "qwen2_5_vl": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "gemma3": {
        "image_token_id": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
}
PROCESSORS: dict[str, Callable[[], tuple[str, dict[str, Any], Any]]] = {
    "llava": lambda: (
        "LlavaProcessor",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        CLIPImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, do_center_crop=True
        ),
    ),
    "idefics3": lambda: (
        "Idefics3Processor",
        {"image_seq_len": 4},
        Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
    ),
    "smolvlm": lambda: (
        "SmolVLMProcessor",
        {"image_seq_len": 4},
        SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
    ),
    "qwen2_5_vl": lambda: (
        "Qwen2_5_VLProcessor",
        {},
        Qwen2VLImageProcessorPil(
            patch_size=7, merge_size=2, temporal_patch_size=2, min_pixels=14 * 14, max_pixels=56 * 56
        ),
    ),
    "gemma3": lambda: (
        "Gemma3Processor",
        {"image_seq_length": 4},
        Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
    ),
}


def write_processor(folder: Path, form: str, *, config: dict[str, Any] | None = None) -> Path:
    """Writes the processor; with `config`, that of a model without weights, too.

    The image token's id goes into the config, as a checkpoint has it.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS[form]})
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", PLACEHOLDER[form])
    tokenizer.save_pretrained(folder)
    if named := NAMED.get(form):
        edit(folder / "tokenizer_config.json", {"extra_special_tokens": named, **named})
    name, fields, images = PROCESSORS[form]()
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **fields}))
    if config is not None:
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS[form].items()}
        AutoConfig.for_model(form, **{**config, **ids}).save_pretrained(folder)
    return folder


def write_seeing(folder: Path, form: str) -> Path:
    """A whole checkpoint: random weights over the processor's tokens."""
    write_processor(folder, form)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS[form].items()}
    config = FAMILIES["idefics3" if form == "smolvlm" else form]() | ids
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config["text_config"] = config["text_config"] | {"vocab_size": len(tokenizer)} | ends
    vision_model(form, config=config).save_pretrained(folder)
    return folder


def edit(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
