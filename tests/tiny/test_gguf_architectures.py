"""Every architecture of GGUF files, and every value that changes what it computes.

A random model is written as llama.cpp's converter would, and must have the same log-probabilities when it is
read. Each case names another value, with which the model would differ: what a file says must matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speculon import LLM, SamplingParams
from speculon.checkpoints.headers import read_checkpoint
from speculon.core.errors import CorruptWeights, UnsupportedModel
from speculon.runtimes.torch.loading.gguf.architectures import ARCHITECTURES
from speculon.runtimes.torch.loading.gguf.weights import load_gguf
from speculon.runtimes.torch.loading.load import load_config, load_model, load_target
from speculon.runtimes.torch.model.compare import difference
from speculon.runtimes.torch.model.quantized import layers_of
from tests.rounding import assert_near, rounding
from tests.tiny.gguf_files import tiny, write_gguf

IDS = (torch.arange(2 * 70).reshape(2, 70) * 37 + 11) % 97 + 4
CPU = torch.device("cpu")


def positions(rope_type: str = "default", base: float = 10000.0, **others: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": base, **others}


def both(full: dict[str, Any], base: float = 10000.0) -> dict[str, Any]:
    """Of Gemma 3: of the layers that see all, and the base of those with a window."""
    return {"full_attention": full, "sliding_attention": positions(base=base)}


def yarn(**others: Any) -> dict[str, Any]:
    return positions("yarn", factor=4.0, original_max_position_embeddings=32, **others)


def longrope(**others: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.2, 1.5, 1.7], "long_factor": [1.5, 2.0, 3.0, 5.0]}
    own = {"attention_factor": 1.2, "partial_rotary_factor": 1.0}
    return positions("longrope", **{**factors, **own, **others})


@dataclass(frozen=True)
class Case:
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)  # of a config with which the same weights differ
    more: dict[str, Any] = field(default_factory=dict)  # keys that the converter does not write
    without: tuple[str, ...] = ()  # keys that it writes, but other files lack


SIX_WINDOWS = {"num_hidden_layers": 6, "sliding_window": 8}
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "block_auto_adjust_ff_dim": False,
}
PARTLY = positions(partial_rotary_factor=0.5)
DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "rope_parameters": PARTLY,
}
SHARED_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
SHARP_YARN = yarn(beta_fast=8.0, beta_slow=0.5, truncate=False)
CASES = {
    "llama": Case("llama", other={"rms_norm_eps": 1e-2}),
    "llama, heads wider than the hidden states": Case("llama", {"head_dim": 16}),
    "llama, tied": Case("llama", {"tie_word_embeddings": True}),
    "llama, biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, epsilon": Case("llama", {"rms_norm_eps": 1e-2}, {"rms_norm_eps": 1e-6}),
    "llama, base": Case("llama", {"rope_parameters": positions(base=5e5)}, {"rope_parameters": positions()}),
    "llama, no base": Case(
        "llama", other={"rope_parameters": positions(base=5e5)}, without=("llama.rope.freq_base",)
    ),
    "llama, linear": Case(
        "llama",
        {"rope_parameters": positions("linear", factor=4.0)},
        {"rope_parameters": positions("linear", factor=2.0)},
    ),
    "llama, linear by its old name": Case(
        "llama",
        {"rope_parameters": positions("linear", factor=4.0)},
        {"rope_parameters": positions()},
        {"llama.rope.scale_linear": 4.0},
        ("llama.rope.scaling.type", "llama.rope.scaling.factor"),
    ),
    "llama, yarn": Case(
        "llama", {"rope_parameters": yarn()}, {"rope_parameters": yarn(attention_factor=1.0)}
    ),
    "llama, yarn's attention": Case(
        "llama", {"rope_parameters": yarn(attention_factor=1.5)}, {"rope_parameters": yarn()}
    ),
    "llama, yarn's ramp": Case(
        "llama", {"rope_parameters": yarn(beta_fast=2.0, beta_slow=0.01)}, {"rope_parameters": yarn()}
    ),
    "mistral": Case("mistral", {"sliding_window": 8}, {"sliding_window": 9}),
    "mixtral": Case(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"num_local_experts": 4, "num_experts_per_tok": 3},
    ),
    "qwen2": Case(
        "qwen2", {"rope_parameters": positions(base=1e6)}, {"rope_parameters": positions(base=999999.0 / 2)}
    ),
    "qwen2, tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": Case("qwen2", {"rope_parameters": yarn()}, {"rope_parameters": positions()}),
    "qwen2moe": Case(
        "qwen2_moe",
        SHARED_EXPERTS,
        {"norm_topk_prob": True},
    ),
    "qwen3": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {"rms_norm_eps": 1e-2}),
    "qwen3, base": Case(
        "qwen3", {"rope_parameters": positions(base=1e6)}, {"rope_parameters": positions(base=1e5)}
    ),
    "qwen3, biases": Case("qwen3", {"attention_bias": True}),
    "qwen3moe": Case(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"norm_topk_prob": False},
    ),
    "qwen3moe, weights as they are": Case(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False},
        {"norm_topk_prob": True},
        {"qwen3moe.expert_weights_norm": False},
    ),
    "qwen35": Case("qwen3_5_text", DELTA_NETS, {"rms_norm_eps": 1e-2}),
    "qwen35, as many value heads as key heads": Case(
        "qwen3_5_text", DELTA_NETS | {"linear_num_value_heads": 2}
    ),
    "qwen35, tied": Case("qwen3_5_text", DELTA_NETS | {"tie_word_embeddings": True}),
    "qwen35, base": Case(
        "qwen3_5_text",
        DELTA_NETS | {"rope_parameters": positions(base=500.0, partial_rotary_factor=0.5)},
        {"rope_parameters": PARTLY},
    ),
    "qwen35, the whole head": Case(
        "qwen3_5_text",
        DELTA_NETS | {"rope_parameters": positions(partial_rotary_factor=1.0)},
        {"rope_parameters": PARTLY},
    ),
    "qwen35, yarn": Case(
        "qwen3_5_text",
        DELTA_NETS | {"rope_parameters": yarn(partial_rotary_factor=0.5)},
        {"rope_parameters": PARTLY},
    ),
    "qwen35, no interval": Case(
        "qwen3_5_text", DELTA_NETS, without=("qwen35.full_attention_interval",)
    ),
    "qwen35, another interval": Case(
        "qwen3_5_text",
        DELTA_NETS | {"layer_types": ["linear_attention", "full_attention"] * 2},
        more={"qwen35.full_attention_interval": 2},
    ),
    "qwen35, layers named": Case(
        "qwen3_5_text",
        DELTA_NETS | {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
        more={"qwen35.attention.recurrent_layers": [False, True]},
    ),
    "qwen35, longer convolutions": Case("qwen3_5_text", DELTA_NETS | {"linear_conv_kernel_dim": 5}),
    "qwen35moe": Case(
        "qwen3_5_moe_text", DELTA_NETS | SHARED_EXPERTS, {"num_experts_per_tok": 3}
    ),
    "gpt-oss": Case("gpt_oss", EXPERTS | {"rope_parameters": positions()}, {"sliding_window": 9}),
    "gpt-oss, base": Case(
        "gpt_oss", EXPERTS | {"rope_parameters": positions(base=150000.0)}, {"rope_parameters": positions()}
    ),
    "gpt-oss, yarn": Case(
        "gpt_oss",
        EXPERTS | {"rope_parameters": SHARP_YARN},
        {"rope_parameters": SHARP_YARN | {"truncate": True}},
    ),
    "gpt-oss, layers named": Case(
        "gpt_oss",
        EXPERTS
        | {"rope_parameters": positions(), "layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"gpt-oss.attention.sliding_window_pattern": [False, True]},
    ),
    "stablelm": Case("stablelm", {"rope_parameters": PARTLY}, {"layer_norm_eps": 1e-1}),
    "stablelm, the whole head": Case(
        "stablelm",
        {"rope_parameters": positions(partial_rotary_factor=1.0)},
        {"rope_parameters": PARTLY},
    ),
    "stablelm, biases": Case("stablelm", {"rope_parameters": PARTLY, "use_qkv_bias": True}),
    "stablelm, parallel": Case("stablelm", {"rope_parameters": PARTLY, "use_parallel_residual": True}),
    "gemma": Case("gemma", {"head_dim": 16}, {"hidden_act": "silu"}),
    "gemma2": Case("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}, {"query_pre_attn_scalar": 8}),
    "gemma2, softcap of attention": Case(
        "gemma2",
        {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 20.0},
        {"attn_logit_softcapping": 50.0},
    ),
    "gemma2, softcap of logits": Case(
        "gemma2",
        {"query_pre_attn_scalar": 8, "final_logit_softcapping": 10.0},
        {"final_logit_softcapping": 30.0},
    ),
    "gemma2, no softcaps": Case(
        "gemma2",
        {"query_pre_attn_scalar": 8},
        {"attn_logit_softcapping": None},
        without=("gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"),
    ),
    "gemma2, window": Case(
        "gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 8}, {"sliding_window": 4096}
    ),
    "gemma2, all layers with a window": Case(
        "gemma2",
        {"query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
        {"layer_types": None},
        {"gemma2.attention.sliding_window_pattern": 0},
    ),
    "gemma2, 27B": Case(
        "gemma2",
        {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8},
        {"query_pre_attn_scalar": 16},
    ),
    "gemma3": Case("gemma3_text", SIX_WINDOWS | {"query_pre_attn_scalar": 8}, {"sliding_window": 4096}),
    "gemma3, linear": Case(
        "gemma3_text",
        SIX_WINDOWS
        | {"query_pre_attn_scalar": 8, "rope_parameters": both(positions("linear", 1e6, factor=8.0))},
        {"rope_parameters": both(positions(base=1e6))},
    ),
    "gemma3, base": Case(
        "gemma3_text",
        SIX_WINDOWS | {"query_pre_attn_scalar": 8, "rope_parameters": both(positions(base=5e4))},
        {"rope_parameters": both(positions(base=1e6))},
    ),
    "gemma3, no base": Case(
        "gemma3_text",
        SIX_WINDOWS | {"query_pre_attn_scalar": 8, "rope_parameters": both(positions())},
        {"rope_parameters": both(positions(base=1e6))},
        without=("gemma3.rope.freq_base", "gemma3.rope.freq_base_swa"),
    ),
    "gemma3, local base": Case(
        "gemma3_text",
        SIX_WINDOWS | {"query_pre_attn_scalar": 8, "rope_parameters": both(positions(base=1e6), 500.0)},
        {"rope_parameters": both(positions(base=1e6))},
    ),
    "gemma3, layers named": Case(
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"gemma3.attention.sliding_window_pattern": [False, True, False]},
    ),
    "gemma3, no window": Case(
        "gemma3_text",
        {"query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
        {"layer_types": ["sliding_attention"] * 2},
        without=("gemma3.attention.sliding_window",),
    ),
    "gemma3, softcap of logits": Case(
        "gemma3_text",
        {"query_pre_attn_scalar": 8, "final_logit_softcapping": 10.0},
        {"final_logit_softcapping": None},
    ),
    "gemma3, 27B": Case(
        "gemma3_text",
        {"num_hidden_layers": 62, "head_dim": 16, "query_pre_attn_scalar": 8},
        {"query_pre_attn_scalar": 16},
    ),
    "phi3": Case("phi3", {"sliding_window": 8}, {"sliding_window": None}),
    "phi3, no window": Case("phi3", other={"rms_norm_eps": 1e-2}, more={"phi3.attention.sliding_window": 0}),
    "phi3, half of the head": Case(
        "phi3",
        {"rope_parameters": positions(partial_rotary_factor=0.5)},
        {"rope_parameters": positions(partial_rotary_factor=1.0)},
    ),
    "phi3, longrope": Case(
        "phi3",
        {"rope_parameters": longrope(), "original_max_position_embeddings": 96},
        {"rope_parameters": longrope(attention_factor=1.0)},
    ),
    "phi3, longrope beyond": Case(
        "phi3",
        {"rope_parameters": longrope(), "original_max_position_embeddings": 64},
        {"original_max_position_embeddings": 96},
    ),
    "starcoder2": Case(
        "starcoder2",
        {"rope_parameters": positions(base=999999.0)},
        {"rope_parameters": positions()},
    ),
    "starcoder2, window": Case("starcoder2", {"sliding_window": 8}, {"sliding_window": None}),
    "starcoder2, no biases": Case("starcoder2", {"use_bias": False}),
    "starcoder2, epsilon": Case("starcoder2", {"norm_epsilon": 1e-2}, {"norm_epsilon": 1e-5}),
    "gpt2": Case("gpt2", {"layer_norm_epsilon": 1e-2}, {"layer_norm_epsilon": 1e-5}),
    "gpt2, head of its own": Case("gpt2", {"tie_word_embeddings": False}),
    "lfm2": Case("lfm2", CONVOLUTIONS, {"norm_eps": 1e-2}),
    "lfm2, biases": Case("lfm2", CONVOLUTIONS | {"conv_bias": True}),
    "lfm2, base": Case(
        "lfm2",
        CONVOLUTIONS | {"rope_parameters": positions(base=1e6)},
        {"rope_parameters": positions(base=1e4)},
    ),
    "lfm2, longer convolutions": Case("lfm2", CONVOLUTIONS | {"conv_L_cache": 5}),
}


def written(case: Case, folder: Path, **how: Any) -> tuple[PreTrainedModel, Path]:
    model = tiny(case.model_type, **case.config)
    how = {"more": case.more, "without": case.without, **how}
    return model, write_gguf(model, folder / "tiny.gguf", **how)


def loaded(path: Path) -> PreTrainedModel:
    checkpoint = read_checkpoint(path)
    return load_model(checkpoint, load_config(checkpoint, False), torch.float32, CPU, False).eval()


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel) -> torch.Tensor:  # [B, T, V]
    return model(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, path = written(case, tmp_path)
    found, expected = (log_probabilities(one) for one in (loaded(path), model))
    assert_near(found, expected, model.config.num_hidden_layers)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.other])
def test_another_value_is_seen(name: str) -> None:
    """The planted error of the test above, for each value."""
    case = CASES[name]
    model, other = tiny(case.model_type, **case.config), tiny(case.model_type, **case.config | case.other)
    other.load_state_dict(model.state_dict())
    off = difference(log_probabilities(other), log_probabilities(model))
    assert off > 4 * rounding(model.config.num_hidden_layers)


def test_every_architecture_has_a_case(tmp_path: Path) -> None:
    seen = set()
    for name, case in CASES.items():
        if "," not in name:
            seen.add(read_checkpoint(written(case, tmp_path)[1]).architecture)
    assert seen == {*ARCHITECTURES}


FIRST = {name: case for name, case in CASES.items() if "," not in name}


@pytest.mark.parametrize("name", FIRST)
def test_texts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model, path = written(FIRST[name], tmp_path)
    ids = IDS[:1, :30]
    whole = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=[2, 3], pad_token_id=2)
    expected = [*takewhile(lambda token: token not in (2, 3), whole[0, 30:].tolist())]
    with LLM(str(path), dtype="float32", tokenizer=None, warmup=False) as llm:
        found = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=10, temperature=0))[0]
        assert found.outputs[0].token_ids == expected


@pytest.mark.parametrize("block_type", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("name", FIRST)
def test_packed_layers_are_the_same_numbers(
    name: str, block_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 bits are rounded to those of packed layers, so they are near."""
    monkeypatch.setattr("speculon.runtimes.torch.loading.quantization.native_bf16", lambda: False)
    model, path = written(FIRST[name], tmp_path, quantise=block_type)
    config = load_config(read_checkpoint(path), False)
    packed = load_gguf(path, config, torch.float32, packed_on=CPU).eval()
    found, expected = (log_probabilities(one) for one in (packed, loaded(path)))
    if block_type == "Q4_0":
        assert_near(found, expected, model.config.num_hidden_layers)
    else:
        assert (found - expected).abs().median() < 0.02 * expected.abs().max()
    assert bool([*layers_of(packed)]) == (name != "gpt2")  # whose layers are transposed ones


