"""A fused layer computes what the stock layer does; one that does not is refused."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.load_check import paged_logits
from speculon.runtimes.torch.model import block as blocks
from speculon.runtimes.torch.model import fuse as fusing
from speculon.runtimes.torch.model import linear
from speculon.runtimes.torch.model.block import (
    Attention,
    CannotReplace,
    FusedNorm,
    PagedLayer,
    fused_norm,
    same_norm,
)
from speculon.runtimes.torch.model.linear import (
    Linear,
    Packed,
    SideBySide,
    WeightLayout,
    joined,
    packable,
    packed,
    plain,
)
from speculon.runtimes.torch.model.target import Target
from tests.rounding import assert_near
from tests.tiny.conftest import TINY, build, tiny_model

# one loop, none of their own code
WHOLE = {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "phi3", "gpt_oss", "smollm3", "gemma3"}
LAYERS = {"gemma2"}  # fused layers in the stock model's loop


class Stock(nn.Module):
    """An RMS norm as most checkpoints have it, in separate operations."""

    def __init__(self, width: int = 8, plus: float = 0.0, eps: float = 1e-5):
        super().__init__()
        self.weight, self.plus, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), plus, eps

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * (self.plus + self.weight)
        )


class TinyRMSNorm(Stock):
    pass


@pytest.mark.parametrize("plus", [0.0, 1.0])
def test_a_norm_is_found_with_weight_w_and_one_plus_w(plus: float) -> None:
    stock = TinyRMSNorm(plus=plus)
    torch.testing.assert_close(fused_norm(stock).weight, stock.weight + plus)


@pytest.mark.parametrize(
    "planted",
    [{"plus": 1.0}, {"plus": 1e-3}, {"eps": 1e-3}],
    ids=["1 + w", "a small shift", "another epsilon"],
)
def test_a_planted_difference_of_a_norm_is_found(planted: dict[str, float]) -> None:
    stock = TinyRMSNorm(**planted)
    assert not same_norm(stock, FusedNorm(stock.weight.detach(), 1e-5))


@pytest.mark.parametrize("other", [nn.LayerNorm(8), nn.Linear(8, 8), Stock(), TinyRMSNorm(plus=1e-3)])
def test_another_norm_is_refused(other: nn.Module) -> None:
    with pytest.raises(CannotReplace):
        fused_norm(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("layout", [Linear, packed])
def test_joined_layers_compute_what_each_computes(
    layout: WeightLayout, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    stock = [nn.Linear(32, n, bias=n != 8, dtype=dtype) for n in (48, 8, 24)]
    x = torch.randn(rows, 32, dtype=dtype)
    with torch.inference_mode():
        expected = torch.cat([layer(x) for layer in stock], -1)
        beside, one = joined(stock, share=True), joined(stock, share=False)
        assert isinstance(beside, SideBySide)
        assert isinstance(one, Packed if layout is packed and packable(dtype, x.device) else Linear)
        assert beside.parts[0].weight.data_ptr() == stock[0].weight.data_ptr()
        alone = joined(stock[:1], share=False)
        if isinstance(alone, Linear):
            assert alone.weight.data_ptr() != stock[0].weight.data_ptr(), (
                "what that lies in may be a mapped file"
            )
        for found in (beside(x), one(x)):
            assert_near(found, expected)


@pytest.mark.parametrize("times, layout", [([2.0, 1.0], packed), ([1.0, 2.0], Linear)])
def test_the_faster_layout_is_chosen(
    times: list[float], layout: WeightLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        linear, "least_times", lambda ways: [way() or time for way, time in zip(ways, times, strict=True)]
    )
    if not packable(torch.float32, torch.device("cpu")):
        pytest.skip("nothing is packed here")
    assert linear.fastest.__wrapped__(torch.float32, 1) is layout


def test_interruptions_do_not_choose_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster product is interrupted in all calls but two."""
    clock, calls = [0.0], count()

    def faster() -> None:
        clock[0] += 1.0 if next(calls) < 2 else 30.0

    def slower() -> None:
        clock[0] += 2.0

    monkeypatch.setattr(linear, "perf_counter", lambda: clock[0])
    assert linear.least_times([slower, faster]) == [2.0, 1.0]


