"""What a step of the target and a proposal cost, in ms: the one cost model of engine, policy, replay and advise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from speculon.control.policy import Timing
from speculon.core import Proposal, Span

NOISE = 0.01  # variance of one measurement, relative: a standard deviation of 10 %, as docs/benchmarks/2-cores shows
DRIFT = 0.004  # standard deviation per measurement by which a part may change, relative: 10 % in 600 steps
OUTLIER = 2.0  # times the estimate: beyond, another process had the core
OF_LATE = 0.1  # weight of the latest measurement, or round: a memory of 10
UNITS = (1.0, 0.3, 0.1, 0.03)  # what one of each feature costs beside the others, before any was measured

Four = tuple[float, float, float, float]
Parts = Annotated[list[Annotated[float, Field(ge=-1e9, le=1e9)]], Field(max_length=4)]
STATE: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Parts])


class LinearCost:
    """ms = sum of parts >= 0 times features x, times a factor of each batch size where there are data.

    The parts are fitted by recursive least squares on relative errors, with drift (Ljung 1999, 11.2). The factor is a moving
    average of measured over fitted ms: a sum that fits all sizes a little fits none.
    """

    def __init__(self) -> None:
        self.parts: list[float] = []  # ms of one unit of each feature
        self._covariance: list[list[float]] = []
        self._factors: dict[Any, float] = {}  # batch size -> measured / fitted
        self.measured = 0

    def fitted(self, x: Four) -> float:
        a, b, c, d = self.parts
        return max(1e-3, max(a, 0.0) * x[0] + max(b, 0.0) * x[1] + max(c, 0.0) * x[2] + max(d, 0.0) * x[3])

    def factor(self, batch: Any) -> float:
        return self._factors.get(batch, 1.0)

    def at(self, x: Four, batch: Any) -> float:
        return self.factor(batch) * self.fitted(x)

    def seen(self, batch: Any) -> bool:
        return batch in self._factors

    def observe(self, x: Four, batch: Any, ms: float) -> None:
        """`ms` > 0 were measured; what took unusually long weighs a sixteenth."""
        if ms <= 0:  # a clock too coarse
            return
        if not self.parts:
            whole = sum(unit * value for unit, value in zip(UNITS, x, strict=True))
            self._begin([unit * ms / whole for unit in UNITS])
        fitted, factor = self.fitted(x), self.factor(batch)
        slow = self.measured > 0 and ms > OUTLIER * fitted * factor
        self._fit(x, ms, 16 * NOISE if slow else NOISE, max(ms, fitted) if slow else fitted)
        weight = OF_LATE / 16 if slow else OF_LATE
        ratio = min(ms, OUTLIER * fitted * factor) / self.fitted(x)
        self._factors[batch] = factor + weight * (ratio - factor)
        self.measured += 1

    def _fit(self, x: Four, ms: float, noise: float, scale: float) -> None:
        """One measurement, relative to `scale`. Loops over four numbers would take three times as long in each round."""
        e, f, g, h = (value / scale for value in x)
        a, b, c, d = self.parts
        pe, pf, pg, ph = gain = [p * e + q * f + r * g + s * h for p, q, r, s in self._covariance]
        total = noise + e * pe + f * pf + g * pg + h * ph
        step = (ms / scale - (a * e + b * f + c * g + d * h)) / total
        parts = [a + pe * step, b + pf * step, c + pg * step, d + ph * step]
        for i, (p, q, r, s) in enumerate(self._covariance):
            u = gain[i] / total
            self._covariance[i] = row = [p - u * pe, q - u * pf, r - u * pg, s - u * ph]
            row[i] += (DRIFT * parts[i]) ** 2
        for i, row in enumerate(self._covariance):
            if parts[i] < 0:  # what the others most likely are if this one is 0
                short = parts[i] / row[i]
                parts = [part - short * p for part, p in zip(parts, row, strict=True)]
        self.parts = parts

    def _begin(self, parts: list[float], spread: float = 1.0) -> None:
        """The parts at first, and their standard deviation as a share of each."""
        self.parts = parts
        self._covariance = [[(spread * part) ** 2 * (i == j) for j in range(4)] for i, part in enumerate(parts)]

    def restore(self, parts: list[float]) -> None:
        self._begin(list(parts), spread=0.2)
        self.measured, self._factors = len(parts), {}


class Prices(NamedTuple):
    """Of one proposal, in ms."""

    call: float
    depth: float  # of one more position, for all sequences together
    draft: float  # of one more draft of one sequence
    unread: float  # of a token that the drafter reads before it drafts


class Costs:
    """Of the steps and proposals of one engine. Numbers are B sequences, D of which draft R rows in all; k drafts at most.

    step: a + b B + c D + d R. proposal of n sequences: a + b k + c k n + d unread.
    """

    def __init__(self) -> None:
        self._step = LinearCost()
        self._proposals: dict[str, LinearCost] = {}

    @property
    def known(self) -> bool:
        return bool(self._step.parts)

    def step(self, sequences: int, drafting: int = 0, rows: int = 0) -> float:
        """ms of a step without its proposals. Raises `ValueError` before any was measured."""
        if not self.known:
            raise ValueError("no step was measured yet")
        return self._step.at((1.0, sequences, drafting, rows), batch(sequences, drafting))

    def row(self, sequences: int) -> float:
        """ms of one more row of drafts, where all of these sequences draft."""
        return max(0.0, self._step.parts[3]) * self._step.factor(batch(sequences, sequences))

    def first(self, sequences: int) -> float:
        """ms of a sequence's first draft beyond its row: single rows have faster kernels."""
        added = self.step(sequences, sequences, sequences) - self.step(sequences)
        return max(0.0, added / sequences - self.row(sequences))

    def plain(self, sequences: int) -> float | None:
        """ms of a plain step; None while none of about this size was measured."""
        sizes = [size for size in self._plain_sizes if max(size, sequences) <= 2 * min(size, sequences)]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: abs(size - sequences))
        return self._step.at((1.0, sequences, 0, 0), batch(nearest, 0))

    @property
    def _plain_sizes(self) -> list[int]:
        return [sequences for sequences, share in self._step._factors if share == PLAIN]

    def proposal(self, method: str, sequences: int, k: int, unread: int = 0) -> float:
        """ms of one call; 0 for a method that was never measured."""
        cost = self._proposals.get(method)
        if cost is None or not cost.parts or not sequences or not k:
            return 0.0
        return cost.at((1.0, k, k * sequences, 0), sequences) + max(0.0, cost.parts[3]) * unread

    def prices(self, method: str, sequences: int) -> Prices:
        """Of a call for so many sequences."""
        cost = self._proposals.get(method)
        if cost is None or not cost.parts:
            return Prices(0.0, 0.0, 0.0, 0.0)
        factor, (a, b, c, d) = cost.factor(sequences), (max(0.0, part) for part in cost.parts)
        return Prices(factor * a, factor * b, factor * c, d)

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
        cost = self._proposals.get(method)
        if cost is None:
            cost = self._proposals[method] = LinearCost()
        cost.observe((1.0, call.k, call.k * call.texts, call.unread), call.texts, call.ms)

    def state(self) -> dict[str, list[float]]:
        return {"": self._step.parts, **{method: cost.parts for method, cost in self._proposals.items()}}

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        told: Mapping[str, list[float]] = STATE.validate_python(state)
        for method, parts in told.items():
            if len(parts) not in (0, 4):
                raise ValueError(f"{method!r:.80} has {len(parts)} parts, not 4")
            cost = self._proposals.setdefault(method, LinearCost()) if method else self._step
            if parts:
                cost.restore(parts)


PLAIN, SOME, ALL = range(3)  # how many of a batch draft


def batch(sequences: int, drafting: int) -> tuple[int, int]:
    """Steps of one size, as far as they are told apart."""
    return sequences, PLAIN if not drafting else ALL if drafting == sequences else SOME
