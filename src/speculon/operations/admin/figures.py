"""What the overview shows: sums of the engines' counters, and their differences from second to second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from speculon.core.telemetry import EngineCounters, RequestStats
from speculon.engine.client import EngineClient
from speculon.operations.admin.schemas import EngineStatus, MethodCounts, Overview, RoundCounts

INTERVAL = 1.0  # seconds between two snapshots
MOST_PAUSE = 5.0  # seconds; after a longer one the charts begin anew
POINTS = 180


@dataclass(frozen=True)
class Point:
    """One interval. None: nothing was drafted, or no sequence ended in it."""

    time: float  # seconds since the epoch
    tokens_per_s: float  # sent to clients
    per_call: float | None  # tokens per target call
    drafts: float | None  # mean K of the rounds that verified drafts
    acceptance: Mapping[str, float | None]  # by method, 0 to 1
    per_call_of: Mapping[str, float | None]  # tokens per target call, by the method that began the draft


class Figures:
    """Snapshots are taken when a page asks, at most once per `INTERVAL`; none while no page is open."""

    def __init__(self, look: Callable[[], Overview], clock: Callable[[], float] = monotonic):
        self._look, self._clock = look, clock
        self._taken_at, self._now = float("-inf"), look()
        self.points: deque[Point] = deque(maxlen=POINTS)

    def refresh(self) -> Overview:
        at = self._clock()
        # timers of pages drift: a tenth of an interval early is the next one
        if at - self._taken_at < 0.9 * INTERVAL:
            return self._now
        before, seconds = self._now, at - self._taken_at
        self._now, self._taken_at = self._look(), at
        # no page was open: an average over the pause would look like a measurement of now
        if seconds > MOST_PAUSE:
            self.points.clear()
        else:
            self.points.append(point(before, self._now, seconds))
        return self._now


def point(before: Overview, after: Overview, seconds: float) -> Point:
    """The interval's differences. Counters of an engine that was restarted fall: then 0, and None."""
    old, new, was = before.totals, after.totals, {counts.method: counts for counts in before.totals.methods}
    nothing = method_counts("", RequestStats(), 0)
    methods = {counts.method: (was.get(counts.method, nothing), counts) for counts in new.methods}
    return Point(
        after.time,
        max(0.0, sum(model.tokens for model in after.models) - sum(model.tokens for model in before.models))
        / seconds,
        ratio(generated(new) - generated(old), new.target_calls - old.target_calls),
        ratio(new.drafted - old.drafted, new.rounds - old.rounds),
        {name: ratio(b.accepted - a.accepted, b.drafted - a.drafted) for name, (a, b) in methods.items()},
        {name: ratio(b.tokens - a.tokens, b.rounds - a.rounds) for name, (a, b) in methods.items()},
    )


def generated(counts: RoundCounts) -> int:
    return counts.emitted + counts.stop_tokens


def engine_view(engine: EngineClient) -> EngineStatus | None:
    facts, load, counters = engine.facts, engine.load, engine.counters
    if facts is None:
        return None
    return EngineStatus(
        **dict(sum_counts([counters])),
        sequences_running=load.running,
        sequences_waiting=load.waiting,
        pages=facts.pages,
        pages_free=load.free_pages,
        page_tokens=facts.page_tokens,
        restarts=engine.restarts,
        steps=counters.steps,
        cost_curve=engine.costs,
        memory_bytes=facts.memory,
    )


def sum_counts(engines: Iterable[EngineCounters]) -> RoundCounts:
    """The sum over engines."""
    totals, proposals = RequestStats(), Counter[str]()
    for counters in engines:
        totals.add(counters.totals)
        proposals.update(counters.proposals)
    drafted, positions = totals.drafted_at.total(), sorted(totals.drafted_at)
    return RoundCounts(
        emitted=totals.emitted,
        stop_tokens=totals.stop_tokens,
        target_calls=totals.target_calls,
        rounds=totals.rounds,
        drafted=drafted,
        accepted=totals.accepted,
        acceptance_rate=ratio(totals.accepted, drafted),
        tokens_per_target_call=ratio(totals.generated, totals.target_calls),
        saved_seconds=None if totals.saved_ms is None else totals.saved_ms / 1e3,
        methods=[
            method_counts(method, totals, proposals[method])
            for method in sorted({*totals.drafted_from, *proposals})
        ],
        per_position=[totals.accepted_at[i] / totals.drafted_at[i] for i in positions],
        drafts_at=[totals.drafted_at[i] for i in positions],
        plain_rounds=dict(totals.reasons),
    )


def method_counts(method: str, totals: RequestStats, proposals: int) -> MethodCounts:
    drafted, rounds = totals.drafted_from[method], totals.rounds_from[method]
    accepted, tokens = totals.accepted_from[method], totals.generated_from[method]
    return MethodCounts(
        method=method,
        proposals=proposals,
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=ratio(accepted, drafted),
        rounds=rounds,
        tokens=tokens,
        tokens_per_target_call=ratio(tokens, rounds),
    )


def ratio(part: float, whole: float) -> float | None:
    """Without a whole there is no ratio."""
    return part / whole if whole > 0 else None
