"""The advice of a benchmark: whether drafting pays here, in which mode, at which concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from speculon.core.errors import BenchError
from speculon.measure.bench.against import MeanRatio, estimate, logs_of
from speculon.measure.bench.cell import Cell
from speculon.measure.bench.plan import AGAIN, BASELINES, parse_mode
from speculon.measure.bench.settings import settings, whole
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

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


def speeds_of(cells: Sequence[Cell]) -> Speeds:
    """Of each mode that generated something, over all workloads with the same weight."""
    plain = {(cell.workload, cell.concurrency): cell for cell in cells if cell.mode == OFF}
    found: Speeds = {}
    for count in dict.fromkeys(cell.concurrency for cell in cells):
        some = [cell for cell in cells if cell.concurrency == count]
        modes = [*dict.fromkeys(cell.mode for cell in some if cell.mode not in {OFF, *BASELINES})]
        drafting = sum(mode != AGAIN for mode in modes)
        for mode in modes:
            logs = [logs_of(cell, plain[cell.workload, count]) for cell in some if cell.mode == mode]
            if all(logs):
                found.setdefault(count, {})[mode] = estimate(logs, drafting)
        if not {AGAIN} < found.get(count, {}).keys():
            raise BenchError(f"{OFF}, or every mode that drafts, generated nothing at concurrency {count}")
    return found


def fastest(speeds: Speeds, concurrency: int) -> str:
    modes = {mode: one for mode, one in speeds[concurrency].items() if mode != AGAIN}
    return max(modes, key=lambda mode: modes[mode].ratio)


def chosen(speeds: Speeds) -> str:
    """The fastest mode of those whose whole interval is faster than plain decoding; else `off`."""
    lowest = min(speeds)
    surely = {mode: one for mode, one in speeds[lowest].items() if one.verdict == "faster" and mode != AGAIN}
    return max(surely, key=lambda mode: surely[mode].ratio, default=OFF)


def answer(speeds: Speeds) -> Iterator[str]:
    """The most important sentence first."""
    lowest, *higher = sorted(speeds)
    mode = chosen(speeds)
    if mode == OFF:
        mode = fastest(speeds, lowest)
    found = speeds[lowest][mode]
    over = f"measured {times(found)} over plain decoding at concurrency {lowest}"
    if found.verdict == "faster":
        yield f"Yes: use {mode}, {over}."
    else:
        why = "There is no interval" if found.low is None else "The interval includes 1"
        wide = f" {why}: more prompts may settle it." * (found.verdict == "undecided")
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


def times(found: MeanRatio) -> str:
    bounds = "" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})"
    return f"{found.ratio:.2f}x{bounds}"
