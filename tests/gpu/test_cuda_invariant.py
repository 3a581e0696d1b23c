"""On a CUDA device: a row's logits are bitwise equal in every batch, or the target refuses to say so."""

from __future__ import annotations

import copy

import pytest
import torch

from speculon.runtimes.torch.loading.batch_check import differing
from speculon.runtimes.torch.loading.invariant import make_invariant
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.captured import Captured
from speculon.runtimes.torch.model.pieces import CannotBeInvariant
from tests.tiny.conftest import TINY, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", sorted(TINY))
def test_logits_are_bitwise_equal_in_every_batch(name: str, dtype: torch.dtype) -> None:
    target = wrap_model(copy.deepcopy(tiny_model(name)).to("cuda", dtype), name=name, share=False)
    try:
        make_invariant(target)
    except CannotBeInvariant as reason:
        pytest.skip(str(reason))
    assert differing(target) is None


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_common_models_are_invariant_in_bf16(name: str) -> None:
    target = wrap_model(copy.deepcopy(tiny_model(name)).to("cuda", torch.bfloat16), name=name, share=False)
    make_invariant(target)
    assert target.batch_invariant


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_captured_steps_are_invariant_in_bf16(name: str) -> None:
    model = copy.deepcopy(tiny_model(name)).to("cuda", torch.bfloat16)
    target = wrap_model(model, name=name, share=False, compile=True)
    make_invariant(target)
    assert isinstance(target.runner.run, Captured) and differing(target) is None
