"""A benchmark's cells as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import exp, log
from statistics import fmean

from rich.table import Table

from speculon.bench.against import Against, MeanRatio
from speculon.bench.cell import Cell
from speculon.bench.plan import AGAIN, BASELINES
from speculon.bench.render import markdown_table, number, terminal_table
from speculon.bench.rounds import SPEEDS, Requirement, RoundCosts
from speculon.proposers.registry import OFF
from speculon.telemetry import PARTS

PLACE = ("workload", "concurrency", "mode")
SPEED = (
    "tok/s",
    "x off",
    "x off, no loops (n)",
    "tok/call",
    "ms (rows)",
    "engine",
    "same",
    "exact",
    "loops",
    "diagnosis",
)
TERMINAL = ("tok/s", "x off", "tok/call", "accepted", "same", "diagnosis")
TERMINAL_LEGEND = (
    "tok/s: prompts included; x off: median of pairs; tok/call: tokens per target call; accepted: share of "
    "the "
    "drafts; same: texts equal to those of `off`; diagnosis: why a mode did not help (docs/bench.md)"
)
LEGEND = (
    "tok/s: prompts included; x off: median of pairs; no loops: over the n texts that do not end repeating "
    "themselves; ms (rows): a decoding call of the target, its two usual sizes; engine: share of a step "
    "neither in "
    "the target nor on drafts; same: texts equal to those of `off`; loops: texts that end repeating "
    "themselves and "
    "are not right; diagnosis: why a mode did not help, docs/bench.md says how it is found"
)
AGAINST = "policies against the best fixed mode"
AGAINST_HEAD = (*PLACE, "best fixed", "x best fixed (90 %)", "", "x off (90 %)", "off again")
AGAINST_TERMINAL = (*PLACE, "x best fixed", "90 %", "")
AGAINST_TERMINAL_LEGEND = (
    "best fixed: the fastest mode with a fixed K, picked on one half of the prompts and compared on the "
    "other; "
    "90 %: interval; an interval around 1 is undecided"
)
AGAINST_LEGEND = (
    "best fixed: the fastest mode of a fixed policy, `off` among them, picked on one half of the prompts and "
    "compared on the other, both ways round; x: geometric mean over groups of prompts, in the last rows over "
    "all "
    "cells; 90 %: interval, from resampled groups; off again: plain decoding over itself, the noise"
)
ROUNDS = ("rounds", "ms", "draft", "target", "rest", "ms/draft", "found tok/call (a)")
ROUNDS_LEGEND = (
    "rounds: decoding calls that verified drafts (in the first a draft model reads the prompt), their mean "
    "time and "
    "its shares; a: acceptance of drafts whose predecessors were all accepted; for Sx: tokens per call, and "
    "a equal "
    "at every position, that would make decoding S times as fast as plain at these costs (batch size 1); "
    "from: share of the accepted tokens by source"
)
PROFILE = ("ms", *PARTS)
PROFILE_LEGEND = (
    "ms: a mean decoding step, and its shares; prepare: schedule, pages, the batch; decide: the policy; "
    "propose: drafting; forward: the target; verify: sampling and acceptance; commit: tokens and pages; "
    "settle: results for proposers and callers"
)

Row = tuple[str, ...]


# figures


def figures(cell: Cell) -> Row:
    """In the order of `SPEED`."""
    free = f"{number(cell.ratio_without_loops, '.2f')} ({cell.texts_without_loops})"
    return (
        f"{cell.tokens_per_second:.0f}",
        ratio(cell),
        free if cell.texts_without_loops else "-",
        number(cell.tokens_per_target_call, ".2f"),
        " ".join(f"{ms:.1f} ({rows})" for rows, ms in usual_calls(cell)) or "-",
        number(cell.overhead, ".1%"),
        same(cell),
        number(cell.exact, ".0%"),
        f"{cell.looping:.0%}",
        cell.diagnosis or "-",
    )


def terminal_figures(cell: Cell) -> Row:
    """In the order of `TERMINAL`."""
    return (
        f"{cell.tokens_per_second:.0f}",
        ratio(cell),
        number(cell.tokens_per_target_call, ".2f"),
        number(cell.acceptance_rate, ".0%"),
        same(cell),
        cell.diagnosis or "-",
    )


def ratio(cell: Cell) -> str:
    return "1" if cell.mode == OFF else f"{cell.ratio:.2f}"


def same(cell: Cell) -> str:
    if cell.mode == OFF:
        return "-"
    return f"{texts_of(cell) - cell.different}/{texts_of(cell)}" if cell.different else "all"


def texts_of(cell: Cell) -> int:
    """Of all repeats."""
    return cell.texts * len(cell.per_repeat)


def usual_calls(cell: Cell) -> list[tuple[int, float]]:
    """The two most frequent sizes of a decoding call, small ones first."""
    often = sorted(cell.ms_by_rows, key=lambda rows: -cell.ms_by_rows[rows][1])[:2]
    return [(rows, cell.ms_by_rows[rows][0]) for rows in sorted(often)]


def round_figures(cell: Cell, rounds: RoundCosts) -> Row:
    """In the order of `ROUNDS`."""
    return (
        str(rounds.calls),
        f"{rounds.step_ms:.1f}",
        f"{rounds.draft:.0%}",
        f"{rounds.target:.0%}",
        f"{rounds.rest:.0%}",
        f"{rounds.draft_ms_per_position:.2f}",
        f"{rounds.tokens_per_target_call:.2f} ({number(cell.reached, '.0%')})",
    )


def required(one: Requirement) -> str:
    acceptance = "impossible" if one.acceptance is None else f"{one.acceptance:.0%}"
    return f"{one.tokens_per_target_call:.2f} ({acceptance})"


def by_position(cell: Cell) -> str:
    shares = " ".join(f"{share:.0%}".rstrip("%") for share in cell.per_position)
    return f"{shares} %" if shares else "-"


def by_source(cell: Cell) -> str:
    return ", ".join(f"{source} {share:.0%}" for source, share in cell.sources.items())


def with_bounds(found: MeanRatio) -> str:
    return f"{found.ratio:.2f}" + (f" ({bounds(found)})" if found.low is not None else "")


def bounds(found: MeanRatio) -> str:
    return "-" if found.low is None or found.high is None else f"{found.low:.2f}-{found.high:.2f}"


def place(cell: Cell) -> Row:
    """In the order of `PLACE`."""
    return cell.workload, str(cell.concurrency), cell.mode


# sentences


def verdict(cells: Sequence[Cell], against: Sequence[Against]) -> str:
    """The result in a sentence for the fastest mode, and one for each policy."""
    return " ".join([fastest(cells), *(held_against(row) for row in against if row.concurrency is None)])


def fastest(cells: Sequence[Cell]) -> str:
    """Of the engine's modes."""
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        ratios.setdefault(cell.mode, []).append(cell.ratio)
    noise = mean_ratio(ratios[AGAIN])
    means = {mode: mean_ratio(some) for mode, some in ratios.items() if mode not in {OFF, AGAIN, *BASELINES}}
    mode = max(means, key=means.__getitem__, default=OFF)
    ending = f"(plain decoding against itself: {noise:.2f}x)."
    if means and means[mode] > max(1.0, noise):
        return f"Fastest mode: {mode}, {means[mode]:.2f}x plain decoding {ending}"
    best = f" The best of them, {mode}, reached {means[mode]:.2f}x" if means else ""
    return f"No mode is faster than plain decoding.{best} {ending}"