def test_only_plain_linear_layers_are_joined() -> None:
    class Adapted(nn.Linear):
        pass

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    assert plain(nn.Linear(4, 4))
    assert not any(map(plain, (Adapted(4, 4), hooked, nn.Identity(), None)))


def fused(name: str, dtype: torch.dtype = torch.float32, **how: Any) -> Target:
    return wrap_model(copy.deepcopy(tiny_model(name)).to(dtype), name=name, **how)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(None, torch.float32, id="shared, fp32"),
        pytest.param(Linear, torch.float32, id="in rows, fp32"),
        pytest.param(packed, torch.bfloat16, id="packed, bf16"),
    ],
)
@pytest.mark.parametrize("name", TINY)
def test_every_architecture_is_fused_as_far_as_its_structure_allows(
    name: str, layout: WeightLayout | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda dtype, threads: layout)
    fusion = fused(name, dtype, share=layout is None).runner
    assert fusion.one_loop == (name in WHOLE), str(fusion)
    assert fusion.fused == (fusion.layers if name in WHOLE | LAYERS else 0), str(fusion)
    assert bool(fusion.refused) == (name not in WHOLE)


def test_a_model_in_memory_is_not_modified() -> None:
    model = build("llama")
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    target = wrap_model(model, share=False)
    assert target.model is not model and target.num_parameters == sum(p.numel() for p in model.parameters())
    for name, tensor in model.state_dict().items():
        assert (tensor.data_ptr(), True) == (before[name][0], bool((tensor == before[name][1]).all()))


def swapped(attention: Attention) -> Attention:
    """k and v exchanged in the product of the three."""
    assert isinstance(attention.qkv, SideBySide)
    q, k, v = attention.qkv.parts
    attention.qkv = SideBySide([q, v, k])
    return attention


def without_bias(attention: Attention) -> Attention:
    assert isinstance(attention.qkv, SideBySide) and attention.qkv.parts[1].bias is not None
    attention.qkv.parts[1].bias = None
    return attention


def interleaved(attention: Attention) -> Attention:
    assert isinstance(attention.rotary, blocks.Rotary)
    attention.rotary.rotates = False
    return attention


def broken_block(change: Callable[[Attention], Attention]) -> Callable[..., PagedLayer]:
    def build_wrong(*args: Any) -> PagedLayer:
        block = blocks.fused_block(*args)
        block.attention = change(block.attention)
        return block

    return build_wrong


def one_plus(*args: Any) -> PagedLayer:
    block = blocks.fused_block(*args)
    norms: Any = tuple(norm and FusedNorm(1 + norm.weight, norm.eps) for norm in block.norms)
    block.norms = norms
    return block


def up_for_gate(*args: Any) -> PagedLayer:
    block = blocks.fused_block(*args)
    assert isinstance(block.mlp, blocks.Gated) and isinstance(block.mlp.gate_up, SideBySide)
    block.mlp.gate_up = SideBySide(list(reversed(block.mlp.gate_up.parts)))
    return block


