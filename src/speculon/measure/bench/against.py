"""A policy against the best fixed mode, picked on one half of the prompts, compared on the other."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby
from math import exp, log
from statistics import fmean

from speculon.measure.bench.cell import Cell, quantile
from speculon.measure.bench.plan import AGAIN, BASELINES, FIXED
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
    found: list[Against] = []
    samples: dict[str, list[tuple[Logs, Logs, Logs]]] = {}
    for (workload, concurrency), group in groupby(cells, key=lambda cell: (cell.workload, cell.concurrency)):
        speeds = {cell.mode: cell for cell in group if cell.mode not in BASELINES}
        plain, again = speeds[OFF], logs_of(speeds[AGAIN], speeds[OFF])
        fixed = [cell for name, cell in speeds.items() if cell.policy == FIXED and name != AGAIN]
        for cell in speeds.values():
            if cell.policy == FIXED or len(cell.speeds[0]) < 2:
                continue
            picked = {half: best(fixed, plain, other_half(half)) for half in (0, 1)}
            over_best = {
                i: value
                for half, other in picked.items()
                for i, value in logs_of(cell, other).items()
                if half_of(i, len(cell.speeds[0])) == half
            }
            three = over_best, logs_of(cell, plain), again
            if not all(three):  # nothing was written
                continue
            names = tuple(picked[other_half(half)].mode for half in (0, 1))
            found.append(
                Against(workload, concurrency, cell.mode, names, *(estimate([logs]) for logs in three))
            )
            samples.setdefault(cell.mode, []).append(three)
    for mode, each in samples.items():
        found.append(
            Against("all", None, mode, (), *(estimate(list(logs)) for logs in zip(*each, strict=True)))
        )
    return found


def half_of(group: int, groups: int) -> int:
    """The first half (0) or the second: users come one after the other, so few are in both."""
    return int(2 * group >= groups)


def other_half(half: int) -> int:
    return 1 - half


def best(fixed: list[Cell], plain: Cell, half: int) -> Cell:
    """The fastest mode on one half of the groups."""

    def score(cell: Cell) -> float:
        ratios = [
            value for i, value in logs_of(cell, plain).items() if half_of(i, len(plain.speeds[0])) == half
        ]
        return fmean(ratios) if ratios else float("-inf")

    return max(fixed, key=score)


def logs_of(cell: Cell, base: Cell) -> Logs:
    """Of the groups in which both wrote something in every repeat."""
    found = {}
    for i, (mine, other) in enumerate(
        zip(zip(*cell.speeds, strict=True), zip(*base.speeds, strict=True), strict=True)
    ):
        if all((*mine, *other)):
            found[i] = fmean(log(a / b) for a, b in zip(mine, other, strict=True))
    return found


def estimate(cells: list[Logs], among: int = 1) -> MeanRatio:
    """The geometric mean over cells of those over groups; the groups of each cell are resampled.

    The interval of one `among` several is wider, so that all of them hold together (Bonferroni).

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
    low, high = (exp(quantile(drawn, share)) for share in (TAIL / among, 1 - TAIL / among))
    return MeanRatio(ratio, low, high)