def mean_ratio(ratios: Sequence[float]) -> float:
    """Geometric."""
    return exp(fmean(log(ratio) for ratio in ratios))


def held_against(row: Against) -> str:
    found = row.over_best
    line = f"{row.mode} against the best fixed mode: {found.ratio:.2f}x"
    return f"{line}, 90 % {bounds(found)}: {found.verdict}." if found.low is not None else f"{line}."


def difference(cell: Cell) -> str | None:
    """That texts are not those of plain decoding, and why they need not be; None: they are."""
    if not cell.different:
        return None
    line = f"{cell.mode}: {cell.different} of {texts_of(cell)} texts differ from those of {OFF}"
    if cell.rejection:
        line += ", as they may under its rule: the distribution is the same"
    if cell.tie_nats:
        line += f"; where greedy ones differ, the candidates are at most {max(cell.tie_nats):.0e} nat apart"
    return line


# tables


def by_cell(cells: list[Cell]) -> list[list[Cell]]:
    """The modes of each workload and concurrency."""
    return [list(group) for _, group in groupby(cells, key=lambda cell: (cell.workload, cell.concurrency))]


def speed_table(cells: list[Cell]) -> Table:
    """For the terminal: the modes of one workload at one concurrency."""
    first = cells[0]
    title = f"{first.workload}, concurrency {first.concurrency}"
    rows = [(cell.mode, *terminal_figures(cell)) for cell in cells]
    styles = ["dim" if cell.mode in (OFF, AGAIN) else "green" if cell.ratio > 1 else "" for cell in cells]
    return terminal_table(title, ("mode", *TERMINAL), rows, styles, words=("diagnosis",))


def against_table(rows: list[Against]) -> Table:
    """For the terminal."""
    body = [
        (row.workload, str(row.concurrency or "-"), row.mode, f"{row.over_best.ratio:.2f}")
        + (bounds(row.over_best), row.over_best.verdict)
        for row in rows
    ]
    styles = ["" if row.concurrency else "bold" for row in rows]
    return terminal_table(AGAINST, AGAINST_TERMINAL, body, styles, words=("mode", ""))


def markdown(cells: list[Cell]) -> str:
    """All figures of all cells."""
    head = (*PLACE, *SPEED, "drafts accepted, by position")
    return markdown_table(head, [(*place(cell), *figures(cell), by_position(cell)) for cell in cells])


def rounds_markdown(cells: list[Cell]) -> str:
    """What a round costs, and what it has to yield."""
    head = (*PLACE, *ROUNDS, *(f"for {speed:g}x" for speed in SPEEDS), "from")
    rows = []
    for cell in cells:
        if cell.rounds:
            needed = [required(one) for one in cell.needed] or ["-"] * len(SPEEDS)
            rows.append((*place(cell), *round_figures(cell, cell.rounds), *needed, by_source(cell)))
    return markdown_table(head, rows)


def against_markdown(rows: list[Against]) -> str:
    return markdown_table(AGAINST_HEAD, [against_figures(row) for row in rows])


def against_figures(row: Against) -> Row:
    """In the order of `AGAINST_HEAD`."""
    best, plain = row.over_best, row.over_plain
    return (
        row.workload,
        str(row.concurrency or "-"),
        row.mode,
        " / ".join(dict.fromkeys(row.picked)) or "-",
        with_bounds(best),
        best.verdict,
        with_bounds(plain),
        f"{row.again.ratio:.2f}",
    )


def profile_markdown(cells: list[Cell]) -> str:
    """Where a step's time goes: a row for each cell that decoded with this engine."""
    whole = [(cell, sum(cell.profile.values())) for cell in cells if cell.profile]
    rows = [
        (*place(cell), f"{ms:.2f}", *(f"{cell.profile[part] / ms:.1%}" for part in PARTS))
        for cell, ms in whole
    ]
    return markdown_table((*PLACE, *PROFILE), rows)