PLANTED = {
    "k and v exchanged": broken_block(swapped),
    "a bias missed": broken_block(without_bias),
    "positions forgotten": broken_block(interleaved),
    "a norm with 1 + w": one_plus,
    "gate and up exchanged": up_for_gate,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_block_is_not_used(planted: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "fused_block", PLANTED[planted])
    target = fused("qwen2", dtype)  # the one with biases
    assert target.runner.fused == 0 and not target.runner.one_loop
    assert target.runner.refused["Qwen2DecoderLayer computes something else"] == 2


def test_a_layer_that_does_more_than_its_parts_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("granite", residual_multiplier=0.7)
    fusion = wrap_model(model).runner
    assert fusion.fused == 0 and "computes something else" in str(fusion)


def test_a_model_that_does_more_than_its_layers_has_no_loop() -> None:
    fusion = wrap_model(build("granite", embedding_multiplier=3.0)).runner
    assert (
        fusion is not None
        and fusion.fused == 2
        and not fusion.one_loop
        and "does more than its layers" in str(fusion)
    )


def test_a_layer_that_differs_at_the_end_of_the_context_is_not_fused() -> None:
    scaled = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 64,
    }
    model = build("ministral3", rope_parameters=scaled)  # whose queries grow from position 64 on
    fusion = wrap_model(model).runner
    assert fusion.fused == 0 and "computes something else" in str(fusion)


def test_a_layer_with_hooks_is_not_fused() -> None:
    model, seen = build("llama"), []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    target = wrap_model(model)
    assert target.runner.fused == 1
    assert target.runner.refused["LlamaDecoderLayer has hooks"] == 1 and seen


@pytest.mark.parametrize("place", ["", "model.norm", "model.layers.1.input_layernorm", "lm_head"])
def test_hooks_on_a_module_are_still_called(place: str) -> None:
    model, seen = build("llama"), []
    model.get_submodule(place).register_forward_hook(lambda module, args, out: seen.append(place))
    target = wrap_model(model)
    seen.clear()
    paged_logits(target)
    assert seen == [place] * 2  # once in each of two calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_norms_in_fp32_are_computed_in_fp32(dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_model("gpt_oss")).to(dtype)  # of which transformers keeps the norms in fp32
    model.model.embed_tokens.weight.data.mul_(200)  # what squares of fp16 do not hold
    for module in model.modules():
        if type(module).__name__ == "GptOssRMSNorm":
            module.float()
    target, stock = wrap_model(model), wrap_model(model, fused=False)
    found, expected = paged_logits(target), paged_logits(stock)
    assert found.isfinite().all() and (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_without_packed_products_the_module_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # as in a build for Macs
    assert not runpy.run_path(linear.__file__)["packable"](torch.float32, torch.device("cpu"))


def test_layers_that_are_not_called_are_not_fused() -> None:
    model = build("llama")
    # for images, say: numbered alike
    model.tower = copy.deepcopy(model.model.layers, {id(model.config): model.config})
    fusion = wrap_model(model).runner
    assert str(fusion) == "2 of 2 layers, one loop"


def test_a_layer_of_another_structure_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(*args: Any) -> PagedLayer:
        raise AttributeError("scaling")

    monkeypatch.setattr(fusing, "fused_block", odd)
    fusion = fused("llama").runner
    assert fusion.refused["LlamaDecoderLayer has another structure (AttributeError)"] == 2


def test_without_fusing_nothing_is_replaced() -> None:
    target = fused("llama", fused=False)
    assert not target.runner.chosen and {type(m).__name__ for m in target.model.modules()} >= {
        "LlamaDecoderLayer",
        "LlamaRMSNorm",
    }


@pytest.mark.parametrize("reads_bias", [True, False])
def test_a_head_whose_bias_the_model_reads_stays(reads_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT and its kin take the bias of a new head, which a packed one has not."""

    def put(model: Any, new: nn.Module) -> None:
        model.lm_head = new
        model.of_head = new.bias if reads_bias else None

    def refused(*_: Any, **__: Any) -> None:
        raise CannotReplace("planted")

    model = copy.deepcopy(tiny_model("llama"))
    monkeypatch.setattr(fusing, "head_is_packed", lambda *_: True)
    monkeypatch.setattr(fusing, "choose_loop", refused)
    monkeypatch.setattr(type(model), "set_output_embeddings", put)
    head = wrap_model(model, share=False).model.get_output_embeddings()
    assert isinstance(head, nn.Linear if reads_bias else fusing.Fused)
