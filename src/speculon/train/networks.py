"""What the training of drafters with a network has in common: sizes from the target, and the folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from speculon.core.errors import InvalidParameter
from speculon.train.record import write_json
from speculon.train.settings import BlockShape, HeadSettings
from speculon.train.teacher import Teacher

WEIGHTS = "model.safetensors"


def network_sizes(settings: HeadSettings | BlockShape, teacher: Teacher) -> dict[str, Any]:
    """Fields of `DrafterConfig`; numbers that are not set are the target's. Raises InvalidParameter."""
    config = teacher.config
    heads, kv_heads = attention_heads(settings.heads, settings.kv_heads, config)
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "hidden": teacher.width,
        "target_hidden": teacher.width,
        "taps": len(teacher.taps),
        "layers": settings.layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or teacher.width // config.num_attention_heads,
        "intermediate": settings.intermediate
        or getattr(config, "intermediate_size", None)
        or 4 * teacher.width,
        "vocab_size": teacher.vocab_size,
        "draft_vocab_size": len(teacher.used),
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10_000.0)},
        "windows": (None,) * settings.layers,
        "max_context": getattr(config, "max_position_embeddings", 2048),
    }


def attention_heads(heads: int | None, kv_heads: int | None, config: Any) -> tuple[int, int]:
    """Heads and key-value heads, the target's where not set. Raises InvalidParameter."""
    heads = heads or config.num_attention_heads
    kv_heads = kv_heads or min(heads, getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise InvalidParameter("heads", heads, f"a multiple of kv_heads, {kv_heads}")
    return heads, kv_heads


def write_network(
    network: nn.Module, config: Mapping[str, Any], folder: Path, tables: Mapping[str, Tensor] | None = None
) -> None:
    """config.json, and all parameters in bf16 with more `tables`; what is the target's is not written."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in network.named_parameters()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(tables or {})}, folder / WEIGHTS, {"format": "pt"})
    known = {**config, "dtype": "bfloat16", "transformers_version": transformers.__version__}
    write_json(folder / "config.json", known)
