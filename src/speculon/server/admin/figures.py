"""What the overview shows: differences of the engines' counters. One snapshot a second for all pages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time

from speculon.server.metrics import ModelStatistics
from speculon.telemetry import RequestStats

INTERVAL = 1.0  # seconds between two snapshots
MOST_PAUSE = 5.0  # seconds; after a longer one the charts begin anew
POINTS = 180


@dataclass(frozen=True)
class Totals:
    """Cumulative, over all models. A sequence's tokens and rounds count once it has ended."""

    tokens: int = 0
    target_calls: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    rows: int = 0
    step_ms: float = 0.0
    saved_ms: float = 0.0
    drafted_from: Mapping[str, int] = field(default_factory=dict)
    accepted_from: Mapping[str, int] = field(default_factory=dict)
    drafted_at: Mapping[int, int] = field(default_factory=dict)
    accepted_at: Mapping[int, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Now:
    """As of one moment. `memory` and `pages`: model -> bytes held; (held, all) KV pages."""

    open_requests: int = 0
    running: int = 0
    waiting: int = 0
    states: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    pages: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One interval. None: nothing was drafted, or no sequence ended in it."""

    time: float  # seconds since the epoch
    tokens_per_s: float
    per_call: float | None  # tokens per target call
    drafts: float | None  # mean K of the rounds that verified drafts
    acceptance: Mapping[str, float]  # by method, 0 to 1


class Figures:
    """Snapshots are taken when a page asks, at most once per `INTERVAL`; none while no page is open."""

    def __init__(self, models: Mapping[str, ModelStatistics], clock: Callable[[], float] = monotonic):
        self._models, self._clock = models, clock
        self._taken_at = float("-inf")
        self.totals, self.now = Totals(), Now()
        self.points: deque[Point] = deque(maxlen=POINTS)

    def refresh(self) -> None:
        at = self._clock()
        # timers of pages drift: a tenth of an interval early is the next one
        if at - self._taken_at < 0.9 * INTERVAL:
            return
        before, seconds = self.totals, at - self._taken_at
        # no page was open: an average over the pause would look like a measurement of now
        first = seconds > MOST_PAUSE
        if first:
            self.points.clear()
        self.totals, self.now = totals_of(self._models), now_of(self._models)
        self._taken_at = at
        if not first:
            self.points.append(point(before, self.totals, seconds))


def totals_of(models: Mapping[str, ModelStatistics]) -> Totals:
    counters = [model.engine.counters for model in models.values()]
    stats = [one.totals for one in counters]

    def added(read: Callable[[RequestStats], Counter[str]]) -> dict[str, int]:
        return dict(sum((read(one) for one in stats), Counter()))

    def added_at(read: Callable[[RequestStats], Counter[int]]) -> dict[int, int]:
        return dict(sum((read(one) for one in stats), Counter()))

    return Totals(
        tokens=sum(one.emitted for one in stats),
        target_calls=sum(one.target_calls for one in stats),
        rounds=sum(one.rounds for one in stats),
        drafted=sum(one.drafted_at.total() for one in stats),
        accepted=sum(one.accepted for one in stats),
        steps=sum(one.steps for one in counters),
        rows=sum(one.rows for one in counters),
        step_ms=sum(one.step_ms for one in counters),
        saved_ms=sum(one.saved_ms or 0.0 for one in stats),
        drafted_from=added(lambda one: one.drafted_from),
        accepted_from=added(lambda one: one.accepted_from),
        drafted_at=added_at(lambda one: one.drafted_at),
        accepted_at=added_at(lambda one: one.accepted_at),
        reasons=added(lambda one: one.reasons),
    )


def now_of(models: Mapping[str, ModelStatistics]) -> Now:
    engines = [model.engine for model in models.values()]
    facts = {name: (model.engine.facts, model.engine.load) for name, model in models.items()}
    return Now(
        open_requests=sum(engine.open_requests for engine in engines),
        running=sum(engine.load.running for engine in engines),
        waiting=sum(engine.load.waiting for engine in engines),
        states={name: model.state for name, model in models.items()},
        memory={name: model.held for name, model in models.items()},
        pages={
            name: (ready.pages - load.free_pages, ready.pages)
            for name, (ready, load) in facts.items()
            if ready is not None
        },
    )


def point(before: Totals, after: Totals, seconds: float) -> Point:
    """The interval's differences. Counters of an engine that was restarted fall: then 0, and None."""
    tokens, calls = after.tokens - before.tokens, after.target_calls - before.target_calls
    rounds, drafted = after.rounds - before.rounds, after.drafted - before.drafted
    return Point(
        time(),
        max(0.0, tokens / seconds),
        tokens / calls if calls > 0 else None,
        drafted / rounds if rounds > 0 else None,
        {
            name: (after.accepted_from.get(name, 0) - before.accepted_from.get(name, 0)) / count
            for name in after.drafted_from
            if (count := after.drafted_from[name] - before.drafted_from.get(name, 0)) > 0
        },
    )
