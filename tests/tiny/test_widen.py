"""A widened model: larger, with the same function; what cannot be widened is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from speculon.core.errors import ConfigError, InvalidParameter, UnsupportedModel
from speculon.loading.load import wrap_model
from speculon.loading.load_check import paged_logits
from speculon.measure.bench.widen import PARTS, SCALE, gated_mlps, longer, widen, widen_target
from speculon.target.target import Target
from tests.tiny.conftest import build as build_model
from tests.tiny.conftest import tiny_model


def logits_of(target: Target) -> torch.Tensor:
    return paged_logits(target)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_widened_model_is_larger_and_computes_the_same(name: str) -> None:
    model = copy.deepcopy(tiny_model(name))
    target = wrap_model(copy.deepcopy(model), name=name, fused=False)
    before, small_one = logits_of(target), target.num_parameters
    widen_target(target, 1)
    assert small_one < 100_000 and abs(target.num_parameters - 1_000_000) < 10_000
    assert float((logits_of(target) - before).abs().max()) <= 1e-5 * float(before.abs().max())
    for mlp in gated_mlps(target.model):
        new = slice(48, mlp.down_proj.in_features)  # columns
        gate, up, down = (getattr(mlp, part).weight for part in PARTS)
        assert gate.shape == up.shape == down.T.shape and len(gate) > 1000
        assert not down[:, new].any() and all((rows[new].std(-1) > SCALE / 2).all() for rows in (gate, up))
    before_stock = model(torch.arange(9)[None]).logits
    widen(model, 1, name)
    assert torch.equal(
        next(gated_mlps(model)).gate_proj.weight, next(gated_mlps(target.model)).gate_proj.weight
    )
    torch.testing.assert_close(model(torch.arange(9)[None]).logits, before_stock, rtol=0, atol=1e-4)


def test_new_columns_that_reach_the_output_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: output weights that are not zero."""
    monkeypatch.setattr(
        "speculon.measure.bench.widen.longer", lambda weight, more, dim: longer(weight, more + 0.01, dim)
    )
    target = wrap_model(copy.deepcopy(tiny_model("llama")), name="llama", fused=False)
    with pytest.raises(UnsupportedModel, match="llama: widening changed the logits by"):
        widen_target(target, 1)


def test_what_cannot_be_widened_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"phi3 \(.*\) has no MLP of linear gate_proj, up_proj, down_proj"
    ):
        widen(tiny_model("phi3"), 1, "phi3")
    target = wrap_model(copy.deepcopy(tiny_model("llama")), name="llama", fused=False)
    widen_target(target, 2)
    for millions in (1, 2):
        with pytest.raises(
            InvalidParameter, match=rf"widen = {millions}: llama has 2.0 million parameters already"
        ):
            widen_target(target, millions)
    with pytest.raises(InvalidParameter, match=r"widen = 1000000000: needs \d+ bytes more, \d+ are free"):
        widen_target(target, 10**9)


def test_a_fused_target_is_not_widened() -> None:
    with pytest.raises(ConfigError, match="llama: a fused target cannot be widened"):
        widen_target(wrap_model(tiny_model("llama"), name="llama"), 1)


def test_biases_are_widened_too() -> None:
    model = build_model("llama", seed=3, mlp_bias=True)
    before = model(torch.arange(9)[None]).logits
    widen(model, 1, "llama")
    torch.testing.assert_close(model(torch.arange(9)[None]).logits, before, rtol=0, atol=1e-4)
