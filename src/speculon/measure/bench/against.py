"""Policies that decide by themselves against the best mode that could have been fixed beforehand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby
from math import exp, log
from statistics import fmean

from speculon.measure.bench.cell import Cell, quantile
from speculon.measure.bench.plan import AGAIN, FIXED
from speculon.speculation.proposers.registry import OFF

DRAWS = 2000  # of the bootstrap
TAIL = 0.05  # of the bootstrap, on either side of an interval of 90 %

Logs = dict[int, float]  # group of prompts -> log of a ratio of speeds, mean over the repeats


@dataclass(frozen=True, slots=True)
class MeanRatio:
    """Geometric, with the 90 % interval of a bootstrap; none where a cell has a single group."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        if self.low is not None and self.low > 1:
            return "faster"
        return "slower" if self.high is not None and self.high < 1 else "undecided"

    @property
    def bounds(self) -> str:
        return "-" if self.low is None or self.high is None else f"{self.low:.2f}-{self.high:.2f}"


@dataclass(frozen=True, slots=True)
class Against:
    """A mode whose policy is not fixed, in one cell or in all; ratios are paired by group and repeat."""

    workload: str
    concurrency: int | None  # None: all cells
    mode: str
    picked: tuple[str, ...]  # the best fixed mode by the first half of the groups, and by the second
    over_best: MeanRatio  # each half against what the other one picked
    over_plain: MeanRatio
    again: MeanRatio  # `off again` over `off`: the noise


def against_best_fixed(cells: list[Cell]) -> list[Against]:
    """A row for each cell of two groups or more, then one over all cells; `off` is a fixed mode, too."""
    rows: list[Against] = []
    logs_by_mode: dict[str, list[tuple[Logs, Logs, Logs]]] = {}
    for (workload, concurrency), group in groupby(cells, key=lambda cell: (cell.workload, cell.concurrency)):
        by_mode = {cell.mode: cell for cell in group}
        plain, again = by_mode[OFF], logs_of(by_mode[AGAIN], by_mode[OFF])
        fixed = [cell for name, cell in by_mode.items() if cell.policy == FIXED and name != AGAIN]
        for cell in by_mode.values():
            groups = len(cell.speeds[0])
            if cell.policy == FIXED or groups < 2:
                continue
            best = [fastest_fixed(fixed, plain, half) for half in (0, 1)]
            over_best = {
                i: value
                for half in (0, 1)
                for i, value in logs_of(cell, best[1 - half]).items()
                if half_of(i, groups) == half
            }
            logs = over_best, logs_of(cell, plain), again
            if not all(logs):  # nothing was written
                continue
            ratios = [estimate([each]) for each in logs]
            rows.append(Against(workload, concurrency, cell.mode, tuple(cell.mode for cell in best), *ratios))
            logs_by_mode.setdefault(cell.mode, []).append(logs)
    for mode, of_cells in logs_by_mode.items():
        ratios = [estimate(list(logs)) for logs in zip(*of_cells, strict=True)]
        rows.append(Against("all", None, mode, (), *ratios))
    return rows


def half_of(group: int, groups: int) -> int:
    """The first half (0) or the second: users come one after the other, so few are in both."""
    return int(2 * group >= groups)


def fastest_fixed(fixed: list[Cell], plain: Cell, half: int) -> Cell:
    """The fastest fixed mode on one half of the groups."""

    def score(cell: Cell) -> float:
        logs = logs_of(cell, plain).items()
        return fmean([log for i, log in logs if half_of(i, len(plain.speeds[0])) == half] or [float("-inf")])

    return max(fixed, key=score)


def logs_of(cell: Cell, base: Cell) -> Logs:
    """Of the groups in which both wrote something in every repeat."""
    by_group = zip(zip(*cell.speeds, strict=True), zip(*base.speeds, strict=True), strict=True)
    return {
        i: fmean(log(a / b) for a, b in zip(mine, other, strict=True))
        for i, (mine, other) in enumerate(by_group)
        if all((*mine, *other))
    }


def estimate(cells: list[Logs]) -> MeanRatio:
    """The geometric mean over cells of those over groups; the groups of each cell are resampled.

    One less is drawn than there are: the intervals of few groups would be too narrow (Rao and Wu 1988).
    """
    samples = [list(logs.values()) for logs in cells]
    ratio = exp(fmean(fmean(values) for values in samples))
    if min(map(len, samples)) < 2:
        return MeanRatio(ratio)
    rng = random.Random("speculon bench")
    drawn = sorted(
        fmean(fmean(rng.choices(values, k=len(values) - 1)) for values in samples) for _ in range(DRAWS)
    )
    low, high = (exp(quantile(drawn, share)) for share in (TAIL, 1 - TAIL))
    return MeanRatio(ratio, low, high)
