"""Random small models, one per architecture: wild enough that every trait shows in the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from speculon.core.config import EngineConfig
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target

torch.set_num_threads(1)

VOCAB, CONTEXT, WINDOW, CHUNK = 96, 128, 5, 7
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            **MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma3": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 12}),
    "phi3": ("phi3", {}),
    "gpt_oss": (
        "gpt_oss",
        {
            **MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
        },
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": CONTEXT}),
}

# those whose layers pass no keyword arguments on, and those with attention in their own code
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "granite_swa": ("granite_swa", {**MIXED, "attention_multiplier": 0.4}),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": CHUNK,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
        },
    ),
    "falcon": ("falcon", {"multi_query": True}),
    "falcon grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("gptj", {"n_positions": CONTEXT, "rotary_dim": 4}),
    "codegen": ("codegen", {"n_positions": CONTEXT, "rotary_dim": 4}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
}
NO_HEAD_DIM = ("deepseek_v3", "falcon", "stablelm", "gptj", "codegen", "gpt_neox_japanese")


def build(model_type: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model in fp32 whose every parameter matters."""
    base = {
        k: v
        for k, v in BASE.items()
        if model_type != "gpt2" or k in ("vocab_size", "bos_token_id", "eos_token_id")
    }
    if model_type in NO_HEAD_DIM:
        base.pop("head_dim")
    config = AutoConfig.for_model(model_type, **{**base, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 0.2)
            elif "norm" in name or "ln_" in name:
                weight.data.mul_(torch.randn_like(weight) * 0.1 + 1)
            else:
                weight.data.normal_(0, 0.5)
    return model


@cache
def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The stock model; treat it as read-only."""
    model_type, settings = {**TINY, **OTHERS}[name]
    return build(model_type, seed, **settings)


@cache
def tiny_target(name: str, seed: int = 0, fused: bool | None = None) -> Target:
    """Fused into weights of its own, as a loaded checkpoint is, unless SPECULON_FUSE or `fused` says no."""
    fused = EngineConfig().fuse if fused is None else fused
    return wrap_model(tiny_model(name, seed), name=name, fused=fused, share=False)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Target]:
    """`tiny("llama", seed=0)`: a checked Target over random weights; `.model` is ours, `tiny_model` the stock
    one.
    """
    return tiny_target


@pytest.fixture(name="cache")
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where starts of one test keep what they find; other tests keep nothing."""
    monkeypatch.setenv("SPECULON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
