"""The engine's counters while sequences run: nothing is lost, counted twice, or taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from speculon.core.config import SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.decoding.sequence import Event, Sequence
from speculon.engine.engine import Engine
from speculon.engine.scheduler import Scheduler
from tests.tiny.conftest import tiny_target
from tests.tiny.requests import mixed, plain, requests_of
from tests.tiny.scripted import Key, Result, make_engine, script

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few pages": {"num_blocks": 40},
    "chunked": {"max_batch_tokens": 7, "max_num_seqs": 3},
}


def started(mode: str = "sampled", **settings: Any) -> Engine:
    script(plain(mode))
    engine = make_engine(tiny_target("llama"), **settings)
    for request in mixed(requests_of(mode), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return engine


def flat(totals: RequestStats) -> Counter[str]:
    """Every number of the totals by its name; saved time may fall, and `last` is of one sequence."""
    found = Counter[str]()
    for name in RequestStats.__slots__:
        value = getattr(totals, name)
        if name not in ("saved_ms", "last"):
            found.update(
                {f"{name} {key}": n for key, n in value.items()} if isinstance(value, dict) else {name: value}
            )
    return found


def seen_by_clients(events: list[Event]) -> dict[str, int]:
    """By the events alone."""
    return {
        "emitted": sum(len(event.tokens) for event in events),
        "rounds": sum(event.drafted > 0 for event in events),
        "drafted": sum(event.drafted for event in events),
        "accepted": sum(len(event.sources) for event in events),
    }


def counted(totals: RequestStats) -> dict[str, int]:
    drafted = totals.drafted_at.total()
    return {
        "emitted": totals.emitted,
        "rounds": totals.rounds,
        "drafted": drafted,
        "accepted": totals.accepted,
    }


def follow(engine: Engine, aborts: dict[int, str]) -> dict[Key, Result]:
    """Steps it to the end, and compares the counters with the events after each step."""
    results: dict[Key, Result] = {}
    events: list[Event] = []
    before, step = flat(engine.current_counters().totals), 0
    while engine.has_work:
        new = [*engine.step(), *engine.abort(aborts.get(step, "nobody"))]
        for event in new:
            results.setdefault((event.request_id, event.sample), Result()).take(event)
        events, step = events + new, step + 1
        totals = engine.current_counters().totals
        now = flat(totals)
        assert counted(totals) == seen_by_clients(events), f"step {step}"
        assert not (fallen := {name for name in before if now[name] < before[name]}), fallen
        before = now
    return results


@pytest.mark.parametrize("aborts", [{}, {2: "q0", 5: "q3", 9: "q7"}], ids=["calm", "aborts"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_counters_are_those_of_the_events(settings: dict[str, Any], aborts: dict[int, str]) -> None:
    engine = started(**settings)
    results = follow(engine, aborts)
    assert engine.current_counters() == engine.counters, "at the end both are the same"
    whole = RequestStats()
    for result in results.values():
        whole.add(result.stats)
    assert flat(engine.counters.totals) == pytest.approx(flat(whole)) and whole.rounds > 10
    assert bool(whole.preemptions) == (settings == SETTINGS["few pages"])


def without_preempted(scheduler: Scheduler) -> list[Sequence]:
    return list(scheduler.running)


def twice(scheduler: Scheduler) -> list[Sequence]:
    return [*scheduler.running, *scheduler.running]


def nobody(scheduler: Scheduler) -> list[Sequence]:
    return []


@pytest.mark.parametrize("planted", [without_preempted, twice, nobody])
def test_what_is_lost_or_counted_twice_is_seen(
    planted: Callable[[Scheduler], list[Sequence]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin."""
    monkeypatch.setattr(Scheduler, "begun", property(planted))
    with pytest.raises(AssertionError):
        test_the_counters_are_those_of_the_events(SETTINGS["few pages"], {})


def test_steps_that_fail_are_counted_once_they_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = started(), 0
    forward = engine.runtime.target.forward

    def failing(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps % 4 == 3:
            raise MemoryError("planted")
        return forward(*given)

    monkeypatch.setattr(engine.runtime.target, "forward", failing)
    step = engine.step

    def again() -> list[Event]:
        try:
            return step()
        except MemoryError:
            return []

    monkeypatch.setattr(engine, "step", again)
    follow(engine, {})
    assert engine.current_counters() == engine.counters


def test_another_engine_counts_the_rest_that_it_writes() -> None:
    """As replicas do: each has what it wrote itself."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    lost, other = (make_engine(tiny_target("llama")) for _ in range(2))
    lost.add_request([5, 6, 7, 5, 6], params, {"method": "ngram"}, "r")
    written: list[int] = []
    while len(written) < 8:
        written += [token for event in lost.step() for token in event.tokens]
    other.add_request([5, 6, 7, 5, 6], params, {"method": "ngram"}, "r", written={0: written})
    while other.has_work:
        other.step()
    first, rest = (engine.current_counters().totals for engine in (lost, other))
    assert first.emitted == len(written) and rest.emitted == 20 - len(written)
