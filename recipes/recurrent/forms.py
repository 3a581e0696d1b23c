"""Hybrids of 12 layers with random weights, in the form of published ones: width 256, fp32."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 4096
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": (
        "qwen3_5_text",
        {
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "Falcon-H1": (
        "falcon_h1",
        {
            "mamba_n_heads": 16,
            "mamba_d_head": 32,
            "mamba_d_ssm": 512,
            "mamba_d_state": 64,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
        },
    ),
    "LFM2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 4, "conv_L_cache": 3}),
}


def model_of(form: str, **settings: Any) -> PreTrainedModel:
    """The stock model of a form; the weights are the same each time."""
    model_type, own = FORMS[form]
    config = AutoConfig.for_model(model_type, **{**BASE, **own, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
