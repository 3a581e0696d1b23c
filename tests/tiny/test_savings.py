"""Measured savings: the sum over a batch against the clock of the same batch decoded plainly."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core import telemetry
from speculon.core.config import SamplingParams
from speculon.engine.engine import Engine
from speculon.runtimes.torch.model.target import Target
from speculon.speculation.proposers import compose
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import use_draft
from tests.tiny.scripted import make_engine

BATCH, TOKENS = 6, 40
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


class Clock:
    """In the place of `perf_counter`, in ms: a step takes 3 + 0.5 B + `row` R, a proposal `draft` for each
    position.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row: float, draft: float):
        self.ms, self.row, self.draft, self._monkeypatch = 0.0, row, draft, monkeypatch
        monkeypatch.setattr(telemetry, "perf_counter", self)
        monkeypatch.setattr(compose, "perf_counter", self)

    def __call__(self) -> float:
        return self.ms / 1e3

    def time(self, target: Target, proposer: Any) -> None:
        forward, propose = target.forward, proposer.propose

        def timed_forward(batch: Any, view: Any) -> Any:
            drafts = sum(len(place.drafted.draft.tokens) for place in batch.placed)
            self.ms += 3 + 0.5 * len(batch.placed) + self.row * drafts
            return forward(batch, view)

        def timed_propose(seqs: Any, budgets: Any) -> Any:
            self.ms += self.draft * max(budgets)
            return propose(seqs, budgets)

        self._monkeypatch.setattr(target, "forward", timed_forward)
        self._monkeypatch.setattr(proposer, "propose", timed_propose)


def generate(engine: Engine, clock: Clock, **speculation: Any) -> tuple[float, float | None]:
    """ms of decoding one batch, and what its sequences say was saved in all."""
    for number in range(BATCH):
        engine.add_request([5 + number, 7, 9], PARAMS, speculation)
    saved: list[float | None] = []
    began, decoding = 0.0, False
    while engine.has_work:
        for event in engine.step():
            if event.stats is not None:
                saved.append(event.stats.saved_ms)
        if not decoding:  # the step that computed the prompts is on neither side
            began, decoding = clock.ms, True
    known = [ms for ms in saved if ms is not None]
    return clock.ms - began, sum(known) if known else None


def engine_of(clock: Clock) -> Engine:
    target = tiny_target("llama")
    made = use_draft(tiny_target("llama"))  # drafts what the target says: all are accepted
    engine = make_engine(
        target, speculation={"method": "draft_model", "draft": "in memory", "policy": "fixed"}
    )
    clock.time(target, made[0])
    return engine


@pytest.mark.parametrize(
    ("row", "draft", "gains"),
    [(0.05, 0.1, True), (0.2, 0.5, True), (2.0, 3.0, False), (0.05, 9.0, False)],
    ids=["cheap", "close", "dear rows", "dear proposals"],
)
def test_savings_are_the_difference_to_plain_decoding(
    row: float, draft: float, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, row, draft)
    engine = engine_of(clock)
    plain_ms, nothing = generate(engine, clock, method="off")
    assert nothing is None, "nobody was drafted for"
    ms, saved = generate(engine, clock, num_speculative_tokens=3)
    assert saved is not None and (saved > 0) is gains is (ms < plain_ms)
    assert saved == pytest.approx(plain_ms - ms, abs=0.1 * plain_ms)
    assert engine.counters.totals.saved_ms == pytest.approx(saved)


def test_savings_at_the_cost_of_one_sequence_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: tokens priced as those of a sequence that runs alone."""
    clock = Clock(monkeypatch, 0.05, 9.0)
    engine = engine_of(clock)
    plain_ms, _ = generate(engine, clock, method="off")
    monkeypatch.setattr(engine.policy.costs, "plain", lambda batch: 3.5 * batch)
    ms, saved = generate(engine, clock, num_speculative_tokens=3)
    assert saved is not None and saved > 0 > plain_ms - ms


def test_the_time_of_proposals_that_led_to_nothing_is_no_plain_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else others would be said to have saved what the shadow has spent."""
    clock = Clock(monkeypatch, 0.05, 9.0)
    engine = engine_of(clock)
    ms, saved = generate(engine, clock, policy="shadow", num_speculative_tokens=3)
    assert engine.policy.costs.plain(BATCH) == pytest.approx(3 + 0.5 * BATCH, rel=0.01)
    plain_ms, _ = generate(engine, clock, method="off")
    assert saved is not None and saved == pytest.approx(plain_ms - ms, abs=0.1 * plain_ms)


def test_savings_are_unknown_until_a_plain_step_of_about_that_size_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, 0.05, 0.1)
    engine = engine_of(clock)
    _, saved = generate(engine, clock, num_speculative_tokens=3)
    assert saved is None