def test_factors_for_each_length_are_used(tmp_path: Path) -> None:
    """Up to the original length the short ones, beyond it the long ones."""
    model, path = written(CASES["phi3, longrope beyond"], tmp_path)
    with torch.inference_mode():
        for length in (60, 70):
            ids = IDS[:, :length]
            assert_near(loaded(path)(ids).logits, model(ids).logits, 2)
    assert load_target(path).max_context == 64


def test_prediction_layers_are_left_out(tmp_path: Path) -> None:
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    names = ("attn_q", "nextn.eh_proj", "nextn.enorm")
    tensors = {f"blk.4.{name}.weight": torch.ones(4) for name in names}
    model, path = written(FIRST["qwen35"], tmp_path, more=more, tensors=tensors)
    assert_near(log_probabilities(loaded(path)), log_probabilities(model), 4)
    assert read_checkpoint(path).num_layers == 4
    beyond = {"blk.5.nextn.enorm.weight": torch.ones(4)}
    _, path = written(FIRST["qwen35"], tmp_path, more=more, tensors=beyond)
    with pytest.raises(UnsupportedModel, match="it has a tensor blk.5.nextn.enorm.weight"):
        load_target(path)


def test_experts_in_blocks_of_4_bit_floats(tmp_path: Path) -> None:
    """The type of the published files of GPT-OSS."""
    model, path = written(FIRST["gpt-oss"], tmp_path, quantise="MXFP4")
    experts = loaded(path).model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        exact = getattr(model.model.layers[0].mlp.experts, name)
        error = getattr(experts, name) - exact
        assert 0 < error.std() < 0.2 * exact.std()


