"""Writes a trained block drafter in the formats in which DFlash and DSpark are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from speculon.train.block_drafter import DFlashDrafter, DSparkDrafter
from speculon.train.record import write_json
from speculon.train.teacher import Teacher


def write_block_drafter(drafter: DFlashDrafter, teacher: Teacher, folder: Path) -> None:
    """config.json and model.safetensors (bf16), without embeddings and output head: they are the target's."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in drafter.named_parameters()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    own = spark_config(drafter) if isinstance(drafter, DSparkDrafter) else flash_config(drafter)
    write_json(folder / "config.json", common_config(drafter, teacher) | own)


def flash_config(drafter: DFlashDrafter) -> dict[str, Any]:
    form = drafter.form
    return {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": form.mask, "target_layer_ids": list(form.taps)},
    }


def spark_config(drafter: DSparkDrafter) -> dict[str, Any]:
    """The flat form of DeepSpec, in which the anchor's row drafts."""
    form = drafter.form
    return {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": form.mask,
        "target_layer_ids": list(form.taps),
        "num_anchors": drafter.anchors,
        "markov_rank": drafter.markov_head.markov_w1.embedding_dim,
        "markov_head_type": drafter.markov_head.markov_type,
        "enable_confidence_head": drafter.confidence_head is not None,
        "confidence_head_with_markov": drafter.confidence_head is not None,
    }


def common_config(drafter: DFlashDrafter, teacher: Teacher) -> dict[str, Any]:
    """The fields of a Qwen3, and the block size."""
    form = drafter.form
    return {
        "model_type": "qwen3",
        "block_size": form.block,
        "num_target_layers": len(teacher.layers),
        "vocab_size": form.vocab_size,
        "hidden_size": form.hidden,
        "intermediate_size": form.intermediate,
        "num_hidden_layers": form.layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * form.layers,
        "max_position_embeddings": getattr(teacher.config, "max_position_embeddings", 2048),
        "rms_norm_eps": form.eps,
        "rope_theta": form.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": form.theta},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
    }
