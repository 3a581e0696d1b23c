"""Writes a trained EAGLE-3 head in the speculators format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig

from speculon.train.eagle3_head import Eagle3Head
from speculon.train.record import write_json
from speculon.train.teacher import Teacher

WEIGHTS = "model.safetensors"


def write_head(head: Eagle3Head, teacher: Teacher, target: str, folder: Path) -> None:
    """config.json and model.safetensors (bf16), without embeddings, which are the target's."""
    form = head.form
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in head.named_parameters()
    }
    if form.draft_vocab_size < form.vocab_size:
        used = head.used.cpu()
        tensors["d2t"] = used - torch.arange(len(used))  # an offset: target id = draft id + d2t
        tensors["t2d"] = torch.zeros(form.vocab_size, dtype=torch.bool).index_fill(0, used, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", head_config(head, teacher, target))


def head_config(head: Eagle3Head, teacher: Teacher, target: str) -> dict[str, Any]:
    form = head.form
    layer = LlamaConfig(
        vocab_size=form.vocab_size,
        hidden_size=form.hidden,
        intermediate_size=form.intermediate,
        num_hidden_layers=form.layers,
        num_attention_heads=form.heads,
        num_key_value_heads=form.kv_heads,
        head_dim=form.head_dim,
        max_position_embeddings=getattr(teacher.config, "max_position_embeddings", 2048),
        rms_norm_eps=form.eps,
        rope_parameters={"rope_type": "default", "rope_theta": form.theta},
        tie_word_embeddings=False,
    )
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": head.steps,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target,
                "architectures": list(teacher.model.config.architectures or ()),
            },
        },
        "transformer_layer_config": layer.to_diff_dict()
        | {"model_type": "llama", "num_hidden_layers": form.layers},
        "draft_vocab_size": form.draft_vocab_size,
        "target_hidden_size": teacher.width,
        "norm_before_residual": form.norm_before_residual,
        "norm_before_fc": form.norm_before_fc,
        "fc_norm": form.fc_norm,
        "norm_output": form.norm_output,
        "embed_requires_grad": False,
        # the format numbers the inputs of layers
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in form.taps],
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
    }