# what is refused


@pytest.mark.parametrize("name", FIRST)
def test_an_unknown_key_is_named(name: str, tmp_path: Path) -> None:
    case = FIRST[name]
    architecture = read_checkpoint(written(case, tmp_path)[1]).architecture
    key = f"{architecture}.foo"
    _, path = written(case, tmp_path, more={key: 3})
    words = rf"its metadata says {key} = 3, which speculon does not know; take its safetensors files"
    with pytest.raises(UnsupportedModel, match=words):
        load_target(path)


@pytest.mark.parametrize("name", FIRST)
def test_an_unknown_tensor_is_named(name: str, tmp_path: Path) -> None:
    for tensor in ("blk.0.attn_rot_embd.weight", "rope_freqs.odd", "blk.6.attn_norm.weight"):
        _, path = written(FIRST[name], tmp_path, tensors={tensor: torch.ones(4)})
        with pytest.raises(UnsupportedModel, match=rf"it has a tensor {tensor}, for which"):
            load_target(path)


REFUSED = {
    "llama.attention.causal": False,
    "llama.rope.dimension_count": 4,
    "llama.attention.value_length": 4,
    "llama.attention.scale": 0.2,
    "llama.pooling_type": 1,
    "llama.rope.scaling.attn_factor": 1.5,
    "llama.attention.head_count_kv": [2, 4],
    "qwen2.attention.sliding_window": 8,
    "qwen2.rope.dimension_sections": [1, 1, 2, 0],
    "qwen3.rope.scaling.yarn_beta_fast": 8.0,
    "qwen3moe.expert_gating_func": 2,
    "qwen3moe.expert_weights_scale": 2.5,
    "qwen3moe.leading_dense_block_count": 1,
    "qwen2moe.expert_gating_func": 2,
    "gemma2.rope.freq_base_swa": 500.0,
    "gemma3.attn_logit_softcapping": 20.0,
    "gemma3.rope.scaling.type": "yarn",
    "qwen35.rope.dimension_count": 3,
    "qwen35.attention.value_length": 4,
    "qwen35moe.expert_gating_func": 2,
    "gpt-oss.expert_gating_func": 2,
    "gpt-oss.rope.freq_base_swa": 500.0,
    "gpt-oss.rope.scaling.type": "linear",
    "stablelm.rope.scaling.type": "yarn",
    "stablelm.attention.key_length": 16,
    "phi3.attention.key_length": 16,
    "phi3.rope.scaling.type": "yarn",
    "starcoder2.rope.dimension_count": 4,
    "gpt2.rope.freq_base": 10000.0,
    "lfm2.attention.head_count_kv": [0, 2, 4],
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_value_that_cannot_be_had_is_named(key: str, tmp_path: Path) -> None:
    name = key.split(".", maxsplit=1)[0]
    factor = {f"{name}.rope.scaling.factor": 4.0} if key.endswith("scaling.type") else {}
    _, path = written(FIRST[name], tmp_path, more={key: REFUSED[key], **factor})
    with pytest.raises(UnsupportedModel) as caught:
        load_target(path)
    words = str(caught.value)
    assert words.endswith("; take its safetensors files")
    others = ("RoPE scaling (factor 4) is not supported", "rotary dimensions of 8 are not supported")
    assert key in words or any(one in words for one in others)  # which say two values at once


IMPOSSIBLE: dict[str, Any] = {
    "block_count": 10**9,
    "embedding_length": "many",
    "attention.head_count_kv": 2.5,
    "attention.layer_norm_rms_epsilon": -1.0,
    "rope.freq_base": 0.0,
    "context_length": True,
    "attention.head_count": 0,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_value_is_named(name: str, tmp_path: Path) -> None:
    key = f"llama.{name}"
    _, path = written(FIRST["llama"], tmp_path, more={key: IMPOSSIBLE[name]})
    with pytest.raises(CorruptWeights, match=key):
        load_target(path)


@pytest.mark.parametrize("used", [None, 0, 5])
@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe"])
def test_an_impossible_number_of_experts_is_named(name: str, used: int | None, tmp_path: Path) -> None:
    """None at all would leave them all out of the sum."""
    key = f"{'llama' if name == 'mixtral' else name}.expert_used_count"
    changed: dict[str, Any] = {"without": (key,)} if used is None else {"more": {key: used}}
    _, path = written(CASES[name], tmp_path, **changed)
    with pytest.raises(CorruptWeights, match=key):
        load_target(path)


def test_what_the_class_of_a_config_refuses_is_told(tmp_path: Path) -> None:
    _, path = written(FIRST["llama"], tmp_path, more={"llama.attention.head_count": 3})
    with pytest.raises(UnsupportedModel, match="not a multiple of the number of attention heads"):
        load_target(path)


def test_a_missing_value_is_named(tmp_path: Path) -> None:
    key = "qwen3.attention.layer_norm_rms_epsilon"
    _, path = written(FIRST["qwen3"], tmp_path, without=(key,))
    with pytest.raises(CorruptWeights, match=f"its metadata has no {key}"):
        load_target(path)


def test_heads_of_an_odd_width_are_refused(tmp_path: Path) -> None:
    odd = {f"qwen3.attention.{name}_length": 7 for name in ("key", "value")}
    _, path = written(FIRST["qwen3"], tmp_path, more=odd)
    with pytest.raises(UnsupportedModel, match="its heads have 7 dimensions, which do not rotate in pairs"):
        load_target(path)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("qwen35", {"qwen35.ssm.group_count": 4}, "6 value heads of 96 dimensions in all, for 4 key heads"),
        ("qwen35", {"qwen35.ssm.inner_size": 97}, "6 value heads of 97 dimensions in all, for 2 key heads"),
        ("qwen35", {"qwen35.nextn_predict_layers": 4}, "all its layers are of multi-token prediction"),
        ("qwen35moe", {"qwen35moe.expert_weights_norm": False}, "whose weights do not add up to 1"),
        ("llama", {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_weights_norm": False},
         "whose weights do not add up to 1"),
    ],
)
def test_values_that_no_class_has_are_named(
    name: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, path = written(FIRST[name], tmp_path, more=more)
    with pytest.raises(UnsupportedModel, match=words):
        load_target(path)


def test_factors_of_another_number_are_refused(tmp_path: Path) -> None:
    _, path = written(FIRST["llama"], tmp_path, tensors={"rope_freqs.weight": torch.ones(3) * 2})
    with pytest.raises(CorruptWeights, match="3 factors for 8 rotary dimensions"):
        load_target(path)


@pytest.mark.parametrize("kept", ["long", "short"])
def test_factors_for_one_length_alone_are_refused(kept: str, tmp_path: Path) -> None:
    _, path = written(FIRST["phi3"], tmp_path, tensors={f"rope_factors_{kept}.weight": torch.ones(4)})
    with pytest.raises(UnsupportedModel, match="without the other"):
        load_target(path)


@pytest.mark.parametrize("name", FIRST)
def test_another_shape_is_named(name: str, tmp_path: Path) -> None:
    other = {"output.weight": torch.ones(4, 8)}
    _, path = written(FIRST[name], tmp_path, tensors=other, leave_out="lm_head")
    with pytest.raises(CorruptWeights, match=r"output.weight: its shape is \(4, 8\), the config says"):
        load_target(path)
