"""What tells a fused layer from a wrong one in coarse dtypes: forms of norms, and errors against fp32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.loading.load_check import logits_in_fp32, stock_logits
from speculon.runtimes.torch.model import fuse as fusing
from speculon.runtimes.torch.model.block import (
    CannotReplace,
    FusedNorm,
    PagedLayer,
    fused_block,
    fused_norm,
    same_norm,
)
from speculon.runtimes.torch.model.compare import nearly
from tests.tiny.conftest import TINY, tiny_model

COARSE = [torch.bfloat16, torch.float16]
ROWS, WIDTH = 8, 256


def gemma_norm(dtype: torch.dtype = torch.bfloat16) -> Gemma3RMSNorm:
    """One with weights as large as in late layers of Gemma 3."""
    norm = Gemma3RMSNorm(WIDTH)
    norm.weight.data = torch.linspace(-1.0, 900.0, WIDTH)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *COARSE])
def test_one_plus_w_is_found_where_weights_are_large(dtype: torch.dtype) -> None:
    stock = gemma_norm(dtype)
    found = fused_norm(stock)
    assert torch.equal(found.weight, 1 + stock.weight.float())
    assert same_norm(stock, found)


@pytest.mark.parametrize("dtype", COARSE)
def test_the_one_that_is_lost_would_be_seen(dtype: torch.dtype) -> None:
    stock = gemma_norm(dtype)
    wrong = FusedNorm(stock.weight.detach(), stock.eps)
    x = torch.randn(3, WIDTH).to(dtype)
    expected = stock(x).float()
    near = (wrong(x).float() - expected).abs() <= 2**-7 * expected.abs().amax(-1, keepdim=True)
    assert near.all(), "a tolerance relative to the largest value does not separate them"
    assert not same_norm(stock, wrong)


def test_a_norm_in_bf16_is_refused_where_the_stock_one_is_in_fp32() -> None:
    stock = gemma_norm()
    assert not same_norm(stock, FusedNorm((1 + stock.weight).detach() * (1 + 2**-6), stock.eps))

    class WrongRMSNorm(Gemma3RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.02

    wrong = WrongRMSNorm(WIDTH).to(torch.bfloat16)
    with pytest.raises(CannotReplace, match="differs"):
        fused_norm(wrong)


def layer(seed: int) -> tuple[Tensor, Tensor]:
    """A layer's result [T, D] with a few very large activations, and what roundings to bf16 make of it."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(ROWS, WIDTH, generator=generator)
    truth[:, :2] *= 2000
    return truth, truth * (1 + 2**-8 * torch.randn(ROWS, WIDTH, generator=generator))


def test_errors_of_rounding_are_near() -> None:
    for seed in range(50):
        truth, expected = layer(seed)
        noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 + seed))
        assert nearly(truth * (1 + 2**-8 * noise), expected, truth), seed


WRONG = {
    "twice the error": lambda x, truth: truth + 2 * (x - truth),
    "one head of four": lambda x, truth: torch.cat([x[:, :64], x[:, 64:128] * 1.02, x[:, 128:]], -1),
    "one column": lambda x, truth: torch.cat([x[:, :9], x[:, 9:10] + 90, x[:, 10:]], -1),
    "one value is not a number": lambda x, truth: x.index_fill(1, torch.tensor([9]), torch.nan),
    "another shape": lambda x, truth: x[:, 1:],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_is_not_near(wrong: str) -> None:
    truth, expected = layer(0)
    again, _ = layer(0)
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    assert not nearly(WRONG[wrong](again * (1 + 2**-8 * noise), truth), expected, truth)


@pytest.mark.parametrize("name", TINY)
def test_logits_in_fp32_are_those_of_a_model_in_fp32(name: str) -> None:
    """Up to buffers that were rounded when the model was made, such as scales of embeddings."""
    coarse = wrap_model(copy.deepcopy(tiny_model(name)).bfloat16(), fused=False)
    exact = wrap_model(copy.deepcopy(tiny_model(name)).bfloat16().float(), fused=False)
    found, expected = logits_in_fp32(coarse), stock_logits(exact)
    assert found is not None and found.dtype is torch.float32
    assert (found - expected).abs().max() <= 0.02 * (stock_logits(coarse) - expected).abs().max()
    assert logits_in_fp32(exact) is None


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_further_from_fp32_than_the_stock_one_is_refused(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inexact(*args: Any) -> PagedLayer:
        block = fused_block(*args)
        norm, *others = block.norms
        assert norm is not None
        tilted = norm.weight * torch.linspace(0.95, 1.05, len(norm.weight)).to(norm.weight)
        block.norms = (FusedNorm(tilted, norm.eps), *others)  # type: ignore[assignment]
        return block

    model = copy.deepcopy(tiny_model(name)).to(dtype)
    monkeypatch.setattr(fusing, "fused_block", inexact)
    fusion = wrap_model(model).runner
    assert fusion.fused == 0, "the comparison of layers sees it first"
    monkeypatch.setattr(fusing, "check", lambda *args: None)
    with pytest.raises(UnsupportedModel, match="times as far from those in fp32"):
        wrap_model(model)
