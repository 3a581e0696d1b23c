"""A fused module computes what the stock one does, and one that does not is left where it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speculon.models import fuse as fusing
from speculon.models.fuse import NativeRMSNorm, fuse, native_norm, same
from tests.tiny.conftest import TINY, build

STOCK_NORMS = {"gpt_neox", "gpt2"}  # LayerNorm: native already
ONE_PLUS_WEIGHT = {"gemma2", "gemma3"}


class Norm(nn.Module):
    """An RMS norm as most checkpoints have it, in separate operations."""

    def __init__(self, width: int = 8, plus: float = 0.0, eps: float = 1e-5):
        super().__init__()
        self.weight, self.plus, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), plus, eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * (self.plus + self.weight)


class TinyRMSNorm(Norm):
    pass


def native(stock: Norm) -> NativeRMSNorm:
    new = native_norm(stock)
    assert new is not None
    return new


def test_an_equal_norm_is_found_equal() -> None:
    stock = TinyRMSNorm()
    assert same(stock, native(stock))


@pytest.mark.parametrize(
    "planted",
    [TinyRMSNorm(plus=1.0), TinyRMSNorm(plus=1e-3), TinyRMSNorm(eps=1e-3)],
    ids=["1 + w", "a small shift", "another epsilon"],
)
def test_a_planted_difference_is_seen(planted: Norm) -> None:
    wrong = NativeRMSNorm(planted.weight, 1e-5)
    assert not same(planted, wrong)


def test_other_modules_are_left_alone() -> None:
    assert native_norm(nn.LayerNorm(8)) is None and native_norm(nn.Linear(8, 8)) is None and native_norm(Norm()) is None


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_keeps_its_weights_and_its_logits(name: str) -> None:
    model = build(TINY[name][0], **TINY[name][1])
    names, ids = set(model.state_dict()), torch.arange(3, 20)[None]
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        replaced = fuse(model)
        after = model(ids, use_cache=False).logits
    assert bool(replaced) == (name not in STOCK_NORMS | ONE_PLUS_WEIGHT)
    assert set(model.state_dict()) == names
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


def test_a_norm_that_differs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(fusing, "native_norm", lambda stock: NativeRMSNorm(stock.weight, 0.5) if native_norm(stock) else None)
    assert fuse(model) == 0
