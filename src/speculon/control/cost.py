"""What a step of the target and a proposal cost, in ms: the one cost model of engine, policy, replay and
advise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from speculon.core import Proposal, Timing, ceil_div
from speculon.sequence import Span

NOISE = 0.01  # variance of one measurement, relative: a standard deviation of 10 %; not measured
DRIFT = 0.004  # standard deviation per measurement by which a part may change, relative: 10 % in 600 steps
# times the estimate: beyond, another process had the core, and a measurement weighs a sixteenth
OUTLIER = 2.0
OF_LATE = 0.1  # weight of the latest measurement, or round: a memory of 10
# what one of each feature costs beside the others, before any was measured
UNITS = (1.0, 0.3, 0.1, 0.03)

Four = tuple[float, float, float, float]
Part = Annotated[float, Field(ge=-1e9, le=1e9)]
STATE: TypeAdapter[dict[str, tuple[Part, Part, Part, Part]]] = TypeAdapter(
    dict[str, tuple[Part, Part, Part, Part]]
)
MOST_SIZES = 32  # of the curve that is shown, and sent with all statistics
PLAIN, SOME, ALL = range(3)  # how many of a batch draft


class LinearCost:
    """ms = sum of parts >= 0 times features x, times a factor of each batch size where there are data.

    The parts are fitted by recursive least squares on relative errors, with drift (Ljung 1999, 11.2). The
    factor is a moving average of measured over fitted ms: a sum that fits all sizes a little fits none.
    """

    def __init__(self) -> None:
        self.parts: tuple[float, ...] = ()  # ms of one unit of each feature
        self.factors: dict[Any, float] = {}  # batch size -> measured / fitted
        self.measured = 0
        self._covariance: list[list[float]] = []

    def fitted(self, x: Four) -> float:
        a, b, c, d = self.parts
        return max(1e-3, max(a, 0.0) * x[0] + max(b, 0.0) * x[1] + max(c, 0.0) * x[2] + max(d, 0.0) * x[3])

    def at(self, x: Four, batch: Any) -> float:
        return self.factors.get(batch, 1.0) * self.fitted(x)

    def observe(self, x: Four, batch: Any, ms: float) -> None:
        if ms <= 0:  # a clock too coarse
            return
        if not self.parts:
            whole = sum(unit * value for unit, value in zip(UNITS, x, strict=True))
            self.begin(tuple(unit * ms / whole for unit in UNITS), spread=1.0)
        before = self.at(x, batch)
        slow = self.measured > 0 and ms > OUTLIER * before
        self._fit(x, ms, 16 * NOISE if slow else NOISE, ms if slow else self.fitted(x))
        ratio, factor = min(ms, OUTLIER * before) / self.fitted(x), self.factors.get(batch, 1.0)
        self.factors[batch] = factor + (OF_LATE / 16 if slow else OF_LATE) * (ratio - factor)
        self.measured += 1

    def begin(self, parts: tuple[float, ...], spread: float) -> None:
        """The parts at first, and their standard deviation as a share of each."""
        self.parts = parts
        # a part of 0 may grow again
        likely = [max(part, unit * max(parts)) for part, unit in zip(parts, UNITS, strict=True)]
        self._covariance = [
            [(spread * part) ** 2 * (i == j) for j in range(4)] for i, part in enumerate(likely)
        ]

    def _fit(self, x: Four, ms: float, noise: float, scale: float) -> None:
        """One measurement, relative to `scale`; written out, for loops over four numbers take three times as
        long.
        """
        e, f, g, h = (value / scale for value in x)
        a, b, c, d = self.parts
        gain = [p * e + q * f + r * g + s * h for p, q, r, s in self._covariance]
        total = noise + e * gain[0] + f * gain[1] + g * gain[2] + h * gain[3]
        step = (ms / scale - (a * e + b * f + c * g + d * h)) / total
        parts = [part + each * step for part, each in zip(self.parts, gain, strict=True)]
        for i, row in enumerate(self._covariance):
            u = gain[i] / total
            self._covariance[i] = row = [
                row[0] - u * gain[0],
                row[1] - u * gain[1],
                row[2] - u * gain[2],
                row[3] - u * gain[3],
            ]
            row[i] += (DRIFT * max(parts[i], UNITS[i] * parts[0])) ** 2
        for i, row in enumerate(self._covariance):
            if parts[i] < 0:  # what the others most likely are if this one is 0
                short = parts[i] / row[i]
                parts = [part - short * p for part, p in zip(parts, row, strict=True)]
        self.parts = tuple(parts)


class Prices(NamedTuple):
    """Of one proposal, in ms: the call, a position of all its sequences, a draft, a token that is read before
    it drafts.
    """

    call: float = 0.0
    depth: float = 0.0
    draft: float = 0.0
    unread: float = 0.0


class Costs:
    """Of the steps and proposals of one engine: of B sequences, D of which draft R rows in all; of n, with k
    drafts at most.

    T(B, D, R) = a + b B + c D + d R. P(n, k, unread) = a + b k + c k n + d unread.
    """

    def __init__(self) -> None:
        self._step, self._proposals = LinearCost(), defaultdict[str, LinearCost](LinearCost)

    @property
    def known(self) -> bool:
        return bool(self._step.parts)

    def step(self, sequences: int, drafting: float = 0, rows: float = 0) -> float:
        """ms without its proposals; D and R may be means. Raises `ValueError` before any was measured."""
        return self._step.at((1.0, sequences, drafting, rows), batch(sequences, drafting))

    def row(self, sequences: int) -> float:
        """ms of one more row of drafts, where all of these sequences draft."""
        return max(0.0, self._step.parts[3]) * self._step.factors.get(batch(sequences, sequences), 1.0)

    def first(self, sequences: int) -> float:
        """ms of a sequence's first draft beyond its row: single rows have faster kernels."""
        added = self.step(sequences, sequences, sequences) - self.step(sequences)
        return max(0.0, added / sequences - self.row(sequences))

    def plain(self, sequences: int) -> float | None:
        """ms of a plain step; None while none of half to twice its size was measured."""
        sizes = [
            n
            for n, share in self._step.factors
            if share == PLAIN and max(n, sequences) <= 2 * min(n, sequences)
        ]
        nearest = min(sizes, key=lambda n: abs(n - sequences), default=None)
        return None if nearest is None else self._step.at((1.0, sequences, 0, 0), batch(nearest, 0))

    def plain_steps(self) -> dict[int, float]:
        """Sequences -> ms of a plain step, for the batch sizes that were measured; of many of them, some."""
        sizes = sorted(n for n, share in self._step.factors if share == PLAIN)
        step = ceil_div(max(1, len(sizes)), MOST_SIZES)
        sizes = sizes[(len(sizes) - 1) % step :: step]  # the largest is among them
        return {n: self._step.at((1.0, n, 0, 0), batch(n, 0)) for n in sizes}

    def prices(self, method: str, sequences: int) -> Prices:
        """Of a proposal for so many sequences; nothing for a method that was never measured."""
        if not self.calls(method):
            return Prices()
        factor, (a, b, c, d) = (
            self._proposals[method].factors.get(sequences, 1.0),
            self._proposals[method].parts,
        )
        return Prices(factor * max(a, 0.0), factor * max(b, 0.0), factor * max(c, 0.0), max(d, 0.0))

    def proposal(self, method: str, sequences: int, k: int, unread: int = 0) -> float:
        price = self.prices(method, sequences)
        return price.call + price.depth * k + price.draft * k * sequences + price.unread * unread

    def calls(self, method: str) -> int:
        """How often a method was measured."""
        return self._proposals[method].measured if method in self._proposals else 0

    def observe(self, spans: list[Span], timing: Timing) -> None:
        """What a round took; `spans` are those that decoded."""
        drafts = [len(span.draft.tokens) for span in spans]
        if spans and timing.target_ms is not None:
            self.observe_step(len(spans), sum(map(bool, drafts)), sum(drafts), timing.target_ms)
        for method, call in timing.proposals.items():
            self.observe_proposal(method, call)

    def observe_step(self, sequences: int, drafting: int, rows: int, ms: float) -> None:
        self._step.observe((1.0, sequences, drafting, rows), batch(sequences, drafting), ms)

    def observe_proposal(self, method: str, call: Proposal) -> None:
        self._proposals[method].observe(
            (1.0, call.k, call.k * call.sequences, call.unread), call.sequences, call.ms
        )

    def state(self) -> dict[str, tuple[float, ...]]:
        return {name: cost.parts for name, cost in {"": self._step, **self._proposals}.items() if cost.parts}

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        for name, parts in STATE.validate_python(state).items():
            cost = self._proposals[name] if name else self._step
            cost.begin(parts, spread=0.2)
            cost.measured = len(parts)


def batch(sequences: int, drafting: float) -> tuple[int, int]:
    """The steps that take alike."""
    return sequences, PLAIN if not drafting else ALL if drafting == sequences else SOME
