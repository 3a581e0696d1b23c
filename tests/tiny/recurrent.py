"""Random small recurrent and hybrid models, one per architecture, and their texts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from speculon.core.config import SamplingParams
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target
from tests.tiny.conftest import MOE, build
from tests.tiny.scripted import Key, Request, Result

TIE = 1e-4  # nat, as in requests

DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
DELTA_MOE = {**DELTA, **MOE, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
LATENT = {
    "num_hidden_layers": 3,
    "layer_types": DELTA["layer_types"],
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
CONVOLUTION = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", DELTA_MOE),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_MOE),
    "olmo_hybrid": ("olmo_hybrid", DELTA),
    "kimi_linear": (
        "kimi_linear",
        {
            **LATENT,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse", "dense"],
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**LATENT, "head_dim": 8, "num_mtp_layers": 0, "first_k_dense_replace": 1},
    ),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **MAMBA2,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "bamba": ("bamba", {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "mamba": ("mamba", {"state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8, "time_step_rank": 4}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "lfm2": ("lfm2", CONVOLUTION),
    "lfm2_moe": ("lfm2_moe", {**CONVOLUTION, **MOE, "num_dense_layers": 1}),
    "lfm3": ("lfm3", CONVOLUTION),
}
# one of each class of mixer
DIFFERENT = ("qwen3_next", "kimi_linear", "bailing_hybrid", "falcon_h1", "mamba2", "mamba", "jamba", "lfm2")
TWO = ("qwen3_next", "jamba")  # one whose rows continue a state in one call, and one of row by row
LENGTHS = (5, 31, 1, 17, 8, 24)  # of the prompts
# a method and K for each
MIXED = [("scripted", 4), ("suffix", 4), ("scripted", 16), ("off", 0), ("ngram", 3), ("scripted", 1)]
Texts = dict[Key, list[int]]
ROW_BY_ROW = {"mamba", "falcon_mamba", "jamba"}  # whose selective scan takes no initial state


@cache
def recurrent_model(name: str) -> PreTrainedModel:
    """The stock model; treat it as read-only."""
    model_type, settings = RECURRENT[name]
    return build(model_type, **settings)


@cache
def recurrent_target(name: str) -> Target:
    return wrap_model(recurrent_model(name), name=name, share=False)


@cache
def requests() -> tuple[Request, ...]:
    """Six greedy requests of different lengths; every prompt of some length repeats a part of itself."""
    chance, found = random.Random(5), []
    for i, length in enumerate(LENGTHS):
        half = [chance.randrange(3, 96) for _ in range(-(-length // 2))]
        params = SamplingParams(temperature=0, max_tokens=30 - i, ignore_eos=True)
        found.append(Request((half + half)[:length], params, {"method": "off"}, f"q{i}"))
    return tuple(found)


def mixed() -> list[Request]:
    ways = [{"method": method, "num_speculative_tokens": k} for method, k in MIXED]
    return [replace(r, speculation=way) for r, way in zip(requests(), ways, strict=True)]


@cache
def generated(name: str) -> Texts:
    """What transformers' own generate writes."""
    model, texts = recurrent_model(name), {}
    for request in requests():
        ids = torch.tensor([request.prompt])
        limit = {"max_new_tokens": request.params.max_tokens, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limit)
        texts[request.id, 0] = out[0, ids.shape[1] :].tolist()
    return texts


def wrong(name: str, results: dict[Key, Result]) -> list[tuple[Key, int, float]]:
    """Every text that differs where the model's two best tokens are not tied: where, and by how many nat."""
    truth, found = generated(name), []
    assert results.keys() <= truth.keys()
    for key, result in results.items():
        if result.tokens != truth[key]:
            pairs = zip(result.tokens, truth[key], strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
            prompt = next(request.prompt for request in requests() if request.id == key[0])
            with torch.inference_mode():
                logits = recurrent_model(name)(torch.tensor([prompt + truth[key][:at]])).logits[0, -1]
            best = logits.log_softmax(-1).topk(2).values
            if at < 0 or best[0] - best[1] >= TIE:
                found.append((key, at, float(best[0] - best[1])))
    return found
