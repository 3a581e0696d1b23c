"""Small random vision-language models: one with positions of three axes, one whose images see themselves in
both directions, and two plain ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from speculon.core.images import ImageInput

VOCAB, IMAGE = 96, 90  # tokens, and the placeholder of an image
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def qwen2_5_vl() -> dict[str, Any]:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": TEXT["hidden_size"],
        "fullatt_block_indexes": [1],
        "window_size": 28,
    }
    text = TEXT | {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}}
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "vision_start_token_id": 91,
        "vision_end_token_id": 92,
        "video_token_id": 93,
    }


def gemma3() -> dict[str, Any]:
    text = TEXT | {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    }
    return {
        "text_config": text,
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "image_token_id": IMAGE,
        "boi_token_index": 91,
        "eoi_token_index": 92,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    }


def idefics3() -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    }


def llava() -> dict[str, Any]:
    return {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IMAGE,
        "image_seq_length": 16,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "llava": llava,
}


def vision_model(family: str, seed: int = 0, config: dict[str, Any] | None = None) -> PreTrainedModel:
    """In fp32, with random weights that make greedy texts differ between images."""
    torch.manual_seed(seed)
    made = AutoConfig.for_model(family, **(config or FAMILIES[family]()))
    model = AutoModelForImageTextToText.from_config(made, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # a projection of features that begins with zeros
                weight.normal_(0, 0.3)
    return model


def write_vision(folder: Path, family: str, seed: int = 0) -> Path:
    vision_model(family, seed).save_pretrained(folder)
    return folder


def pixels(family: str, seed: int) -> tuple[dict[str, Any], int]:
    """Random inputs of a vision tower, and the number of placeholders that its features take."""
    generator = torch.Generator().manual_seed(seed)
    if family == "qwen2_5_vl":  # 4 x 6 patches of two frames, of which 2 x 2 are one feature
        values = torch.randn(24, 3 * 2 * 7 * 7, generator=generator)
        return {"pixel_values": values.numpy(), "image_grid_thw": torch.tensor([[1, 4, 6]]).numpy()}, 6
    values = torch.randn(1, 3, 28, 28, generator=generator)
    if family == "idefics3":
        mask = torch.ones(1, 1, 28, 28, dtype=torch.int64)
        return {"pixel_values": values[None].numpy(), "pixel_attention_mask": mask.numpy()}, 4
    return {"pixel_values": values.numpy()}, 4 if family == "gemma3" else 16


def image_prompt(family: str, images: tuple[int, ...], lead: int = 7) -> tuple[list[int], list[ImageInput]]:
    """Some text, then each of these images with text after it."""
    ids, inputs = [(5 * i + 3) % 80 + 3 for i in range(lead)], []
    for seed in images:
        values, count = pixels(family, seed)
        rows = tuple(range(len(ids) + 1, len(ids) + 1 + count))
        ids += [91, *[IMAGE] * count, 92, *((3 * i) % 80 + 4 for i in range(5))]
        digest = hashlib.sha256(values["pixel_values"].tobytes()).hexdigest()
        inputs.append(ImageInput(rows, digest, values))
    return ids, inputs


def stock_arguments(family: str, text: list[int], images: list[ImageInput]) -> dict[str, Tensor]:
    """What transformers' own forward takes of the images of a text."""
    if not images:
        return {}
    of_image = torch.tensor([text]) == IMAGE
    axis = 1 if family == "idefics3" else 0
    named = {
        name: torch.cat([torch.from_numpy(image.inputs[name]) for image in images], axis)
        for name in images[0].inputs
    }
    types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
    return named | ({types[family]: of_image.int()} if family in types else {})
