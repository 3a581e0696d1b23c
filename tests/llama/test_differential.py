"""The differential test on runtime llama, with one model of each architecture that GGUF files may have.

As on torch, everything is as in plain decoding of each request alone, and as transformers computes it of the
same weights. Tokens that differ must be near-ties by transformers' scores, but where equal bits are promised.

Other cases: DIFFERENTIAL_SEED=1 python -m pytest tests/llama/test_differential.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.decoding.sequence import Sequence
from speculon.runtimes.base import Output
from speculon.runtimes.llama.model import LlamaModel, Rows
from speculon.runtimes.llama.runtime import PLACES, PROBE, SPAN, LlamaRuntime, measure
from speculon.runtimes.llama.step import LlamaStep
from speculon.runtimes.llama.streams import Streams
from tests.differential.compare import Outcome, explained, must_be_red, run
from tests.differential.factors import Case, cases
from tests.differential.test_planted import a_rejected_position_is_kept
from tests.llama import build
from tests.llama.build import DRAFTERS, EQUAL_BITS, METHODS, TABLE
from tests.llama.toys import IN_8_BITS, SAVED

Patch = pytest.MonkeyPatch
SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))
COUNT = len(TABLE.beginnings) + 6
TRIED = 4  # cases in which a mistake could show


@cache
def outcome(number: int) -> Outcome:
    case = cases(TABLE, SEED, COUNT)[number]
    with explained(case, "tests/llama"):
        return run(case, build)


@pytest.mark.parametrize("number", range(COUNT))
def test_case(number: int) -> None:
    outcome(number)


def test_every_value_is_in_some_case() -> None:
    found = {value for case in cases(TABLE, SEED, COUNT) for pair in TABLE.pairs(case) for value in pair}
    assert found == {*range(len(TABLE.numbers))}


def test_speculation_has_happened() -> None:
    """Drafts of every method were accepted and rejected; sequences were preempted, and prefixes found."""
    outcomes, drafted, accepted = [outcome(number) for number in range(COUNT)], Counter[str](), Counter[str]()
    for one in outcomes:
        drafted.update(one.drafted)
        accepted.update(one.accepted)
    counts = {name: (accepted[name], drafted[name]) for name in (*METHODS, *DRAFTERS)}
    assert all(0 < right < of for right, of in counts.values()), counts
    assert accepted["grammar"] > 20
    assert sum(one.preemptions > 0 for one in outcomes) > 2
    assert sum(one.cached > 0 for one in outcomes) > COUNT / 6
    assert sum(one.ties for one in outcomes) <= COUNT / 10, "near-ties are rare"
    assert any(one.equal_bits for one in outcomes) == (build.PLAIN[IN_8_BITS].equal_rows > 1)


# mistakes, each of which must turn a case red


def a_rejected_draft_stays(patch: Patch) -> None:
    a_rejected_position_is_kept(patch, LlamaStep)


def rows_of_another_place(patch: Patch) -> None:
    forward = LlamaStep.forward

    def shifted(step: LlamaStep, drafted: Any) -> Output:
        out = forward(step, drafted)
        return replace(out, logits=out.logits.roll(1, 0))

    patch.setattr(LlamaStep, "forward", shifted)


def states_are_not_restored(patch: Patch) -> None:
    patch.setattr(LlamaModel, "restore_state", lambda *_: None)


def the_adapter_of_the_last_request(patch: Patch) -> None:
    use_adapter = LlamaRuntime.use_adapter

    def late(runtime: LlamaRuntime, adapter: str) -> None:
        use_adapter(runtime, getattr(runtime, "late", ""))
        runtime.late = adapter  # type: ignore[attr-defined]

    patch.setattr(LlamaRuntime, "use_adapter", late)


def a_stream_claims_too_much(patch: Patch) -> None:
    opened = Streams.open

    def too_much(space: Streams, seq: Sequence) -> int:
        length = opened(space, seq)
        if not length or length + 1 == len(seq.tokens):
            return length
        space.of(seq).tokens = seq.tokens[: length + 1]
        return length + 1

    patch.setattr(Streams, "open", too_much)


def drafts(case: Case) -> bool:
    return any(own["method"] == "scripted" and own["policy"] == "fixed" for own in case.requests)


PLANTED: list[tuple[Callable[[Patch], None], Callable[[Case], bool]]] = [
    (a_rejected_draft_stays, drafts),
    (rows_of_another_place, drafts),
    (states_are_not_restored, lambda case: case.shared["target"] == SAVED and drafts(case)),
    (the_adapter_of_the_last_request, lambda case: len({own["adapter"] for own in case.requests}) > 1),
    (a_stream_claims_too_much, lambda case: case.shared["prefix_cache"] and case.shared["waves"] > 1),
]


@pytest.mark.parametrize(("plant", "wanted"), PLANTED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_shows(
    plant: Callable[[Patch], None], wanted: Callable[[Case], bool], monkeypatch: Patch
) -> None:
    tried = [case for case in cases(TABLE, 0, COUNT) if wanted(case)][:TRIED]
    monkeypatch.setattr(build, "PLAIN", {})  # no later test is to use what the mistake leaves
    plant(monkeypatch)
    must_be_red(tried, build)


def test_other_bits_show_where_equal_ones_are_promised(monkeypatch: Patch) -> None:
    tried = [
        case
        for case in cases(TABLE, 0, COUNT)
        if EQUAL_BITS.items() <= (case.shared | case.requests[0]).items()
    ]
    run(tried[0], build)
    if build.PLAIN[IN_8_BITS].equal_rows < 2:
        pytest.skip("the kernels of this chip give rows other bits together than alone")
    forward = LlamaStep.forward

    def other(step: LlamaStep, drafted: Any) -> Output:
        out = forward(step, drafted)
        return replace(out, logits=out.logits * (1 + 1e-6)) if len(out.logits) > 1 else out

    monkeypatch.setattr(LlamaStep, "forward", other)
    must_be_red(tried, build)


class Rounding:
    """A model whose rows have other logits together than alone at some places, in spans of more than two."""

    vocab_size, recurrent = 100, False

    def __init__(self, differs: Callable[[int], bool]):
        self.differs, self.length = differs, 0

    def run(self, parts: list[Rows]) -> tuple[Tensor, float]:
        (part,) = parts
        assert part.start == self.length, "a stream goes on where it ends"
        self.length += len(part.tokens)
        other = [len(part.tokens) > 2 and self.differs(at) for at in range(part.start, self.length)]
        return (torch.tensor(part.tokens) + 0.5 * torch.tensor(other))[part.scored :, None], 0.0

    def cut(self, stream: int, length: int) -> None:
        self.length = length


@pytest.mark.parametrize(
    ("differs", "found"),
    [
        pytest.param(lambda at: False, (SPAN, PLACES), id="nowhere"),
        pytest.param(lambda at: at == PROBE + 6 * SPAN, (2, PLACES), id="at one place"),
        pytest.param(lambda at: True, (2, PLACES), id="everywhere"),
    ],
)
def test_equal_bits_are_promised_where_they_were_everywhere(
    differs: Callable[[int], bool], found: tuple[int, int], monkeypatch: Patch
) -> None:
    monkeypatch.setattr("speculon.runtimes.llama.runtime.SECONDS", 60.0)
    model: Any = Rounding(differs)
    space: Any = SimpleNamespace(streams=[None])
    assert measure(model, space) == found and model.length == 0
