"""What the charts show: differences of the overview. One snapshot a second for all pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from speculon.core.telemetry import RequestStats
from speculon.operations.admin.overview import of_method, ratio
from speculon.operations.admin.schemas import Counts, Overview

INTERVAL = 1.0  # seconds between two snapshots
MOST_PAUSE = 5.0  # seconds; after a longer one the charts begin anew
POINTS = 180
NOTHING = of_method("", RequestStats(), 0)


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
    old, new, was = before.totals, after.totals, {one.method: one for one in before.totals.methods}
    methods = {one.method: (was.get(one.method, NOTHING), one) for one in new.methods}
    return Point(
        after.time,
        max(0.0, (sent(after) - sent(before)) / seconds),
        ratio(generated(new) - generated(old), new.target_calls - old.target_calls),
        ratio(new.drafted - old.drafted, new.rounds - old.rounds),
        {name: ratio(b.accepted - a.accepted, b.drafted - a.drafted) for name, (a, b) in methods.items()},
        {name: ratio(b.tokens - a.tokens, b.rounds - a.rounds) for name, (a, b) in methods.items()},
    )


def generated(counts: Counts) -> int:
    return counts.emitted + counts.stop_tokens


def sent(now: Overview) -> int:
    """Tokens of all models."""
    return sum(model.tokens for model in now.models)
