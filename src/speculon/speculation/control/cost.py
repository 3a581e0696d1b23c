"""The cost model: how many ms a step of the target and a proposal take. Engine and policies share it."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from operator import mul
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from speculon.core.types import CallCost, Timing, ceil_div
from speculon.decoding.rounds import Judged

NOISE = 0.01  # relative variance of one measurement, a standard deviation of 10 %; a guess
DRIFT = 0.004  # relative standard deviation by which a part may change per measurement: 10 % in 600 steps
# a measurement above this multiple of the estimate was probably disturbed by another process, so it gets a
# sixteenth of the weight
OUTLIER = 2.0
OF_LATE = 0.1  # weight of the latest measurement or round in a moving average, which so remembers about 10
# numbers of rows from which on a further row may cost more: below, reading the weights takes most of the time
BENDS = (8, 32)
# relative costs of one unit of each feature, assumed before anything is measured
PROPOSAL = (1.0, 0.3, 0.1, 0.03)
STEP = (1.0, 0.3, 0.03, 0.07, 0.03, 0.03, 0.01, 0.1, 0.03, 0.03)

# measurements: if each of the first ones contradicts the costs of an earlier process, those are forgotten
CONTRADICTIONS = 3

Features = tuple[float, ...]
Batch = tuple[int, bool]  # sequences, and whether any of them has drafts
CostPart = Annotated[float, Field(ge=-1e9, le=1e9)]
Count = Annotated[int, Field(ge=0, le=1 << 30)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]


class CostState(NamedTuple):
    """What a process tells the next one of a cost."""

    parts: tuple[CostPart, ...]
    measured: Count
    factors: list[tuple[Count, bool, Factor]]  # of each batch


STATE: TypeAdapter[dict[str, CostState]] = TypeAdapter(dict[str, CostState])
MAX_SIZES = 32  # points of the curve that the dashboard shows, and that is sent with all statistics


class LinearCost:
    """ms = (sum of parts times features) times a factor of the batch size. Parts are never below 0.

    The parts are fitted by recursive least squares on relative errors, with drift (Ljung 1999, 11.2). The
    factor, a moving average of measured / fitted ms, is there because one sum cannot fit all batch sizes
    well.
    """

    def __init__(self, units: Features) -> None:
        self.units = units
        self.parts: Features = ()  # ms of one unit of each feature
        self.factors: dict[Batch, float] = {}  # measured / fitted
        self.measured = 0
        self._unconfirmed = 0  # measurements that may yet contradict the costs of an earlier process
        self._covariance: list[list[float]] = []

    def fitted(self, x: Features) -> float:
        return max(1e-3, sum(part * value for part, value in zip(self.parts, x, strict=True) if part > 0))

    def at(self, x: Features, batch: Batch) -> float:
        return self.factors.get(batch, 1.0) * self.fitted(x)

    def observe(self, x: Features, batch: Batch, ms: float) -> None:
        if ms <= 0:  # the clock is too coarse to measure it
            return
        if self._unconfirmed:
            self._confirm(ms / self.at(x, batch))
        if not self.parts:
            whole = sum(map(mul, self.units, x))
            self.begin(tuple(unit * ms / whole for unit in self.units), spread=1.0)
        before = self.at(x, batch)
        # the first measurement of a batch size may only show that the sum fits it badly, so it is believed
        slow = batch in self.factors and ms > OUTLIER * before
        self._fit(x, ms, 16 * NOISE if slow else NOISE, ms if slow else self.fitted(x))
        ratio, factor = min(ms, OUTLIER * before) / self.fitted(x), self.factors.get(batch, 1.0)
        self.factors[batch] = factor + (OF_LATE / 16 if slow else OF_LATE) * (ratio - factor)
        self.measured += 1

    def _confirm(self, ratio: float) -> None:
        """Forgets the costs of an earlier process once all of the first measurements contradict them.

        A single one may be that of a cold start. As outliers they would change little, so costs that were too
        low would stay so for long.
        """
        agrees = 1 / OUTLIER <= ratio <= OUTLIER
        self._unconfirmed = 0 if agrees else self._unconfirmed - 1
        if not agrees and not self._unconfirmed:
            self.parts, self.factors, self.measured = (), {}, 0

    def begin(self, parts: Features, spread: float) -> None:
        """Sets the first estimate of the parts, and their relative standard deviation."""
        self.parts = parts
        # a part that is 0 needs a variance, too, or it could never grow again
        likely = [max(part, unit * max(parts)) for part, unit in zip(parts, self.units, strict=True)]
        self._covariance = [
            [(spread * part) ** 2 * (i == j) for j in range(len(parts))] for i, part in enumerate(likely)
        ]

    def doubt(self) -> None:
        """What was measured is a first guess from here on: something else does the work."""
        self.factors.clear()
        self.measured = 0
        if self.parts:
            self.begin(self.parts, spread=1.0)

    def state(self) -> CostState:
        factors = [(sequences, drafting, factor) for (sequences, drafting), factor in self.factors.items()]
        return CostState(self.parts, self.measured, factors)

    def restore(self, state: CostState) -> None:
        self.begin(state.parts, spread=0.2)
        self.factors = {(sequences, drafting): factor for sequences, drafting, factor in state.factors}
        self.measured, self._unconfirmed = state.measured, CONTRADICTIONS

    def _fit(self, x: Features, ms: float, noise: float, scale: float) -> None:
        """Updates the parts by one measurement, with errors relative to `scale`."""
        relative = [value / scale for value in x]
        gain = [sum(map(mul, row, relative)) for row in self._covariance]
        total = noise + sum(map(mul, relative, gain))
        step = (ms / scale - sum(map(mul, self.parts, relative))) / total
        parts = [part + g * step for part, g in zip(self.parts, gain, strict=True)]
        for i, row in enumerate(self._covariance):
            share = gain[i] / total
            self._covariance[i] = row = [p - share * g for p, g in zip(row, gain, strict=True)]
            row[i] += (DRIFT * max(parts[i], self.units[i] * parts[0])) ** 2
        for i, row in enumerate(self._covariance):
            if parts[i] < 0:  # set it to 0, and the others to their most likely values under this condition
                short = parts[i] / row[i]
                parts = [part - short * p for part, p in zip(parts, row, strict=True)]
        self.parts = tuple(parts)


class Prices(NamedTuple):
    """The parts of the ms of one proposal: the call itself, one more position for all of its sequences, one
    more draft, and one token that the drafter reads before it drafts.
    """

    call: float = 0.0
    depth: float = 0.0
    draft: float = 0.0
    unread: float = 0.0


class Costs:
    """The costs of one engine, in ms.

    A step of B sequences, M of which have N drafts in all, takes

        T(B, M, N) = a + b B + c_0 [M > 0] + c M + d N + sum_h d_h max(0, B + N - h) + (e B + f N + g Z) L

    with h from `BENDS`, L the mean number of tokens of a sequence in thousands, and Z the branches of trees
    after the first of each. A proposal for n sequences with at most k drafts takes

        P(n, k, unread) = a + b k + c k n + d unread

    No part is below 0, so each further row costs at least as much as the one before. The measurements show
    from which bend on it costs more.
    """

    def __init__(self) -> None:
        self._step = LinearCost(STEP)
        self._proposals = defaultdict[str, LinearCost](partial(LinearCost, PROPOSAL))
        self._context = 0.0  # L of the latest round, for which steps are priced

    @property
    def known(self) -> bool:
        return bool(self._step.parts)

    def step(self, sequences: int, drafting: float = 0, rows: float = 0, branches: float = 0) -> float:
        """The ms of a step, without its proposals. M and N may be means. Raises `ValueError` before the first
        measurement.
        """
        return self._step.at(self._features(sequences, drafting, rows, branches), (sequences, drafting > 0))

    def _features(self, sequences: int, drafting: float, rows: float, branches: float = 0) -> Features:
        bends = (max(0.0, sequences + rows - bend) for bend in BENDS)
        context = sequences * self._context, rows * self._context, branches * self._context
        return (1.0, sequences, float(drafting > 0), drafting, rows, *bends, *context)

    def rows(self, sequences: int, beside: int, drafting: int, max_drafts: int) -> list[float]:
        """The ms that the 1st, 2nd, .. draft of each of `drafting` sequences adds to a step of `sequences`,
        in which other sequences already have `beside` drafts.
        """
        parts, begin = [max(0.0, part) for part in self._step.parts], sequences + beside
        row_ms, bends = parts[4] + parts[-2] * self._context, list(zip(BENDS, parts[5:-3], strict=True))
        row_ms += sum(part for bend, part in bends if bend <= begin)
        bends = [(bend, part) for bend, part in bends if begin < bend < begin + drafting * max_drafts]
        factor = self._factor(sequences)
        return [
            factor
            * (
                row_ms
                + sum(part * share_beyond(bend, begin + drafting * k, drafting) for bend, part in bends)
            )
            for k in range(1, max_drafts + 1)
        ]

    def branch(self, sequences: int) -> float:
        """The ms of one more branch of a tree, without its rows."""
        return self._factor(sequences) * max(0.0, self._step.parts[-1]) * self._context

    def first(self, sequences: int) -> tuple[float, float]:
        """The ms of the first draft of a step and of the first one of each sequence, besides their rows:
        kernels are faster for single rows.
        """
        (row,), each = self.rows(sequences, 0, 1, 1), self._factor(sequences) * max(0.0, self._step.parts[3])
        once = self.step(sequences, 1, 1) - self.step(sequences) - row - each
        return max(0.0, once), max(0.0, each + min(0.0, once) / sequences)

    def _factor(self, sequences: int) -> float:
        """The factor of steps with drafts."""
        return self._step.factors.get((sequences, True), 1.0)

    def plain(self, sequences: int) -> float | None:
        """The ms of a plain step; None if no plain step of half to twice this size was measured."""
        sizes = [n for n in self._plain_sizes() if max(n, sequences) <= 2 * min(n, sequences)]
        nearest = min(sizes, key=lambda n: abs(n - sequences), default=None)
        return None if nearest is None else self._step.at(self._features(sequences, 0, 0), (nearest, False))

    def _plain_sizes(self) -> list[int]:
        """The batch sizes of the plain steps that were measured."""
        return sorted(sequences for sequences, drafting in self._step.factors if not drafting)

    def plain_steps(self) -> dict[int, float]:
        """Number of sequences -> ms of a plain step, for at most MAX_SIZES of the measured batch sizes."""
        sizes = self._plain_sizes()
        step = ceil_div(max(1, len(sizes)), MAX_SIZES)
        sizes = sizes[(len(sizes) - 1) % step :: step]  # the largest is among them
        return {n: self.step(n) for n in sizes}

    def prices(self, method: str, sequences: int) -> Prices:
        """The parts of a proposal for this many sequences; zeros for a method that was never measured."""
        if not self.calls(method):
            return Prices()
        cost = self._proposals[method]
        factor, (a, b, c, d) = cost.factors.get((sequences, True), 1.0), cost.parts
        return Prices(factor * max(a, 0.0), factor * max(b, 0.0), factor * max(c, 0.0), max(d, 0.0))

    def proposal(self, method: str, sequences: int, k: int, unread: int = 0) -> float:
        price = self.prices(method, sequences)
        return price.call + price.depth * k + price.draft * k * sequences + price.unread * unread

    def calls(self, method: str) -> int:
        """How often a method was measured."""
        return self._proposals[method].measured if method in self._proposals else 0

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        """Learns from the timing of a round; `judged` has the spans that decoded."""
        drafts = [len(one.draft.tokens) for one in judged]
        if judged:
            self._context = sum(len(one.seq.tokens) for one in judged) / len(judged) / 1000
        if judged and timing.target_ms is not None:
            branches = sum(one.draft.branches for one in judged)
            self.observe_step(len(judged), sum(map(bool, drafts)), sum(drafts), timing.target_ms, branches)
        for method, call in timing.calls.items():
            self.observe_proposal(method, call)

    def observe_step(self, sequences: int, drafting: int, rows: int, ms: float, branches: int = 0) -> None:
        self._step.observe(self._features(sequences, drafting, rows, branches), (sequences, drafting > 0), ms)

    def observe_proposal(self, method: str, call: CallCost) -> None:
        features = (1.0, call.k, call.k * call.sequences, call.unread)
        self._proposals[method].observe(features, (call.sequences, True), call.ms)

    def doubt(self) -> None:
        """Steps and proposals are learned anew, from what they were."""
        for cost in (self._step, *self._proposals.values()):
            cost.doubt()

    def state(self) -> dict[str, CostState]:
        costs = {"": self._step, **self._proposals}
        return {name: cost.state() for name, cost in costs.items() if cost.parts}

    def restore(self, state: Any) -> None:
        """Continues with a result of `state`. Raises `ValueError` for anything else."""
        by_name = STATE.validate_python(state)
        for name, told in by_name.items():
            if len(told.parts) != (features := len(PROPOSAL if name else STEP)):
                raise ValueError(f"{name or 'a step'!r:.80} has {len(told.parts)} parts, not {features}")
        for name, told in by_name.items():
            (self._proposals[name] if name else self._step).restore(told)


def share_beyond(bend: int, rows: int, last: int) -> float:
    """The share of the `last` of these rows that lies beyond the bend."""
    return min(1.0, max(0.0, (rows - bend) / last))
