"""A whole small checkpoint on disk: random Qwen3 weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny.conftest import build

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CODE = ["def add(first, second):\n    return first + second\n"] * 4


def byte_tokenizer(texts: Sequence[str] = CODE, vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Bytes and the merges that these texts give: any text goes in and comes out."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_checkpoint(folder: Path, context: int = 512) -> Path:
    """Saves the checkpoint and returns its folder."""
    tokenizer = byte_tokenizer()
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": context, "eos_token_id": 2}
    build("qwen3", **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_stranger(folder: Path) -> Path:
    """The same with a tokenizer none of whose tokens spells what any token of another one does."""
    write_checkpoint(folder)
    file = json.loads((folder / "tokenizer.json").read_text())
    file["model"] |= {"vocab": {f"{p}\u0120{p}": i for p, i in file["model"]["vocab"].items()}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder
