"""The architectures of GGUF files that speculon reads: fields of their configs, and places of their tensors.

The names, defaults and layouts are those of llama.cpp's converter and loader (`convert_hf_to_gguf.py`,
`src/models`). An architecture is in the table only if a test writes a model of it and compares what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from speculon.checkpoints.gguf.header import (
    FACTORS,
    LONG_FACTORS,
    PREDICTION_LAYERS,
    SHORT_FACTORS,
    GgufHeader,
)
from speculon.checkpoints.gguf.metadata import Metadata, refusal, shorten
from speculon.core.errors import CorruptWeights
from speculon.runtimes.torch.loading.gguf.rotary import BASE, llama3, longrope, rotary, rotated_share

SOFTMAX = 1  # gating of experts; 0 stands for the architecture's own
SLIDING, LINEAR, FULL = "sliding_attention", "linear_attention", "full_attention"

Order = Callable[[PreTrainedConfig, int], np.ndarray | None]
"""Of so many rows or columns: those of the file in the model's order, or None where both have the same."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a file stores a parameter: under one name, or under several whose rows follow one another."""

    names: tuple[str, ...]
    rows: Order | None = None
    columns: Order | None = None
    inverse: Callable[[np.ndarray], np.ndarray] | None = None  # of what the converter did to each number
    transposed: bool = False  # in the last two dimensions
    alternating: bool = False  # the rows of the names

    @property
    def keeps_rows(self) -> bool:
        """Whether its rows are those of the model, in some order."""
        return len(self.names) == 1 and not self.inverse and not self.transposed


@dataclass(frozen=True, slots=True)
class Architecture:
    """`fields` are those of the config, with its `model_type`. `tensors` are by the names of parameters
    without `.weight` or `.bias`, with `*` for the layer; a parameter that ends otherwise has whole names."""

    fields: Callable[[Metadata], dict[str, Any]]
    tensors: Mapping[str, Stored]
    factors: tuple[str, ...] = ()  # tensors that `fields` reads


def architecture_of(header: GgufHeader) -> Architecture:
    if header.architecture not in ARCHITECTURES:
        raise refusal(header, f"the architecture {header.architecture!r} is not supported in GGUF files")
    return ARCHITECTURES[header.architecture]


# fields


def common(values: Metadata) -> dict[str, Any]:
    """What every config has under the same name."""
    values.only("attention.causal", True)
    values.only("pooling_type", 0)
    values.ignore("tensor_data_layout")
    return {
        "vocab_size": values.vocab_size,
        "tie_word_embeddings": "output.weight" not in values.header.by_name,
        "bos_token_id": values.token("bos"),
        "eos_token_id": values.token("eos"),
        "pad_token_id": values.token("padding"),
    }


def trunk(values: Metadata, model_type: str, kv_heads: int | None = None) -> dict[str, Any]:
    """Also what all classes with rotary positions have; `kv_heads` where they differ between layers."""
    heads = values.whole("attention.head_count")
    return common(values) | {
        "model_type": model_type,
        "hidden_size": values.whole("embedding_length"),
        "max_position_embeddings": values.whole("context_length"),
        "num_hidden_layers": values.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or values.whole("attention.head_count_kv", heads),
    }


def decoder(values: Metadata, model_type: str, kv_heads: int | None = None) -> dict[str, Any]:
    """Also the width of dense layers."""
    return trunk(values, model_type, kv_heads) | {"intermediate_size": values.whole("feed_forward_length")}


def rms_norm(values: Metadata, name: str = "rms_norm_eps") -> dict[str, Any]:
    return {name: values.real("attention.layer_norm_rms_epsilon")}


def layer_norm(values: Metadata, name: str) -> dict[str, Any]:
    return {name: values.real("attention.layer_norm_epsilon")}


def even_width(values: Metadata) -> int:
    """The width of a head where all heads together have that of the hidden states."""
    return values.whole("embedding_length") // values.whole("attention.head_count")


def only_even_width(values: Metadata) -> int:
    """The same, of a class that has no other."""
    width = even_width(values)
    values.only("attention.key_length", width)
    values.only("attention.value_length", width)
    return width


def head_dim(values: Metadata) -> int:
    """The width of a head in queries, keys and values, all of which is rotated."""
    width = values.whole("attention.key_length", even_width(values))
    values.only("attention.value_length", width)
    values.only("rope.dimension_count", width)
    if width % 2:
        raise refusal(values.header, f"its heads have {width} dimensions, which do not rotate in pairs")
    return width


def has_bias(values: Metadata, name: str) -> bool:
    return f"blk.0.{name}.bias" in values.header.by_name


def llama(values: Metadata) -> dict[str, Any]:
    """Also Mistral and Mixtral, which have the name of Llama in GGUF files."""
    width = head_dim(values)
    own: dict[str, Any] = {"head_dim": width}
    own["rope_parameters"] = llama3(values, rotary(values, "linear", "yarn"), width)
    window = values.whole("attention.sliding_window", 0, zero=True) or None
    number = values.whole("expert_count", 0, zero=True)
    values.ignore("expert_used_count")  # of no experts
    if number:
        model_type, used = "mixtral", used_experts(values)
        only_normalized_experts(values)
        own |= {"num_local_experts": number, "num_experts_per_tok": used, "sliding_window": window}
    elif window:
        model_type, own["sliding_window"] = "mistral", window
    else:
        model_type = "llama"
        own |= {"attention_bias": has_bias(values, "attn_q"), "mlp_bias": has_bias(values, "ffn_up")}
    return decoder(values, model_type) | rms_norm(values) | own


def qwen2(values: Metadata) -> dict[str, Any]:
    own = {"head_dim": head_dim(values), "rope_parameters": rotary(values, "linear", "yarn")}
    return decoder(values, "qwen2") | rms_norm(values) | own


def qwen3(values: Metadata) -> dict[str, Any]:
    return qwen2(values) | {"model_type": "qwen3", "attention_bias": has_bias(values, "attn_q")}


def qwen2moe(values: Metadata) -> dict[str, Any]:
    shared = values.whole("expert_shared_feed_forward_length", values.whole("feed_forward_length"))
    own = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared}
    return qwen2(values) | own | sparse(values, normalized=False)


def qwen3moe(values: Metadata) -> dict[str, Any]:
    return qwen3(values) | {"model_type": "qwen3_moe"} | sparse(values, normalized=True)


def sparse(values: Metadata, *, normalized: bool) -> dict[str, Any]:
    """The experts of Qwen's models, in all layers."""
    used = used_experts(values)
    even = values.whole("feed_forward_length") // used
    return {
        "num_experts": values.whole("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": values.whole("expert_feed_forward_length", even),
        "norm_topk_prob": experts(values, normalized),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def used_experts(values: Metadata) -> int:
    """How many experts each token has."""
    number, used = values.whole("expert_count"), values.whole("expert_used_count")
    if used > number:
        what = f"{values.header.path}: it uses {used} experts of {number}"
        raise CorruptWeights(f"{what} ({values.header.architecture}.expert_used_count)")
    return used


def experts(values: Metadata, normalized: bool) -> bool:
    """Whether the weights of the chosen experts add up to 1; `normalized` where the file does not say it."""
    values.only("expert_gating_func", 0, SOFTMAX)
    values.only("expert_weights_scale", 0.0, 1.0)
    return values.flag("expert_weights_norm", normalized)


def only_normalized_experts(values: Metadata) -> None:
    if not experts(values, True):
        raise refusal(values.header, "experts whose weights do not add up to 1 are not supported")


def qwen35(values: Metadata) -> dict[str, Any]:
    return delta_nets(values, "qwen3_5_text") | {"intermediate_size": values.whole("feed_forward_length")}


def qwen35moe(values: Metadata) -> dict[str, Any]:
    values.ignore("feed_forward_length")  # it has no dense layers
    only_normalized_experts(values)
    return delta_nets(values, "qwen3_5_moe_text") | {
        "num_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
        "moe_intermediate_size": values.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": values.whole("expert_shared_feed_forward_length"),
    }


def delta_nets(values: Metadata, model_type: str) -> dict[str, Any]:
    """Qwen 3.5: all layers but every fourth, or those that a list names, are gated delta nets. The last ones
    may be of multi-token prediction, and are left out."""
    num_layers = values.num_layers - values.whole(PREDICTION_LAYERS, 0, zero=True)
    width = values.whole("attention.key_length", even_width(values))
    values.only("attention.value_length", width)
    values.ignore("rope.dimension_sections")  # of images; all positions of a text are the same
    key_heads, value_heads = values.whole("ssm.group_count"), values.whole("ssm.time_step_rank")
    values_width = values.whole("ssm.inner_size")
    if value_heads % key_heads or values_width % value_heads:
        heads = f"{value_heads} value heads of {values_width} dimensions in all, for {key_heads} key heads"
        raise refusal(values.header, f"{heads} are not supported")
    if num_layers < 1:
        raise refusal(values.header, "all its layers are of multi-token prediction")
    period = values.whole("full_attention_interval", 4)
    linear = values.layers("attention.recurrent_layers", period, values.num_layers)
    return trunk(values, model_type) | rms_norm(values) | {
        "num_hidden_layers": num_layers,
        "head_dim": width,
        "rope_parameters": rotary(values, "linear", "yarn")
        | {"partial_rotary_factor": rotated_share(values, width)},
        "layer_types": [LINEAR if one else FULL for one in linear[:num_layers]],
        "linear_conv_kernel_dim": values.whole("ssm.conv_kernel"),
        "linear_key_head_dim": values.whole("ssm.state_size"),
        "linear_value_head_dim": values_width // value_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }


def gpt_oss(values: Metadata) -> dict[str, Any]:
    """Its YaRN does not round the range of its ramp, although llama.cpp does."""
    parameters = rotary(values, "yarn")
    values.only("rope.freq_base_swa", parameters["rope_theta"])
    values.ignore("feed_forward_length")  # it has no dense layers
    return trunk(values, "gpt_oss") | rms_norm(values) | {
        "head_dim": head_dim(values),
        "rope_parameters": parameters | {"truncate": False},
        "sliding_window": values.whole("attention.sliding_window"),
        "layer_types": layer_types(values, 2),
        "intermediate_size": values.whole("expert_feed_forward_length"),
        "num_local_experts": values.whole("expert_count"),
        "num_experts_per_tok": values.whole("expert_used_count"),
        "attention_bias": True,
    }


def stablelm(values: Metadata) -> dict[str, Any]:
    """A layer without a second norm is parallel, whatever the key says: the converter has it wrong."""
    values.ignore("use_parallel_residual")
    share = rotated_share(values, only_even_width(values))
    return decoder(values, "stablelm") | layer_norm(values, "layer_norm_eps") | {
        "rope_parameters": rotary(values) | {"partial_rotary_factor": share},
        "use_qkv_bias": has_bias(values, "attn_q"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in values.header.by_name,
    }


def gemma(values: Metadata) -> dict[str, Any]:
    own = {"head_dim": head_dim(values), "rope_parameters": rotary(values, "linear", "yarn")}
    return decoder(values, "gemma") | rms_norm(values) | own


def gemma2(values: Metadata) -> dict[str, Any]:
    parameters = rotary(values, "linear", "yarn")
    values.only("rope.freq_base_swa", parameters["rope_theta"])
    return decoder(values, "gemma2") | rms_norm(values) | {
        "head_dim": head_dim(values),
        "rope_parameters": parameters,
        "query_pre_attn_scalar": attention_scalar(values, of_27b=46),
        "sliding_window": values.whole("attention.sliding_window", 4096),
        "layer_types": layer_types(values, 2),
        "attn_logit_softcapping": values.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.real("final_logit_softcapping", 30.0),
    }


def gemma3(values: Metadata) -> dict[str, Any]:
    """Scaled positions are those of the layers that see all; the others have a base of their own."""
    window = values.whole("attention.sliding_window", 0, zero=True) or None
    local = {"rope_type": "default", "rope_theta": values.real("rope.freq_base_swa", BASE)}
    types = layer_types(values, 6)
    return decoder(values, "gemma3_text") | rms_norm(values) | {
        "head_dim": head_dim(values),
        "rope_parameters": {FULL: rotary(values, "linear"), SLIDING: local},
        "query_pre_attn_scalar": attention_scalar(values, of_27b=62),
        "sliding_window": window or values.whole("context_length"),  # its class needs one
        "layer_types": types if window else [FULL] * len(types),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": values.real("final_logit_softcapping", 0.0, zero=True) or None,
    }


def attention_scalar(values: Metadata, of_27b: int) -> int:
    """The width that scales attention. No key has it: only the models of 27B, which have so many layers, have
    another one than that of their heads."""
    return even_width(values) if values.num_layers == of_27b else head_dim(values)


def layer_types(values: Metadata, period: int) -> list[str]:
    sliding = values.layers("attention.sliding_window_pattern", period, values.num_layers)
    return [SLIDING if one else FULL for one in sliding]


def phi3(values: Metadata) -> dict[str, Any]:
    parameters = longrope(values, only_even_width(values))
    original = parameters.get("original_max_position_embeddings", values.whole("context_length"))
    return decoder(values, "phi3") | rms_norm(values) | {
        "rope_parameters": parameters,
        "original_max_position_embeddings": original,  # its class takes this one
        "sliding_window": values.whole("attention.sliding_window", 0, zero=True) or None,
    }


def starcoder2(values: Metadata) -> dict[str, Any]:
    return decoder(values, "starcoder2") | layer_norm(values, "norm_epsilon") | {
        "head_dim": head_dim(values),
        "rope_parameters": rotary(values, "linear", "yarn"),
        "sliding_window": values.whole("attention.sliding_window", 0, zero=True) or None,
        "use_bias": has_bias(values, "attn_q"),
    }


def gpt2(values: Metadata) -> dict[str, Any]:
    heads = values.whole("attention.head_count")
    values.only("attention.head_count_kv", heads)
    only_even_width(values)
    return common(values) | {
        "model_type": "gpt2",
        "n_embd": values.whole("embedding_length"),
        "n_inner": values.whole("feed_forward_length"),
        "n_positions": values.whole("context_length"),
        "n_layer": values.num_layers,
        "n_head": heads,
    } | layer_norm(values, "layer_norm_epsilon")


def lfm2(values: Metadata) -> dict[str, Any]:
    """Layers without keys and values are short convolutions."""
    values.only("rope.dimension_count", only_even_width(values))
    counts = values.counts("attention.head_count_kv")
    if len(kv_heads := set(counts) - {0}) != 1:
        said = f"its metadata says lfm2.attention.head_count_kv = {shorten(counts)}"
        raise refusal(values.header, f"{said}, where only one count besides 0 is supported")
    return decoder(values, "lfm2", kv_heads.pop()) | rms_norm(values, "norm_eps") | {
        "rope_parameters": rotary(values, "linear", "yarn"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if count else "conv" for count in counts],
        "conv_L_cache": values.whole("shortconv.l_cache"),
        "conv_bias": has_bias(values, "shortconv.in_proj"),
    }


# orders of rows and columns, and inverses


def halves(heads: str) -> Order:
    """In halves that rotate together, instead of neighbours; `heads` is the field with their number."""

    def order(config: PreTrainedConfig, number: int) -> np.ndarray:
        return np.arange(number).reshape(getattr(config, heads), -1, 2).swapaxes(1, 2).ravel()

    return order


def by_key_head(config: PreTrainedConfig, number: int) -> np.ndarray | None:
    """Value heads of a delta net by their key heads; a file has the first of each key head, then the second.
    Queries and keys before them stay."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if keys == heads:
        return None
    width = 1 if number == heads else config.linear_value_head_dim
    rows = np.arange(number)
    before, of_values = np.split(rows, [number - heads * width])
    return np.concatenate([before, of_values.reshape(heads // keys, keys, width).swapaxes(0, 1).ravel()])


def minus_one(stored: np.ndarray) -> np.ndarray:
    return stored - np.float32(1)


def log_of_negative(stored: np.ndarray) -> np.ndarray:
    return np.log(-stored)


# tensors


def table(names: Mapping[str, str], **how: Any) -> dict[str, Stored]:
    """Places of parameters of the layers, by the names of their modules within a layer."""
    return {f"model.layers.*.{name}": Stored((f"blk.*.{stored}",), **how) for name, stored in names.items()}


ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
FEED_FORWARD = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {"model.embed_tokens": Stored(("token_embd",)), "lm_head": Stored(("output",))}
NORM = {"model.norm": Stored(("output_norm",))}
GEMMA_NORM = {"model.norm": Stored(("output_norm",), inverse=minus_one)}

QWEN2 = WHOLE | NORM | table(ATTENTION | FEED_FORWARD | NORMS)
GATE_UP = ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")
EXPERTS = table({"mlp.gate": "ffn_gate_inp", "mlp.experts.down_proj": "ffn_down_exps.weight"}) | {
    "model.layers.*.mlp.experts.gate_up_proj": Stored(GATE_UP)
}
SHARED_EXPERT = table(
    {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
)
LLAMA = (
    QWEN2
    | EXPERTS
    | table({"self_attn.q_proj": "attn_q"}, rows=halves("num_attention_heads"))
    | table({"self_attn.k_proj": "attn_k"}, rows=halves("num_key_value_heads"))
)
QWEN3 = QWEN2 | table(HEAD_NORMS)
GEMMA2 = WHOLE | GEMMA_NORM | table(ATTENTION | FEED_FORWARD) | table(GEMMA_NORMS, inverse=minus_one)
POST_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
DELTA_NET = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
QWEN35 = (
    WHOLE
    | GEMMA_NORM
    | table(ATTENTION | FEED_FORWARD | {"linear_attn.norm": "ssm_norm"})
    | table(POST_NORMS | HEAD_NORMS, inverse=minus_one)
    | table(DELTA_NET, rows=by_key_head)
    | table({"linear_attn.A_log": "ssm_a"}, rows=by_key_head, inverse=log_of_negative)
    | table({"linear_attn.out_proj": "ssm_out"}, columns=by_key_head)
)
GPT_OSS_EXPERTS = table({"mlp.experts.down_proj": "ffn_down_exps.weight"}, transposed=True) | {
    "model.layers.*.mlp.experts.gate_up_proj": Stored(GATE_UP, transposed=True, alternating=True),
    "model.layers.*.mlp.experts.gate_up_proj_bias": Stored(
        ("blk.*.ffn_gate_exps.bias", "blk.*.ffn_up_exps.bias"), alternating=True
    ),
    "model.layers.*.mlp.experts.down_proj_bias": Stored(("blk.*.ffn_down_exps.bias",)),
}
GPT_OSS = (
    WHOLE
    | NORM
    | table(ATTENTION | POST_NORMS)
    | table({"self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp"})
    | GPT_OSS_EXPERTS
)
PHI3_JOINED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GPT2_MATRICES = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GPT2 = {
    "transformer.wte": Stored(("token_embd",)),
    "transformer.wpe": Stored(("position_embd",)),
    "transformer.ln_f": Stored(("output_norm",)),
    "lm_head": Stored(("output",)),
    "transformer.h.*.ln_1": Stored(("blk.*.attn_norm",)),
    "transformer.h.*.ln_2": Stored(("blk.*.ffn_norm",)),
    **{
        f"transformer.h.*.{name}": Stored((f"blk.*.{stored}",), transposed=True)
        for name, stored in GPT2_MATRICES.items()
    },
}
LFM2_LAYERS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}

ARCHITECTURES = {
    "llama": Architecture(llama, LLAMA, (FACTORS,)),
    "qwen2": Architecture(qwen2, QWEN2),
    "qwen2moe": Architecture(qwen2moe, QWEN2 | EXPERTS | SHARED_EXPERT),
    "qwen3": Architecture(qwen3, QWEN3),
    "qwen3moe": Architecture(qwen3moe, QWEN3 | EXPERTS),
    "qwen35": Architecture(qwen35, QWEN35),
    "qwen35moe": Architecture(qwen35moe, QWEN35 | EXPERTS | SHARED_EXPERT),
    "gpt-oss": Architecture(gpt_oss, GPT_OSS),
    "stablelm": Architecture(stablelm, QWEN2),
    "gemma": Architecture(
        gemma, WHOLE | GEMMA_NORM | table(ATTENTION | FEED_FORWARD) | table(NORMS, inverse=minus_one)
    ),
    "gemma2": Architecture(gemma2, GEMMA2),
    "gemma3": Architecture(gemma3, GEMMA2 | table(HEAD_NORMS, inverse=minus_one)),
    "phi3": Architecture(phi3, QWEN2 | table(PHI3_JOINED), (LONG_FACTORS, SHORT_FACTORS)),
    "starcoder2": Architecture(
        starcoder2, QWEN2 | table({"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"})
    ),
    "gpt2": Architecture(gpt2, GPT2),
    "lfm2": Architecture(
        lfm2, WHOLE | {"model.embedding_norm": Stored(("token_embd_norm",))} | table(LFM2_LAYERS)
    ),
}
