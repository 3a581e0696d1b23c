"""A small model with random weights of each causal type of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

MAX_PARAMETERS = 320_000_000  # of a model that is made
SPREAD = 0.2  # standard deviation of the weights: texts then depend on all of them
VOCAB = 96
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SMALL: dict[str, Any] = {
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k"), 2),
    "moe_intermediate_size": 32,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,  # else a type of BERT's family attends in both directions
}
WINDOW = {"sliding_window": 12, "attention_chunk_size": 12}  # shorter than the texts
ENCODER_DECODER: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
}
NO_HEAD_DIM = {name: value for name, value in SMALL.items() if name != "head_dim"}
FULL = ["full_attention", "full_attention"]
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
# one recurrent layer, and one with the attention that the type's models have beside it
HYBRID: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "kimi_linear",
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
        ),
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
# what a type needs beyond SMALL; None leaves a setting out
OWN: dict[str, dict[str, Any]] = {
    **HYBRID,
    "cohere_compass_text": {
        "layer_types": FULL,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "layer_types": FULL},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gpt_neo": {
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 12,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": CHUNKS,
    "llama4_text": CHUNKS,
    "longcat_flash": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "xlstm": {"num_heads": 4, "v_head_dim": None},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 18, "num_key_value_heads": 4, "head_dim": None, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4},
}
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {**SMALL, **WINDOW},
    SMALL,
    {**SMALL, "num_key_value_heads": 4},
    {**NO_HEAD_DIM, "num_key_value_heads": 4, "rotary_dim": 8},
    {**NO_HEAD_DIM, "d_model": 64, **ENCODER_DECODER},
    {**SMALL, **dict.fromkeys(LAYERS, 4)},
    {**NO_HEAD_DIM, "num_experts_per_tok": 1},
    {name: SMALL[name] for name in (*LAYERS, "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    {name: SMALL[name] for name in LAYERS},
    {},
)


class NotMade(Exception):
    """No attempt gives a small model whose stock forward runs; the reason of the first."""


def small_model(model_type: str) -> PreTrainedModel:
    """Raises `NotMade`."""
    reason = ""
    for settings in ATTEMPTS:
        torch.manual_seed(0)
        try:
            own = {**settings, **OWN.get(model_type, {})}
            model = make(small_config(model_type, {k: v for k, v in own.items() if v is not None}))
            with torch.inference_mode():
                model(input_ids=torch.arange(3, 11)[None], use_cache=False)
        except Exception as error:  # a config's own checks raise many types
            reason = reason or first_line(error)
        else:
            return model
    raise NotMade(reason)


def small_config(model_type: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """The type's own config with those of the settings that it knows, in its text part too."""
    known = AutoConfig.for_model(model_type)
    given = {name: value for name, value in settings.items() if knows(known, name)}
    inner = getattr(known, "text_config", None)
    if inner is not None and inner is not known:
        text = {name: value for name, value in settings.items() if knows(inner, name)}
        given = {"text_config": {"model_type": inner.model_type, **text}}
    return AutoConfig.for_model(model_type, **given)


def knows(config: PreTrainedConfig, name: str) -> bool:
    """Whether it has this setting, which may be one per layer, and is no property without a setter."""
    own = getattr(type(config), name, None)
    if isinstance(own, property):
        return own.fset is not None
    return name in vars(config) or name in config.attribute_map or hasattr(type(config), name)


def make(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} M parameters at its smallest here")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, SPREAD, generator=generator)
    return model


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:160] or type(error).__name__
