"""What ratios of speeds say: policies against the best fixed mode; whether drafting pays, in which mode."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log
from statistics import fmean
from typing import TYPE_CHECKING, Any

from speculon.core.config import EngineConfig
from speculon.core.errors import BenchError, InvalidParameter
from speculon.measure.bench.cell import Cell, quantile
from speculon.measure.bench.plan import AGAIN, BASELINES, FIXED, BenchPlan, parse_mode
from speculon.measure.bench.settings import as_toml, settings, whole
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

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
        by_mode = {cell.mode: cell for cell in group if cell.mode not in BASELINES}
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
    """The fastest_fixed mode on one half of the groups."""

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


Speeds = dict[int, dict[str, MeanRatio]]  # concurrency -> mode -> speed over plain decoding


@dataclass(frozen=True, slots=True)
class Advice:
    """The settings are for the lowest concurrency that was measured."""

    mode: str
    answer: tuple[str, ...]
    settings: dict[str, Any]  # of a whole speculon.toml


def advise(cells: Sequence[Cell], llm: LLM, suffix_pools: int) -> Advice:
    """Picks among what was measured. Raises `BenchError` where too little was generated for that.

    `suffix_pools` is the user's number of pools; the benchmark's modes take more.
    """
    speeds = speeds_of(cells)
    mode = parse_mode(chosen(speeds))
    methods = llm.engine.proposers.methods_of((), mode.speculation["method"])
    base = llm.config.speculation.model_copy(update={"suffix_pools": suffix_pools})
    values = whole(llm.config, settings(base, mode, methods))
    return Advice(mode.label, (*answer(speeds), *warnings(cells)), values)


def refuse_no_advice(plan: BenchPlan, config: EngineConfig) -> None:
    """Raises before anything is measured where there would be nothing to advise, or no way to write it."""
    if plan.widen:
        raise InvalidParameter("widen", plan.widen, "is no model to advise on: leave out --advise")
    modes = [parse_mode(mode) for mode in plan.modes]
    if not any(mode.speculates for mode in modes):
        raise InvalidParameter("modes", ",".join(plan.modes), "name one that drafts, for --advise")
    for mode in modes:
        as_toml(whole(config, settings(config.speculation, mode, ())))


def speeds_of(cells: Sequence[Cell]) -> Speeds:
    """Of each mode that generated something, over all workloads with the same weight."""
    plain = {(cell.workload, cell.concurrency): cell for cell in cells if cell.mode == OFF}
    speeds: Speeds = {}
    for count in dict.fromkeys(cell.concurrency for cell in cells):
        some = [cell for cell in cells if cell.concurrency == count]
        modes = [*dict.fromkeys(cell.mode for cell in some if cell.mode not in {OFF, *BASELINES})]
        drafting = sum(mode != AGAIN for mode in modes)
        for mode in modes:
            logs = [logs_of(cell, plain[cell.workload, count]) for cell in some if cell.mode == mode]
            if all(logs):
                speeds.setdefault(count, {})[mode] = estimate(logs, drafting)
        if not {AGAIN} < speeds.get(count, {}).keys():
            raise BenchError(f"{OFF}, or every mode that drafts, generated nothing at concurrency {count}")
    return speeds


def fastest(speeds: Speeds, concurrency: int) -> str:
    modes = {mode: speed.ratio for mode, speed in speeds[concurrency].items() if mode != AGAIN}
    return max(modes, key=modes.__getitem__)


def chosen(speeds: Speeds) -> str:
    """The fastest mode of those whose whole interval is faster than plain decoding; else `off`."""
    lowest = speeds[min(speeds)]
    surely = {mode: speed.ratio for mode, speed in lowest.items() if speed.verdict == "faster"}
    surely.pop(AGAIN, None)
    return max(surely, key=surely.__getitem__, default=OFF)


def answer(speeds: Speeds) -> Iterator[str]:
    """The most important sentence first."""
    lowest, *higher = sorted(speeds)
    mode = chosen(speeds)
    if mode == OFF:
        mode = fastest(speeds, lowest)
    speed = speeds[lowest][mode]
    over = f"measured {times(speed)} over plain decoding at concurrency {lowest}"
    if speed.verdict == "faster":
        yield f"Yes: use {mode}, {over}."
    else:
        why = "There is no interval" if speed.low is None else "The interval includes 1"
        wide = f" {why}: more prompts may settle it." * (speed.verdict == "undecided")
        yield f"No: leave speculation off. The fastest mode is {mode}, {over}.{wide}"
    for count in higher:
        best = fastest(speeds, count)
        other = f"; {best} {times(speeds[count][best])} is faster" if best != mode else ""
        own = times(speeds[count][mode]) if mode in speeds[count] else "generated nothing"
        yield f"At concurrency {count}: {mode} {own}{other}."
    noise = ", ".join(f"{speeds[count][AGAIN].ratio:.2f}x" for count in (lowest, *higher))
    yield f"Plain decoding against itself: {noise}."


def warnings(cells: Sequence[Cell]) -> Iterator[str]:
    looping = fmean(cell.looping for cell in cells if cell.mode == OFF)
    if looping:
        yield f"{looping:.0%} of the texts end repeating themselves, which is easily drafted."


def times(speed: MeanRatio) -> str:
    bounds = "" if speed.low is None else f" ({speed.low:.2f} to {speed.high:.2f})"
    return f"{speed.ratio:.2f}x{bounds}"
