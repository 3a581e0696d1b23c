"""Captured steps of a batch-invariant target in bf16: a row's logits are bitwise equal in every bucket.

Here a recorder calls a piece again on the same buffers in place of a CUDA graph. Graphs run in tests/gpu.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from speculon.runtimes.torch.loading import invariant
from speculon.runtimes.torch.loading.batch_check import differing
from speculon.runtimes.torch.loading.invariant import decide, make_invariant
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model import captured as capturing
from speculon.runtimes.torch.model.block import CannotReplace
from speculon.runtimes.torch.model.captured import Captured
from speculon.runtimes.torch.model.linear import packable
from speculon.runtimes.torch.model.pieces import CannotBeInvariant
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.trial import Trial
from tests.tiny.conftest import tiny_model
from tests.tiny.kernels import where_invariant
from tests.tiny.test_captured import Noted, replayed

pytestmark = pytest.mark.skipif(
    not packable(torch.bfloat16, torch.device("cpu")), reason="no products in bf16 on this CPU"
)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capturing.RECORDERS, "cpu", lambda device: replayed)


def made(name: str = "llama") -> Target:
    target = wrap_model(copy.deepcopy(tiny_model(name)).bfloat16(), name=name, share=False, compile=True)
    assert isinstance(target.runner.run, Captured)
    return target


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_logits_are_bitwise_equal_in_every_bucket(name: str) -> None:
    target = made(name)
    first = target.runner.run
    with where_invariant():
        make_invariant(target)
    assert isinstance(target.runner.run, Captured) and target.runner.run is not first, (
        "captured with products in pieces"
    )
    assert target.batch_invariant and differing(target) is None


def test_without_it_the_first_capture_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = made()
    first = target.runner.run
    monkeypatch.setattr(invariant, "differing", lambda target: 0)
    with pytest.raises(CannotBeInvariant, match="position 0 depend on their batch"):
        make_invariant(target)
    assert target.runner.run is first and not target.batch_invariant


@pytest.mark.parametrize("bucket", [8, 128])
def test_a_bucket_that_takes_another_kernel_is_seen(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Captured.score

    def by_rows(captured: Captured, rows: int) -> None:
        inner(captured, rows)
        captured.logits[:rows] *= 1 + (rows == bucket) / 64

    target = made()
    monkeypatch.setattr(Captured, "score", by_rows)
    with pytest.raises(CannotBeInvariant, match="not captured: it computes something else"):
        make_invariant(target)
    assert not target.batch_invariant


def test_what_cannot_be_captured_again_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Captured:
        raise CannotReplace("not captured: too little memory")

    target = made()
    monkeypatch.setattr(invariant, "captured_loop", fail)
    decide(target, None)
    assert target.invariance == "no: not captured: too little memory" and not target.batch_invariant


@pytest.mark.parametrize("apart", [False, True])
def test_prompts_that_take_other_products_are_not_replayed(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = made()
    with where_invariant():
        make_invariant(target)
    captured: Any = target.runner.run
    captured.prompts_in_loop = apart
    captured.loop = noted = Noted(captured.loop, lambda batch: batch.input_ids.shape[1])
    trial = Trial.of(target, (5, 3))
    with torch.inference_mode():
        for prompts in ((), ((0, 5),)):
            captured(replace(trial.batch, prompts=prompts), trial.view)
    assert noted.steps == [8] * apart
