"""A benchmark's cells as tables, for the terminal and for Markdown."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table

from speculon.bench.against import Against, Estimate
from speculon.bench.cell import Cell
from speculon.bench.plan import AGAIN
from speculon.bench.rounds import SPEEDS, Need, Rounds
from speculon.proposers.registry import OFF
from speculon.telemetry import PARTS

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
# which stand below, too, in other words
TERMINAL = tuple(name for name in SPEED if name not in ("ms (rows)", "engine"))
LEGEND = (
    "tok/s: prompts included; x off: median of pairs; no loops: over the n texts that do not end repeating themselves; "
    "ms (rows): a decoding call of the target, its two usual sizes; engine: share of a step neither in the target nor on drafts; "
    "same: texts equal to those of `off`; loops: texts that end repeating themselves and are not right; "
    "diagnosis: why the mode did not help, docs/bench.md says how it is found"
)
AGAINST = "policies against the best fixed mode"
AGAINST_HEAD = (
    "workload",
    "at once",
    "mode",
    "best fixed",
    "x best fixed (90 %)",
    "",
    "x off (90 %)",
    "off again",
)
LONG_WORD = 13  # characters: longer ones may be broken in the terminal
AGAINST_LEGEND = (
    "best fixed: the fastest mode of a fixed policy, `off` among them, picked on one half of the prompts and compared on "
    "the other, both ways round; x: geometric mean over groups of prompts, in the last rows over all cells; 90 %: interval, "
    "drawing the groups again; off again: plain decoding over itself, the noise"
)
ROUNDS = ("rounds", "ms", "draft", "target", "rest", "ms/draft", "found tok/call (a)")
ROUNDS_LEGEND = (
    "rounds: decoding calls that verified drafts (in the first a draft model reads the prompt), their mean time and its shares; "
    "a: acceptance of drafts whose predecessors were all accepted; "
    "for Sx: tokens per call, and a equal at every position, that would make decoding S times as fast as plain at these costs "
    "(one text at a time); from: share of the accepted tokens by source"
)
PROFILE = ("ms", *PARTS)
PROFILE_LEGEND = (
    "ms: a mean decoding step, and its shares; prepare: who runs, pages, the batch; decide: the policy; propose: drafting; "
    "forward: the target; verify: sampling and acceptance; commit: tokens and pages; settle: results for proposers and callers"
)


def figures(cell: Cell) -> tuple[str, ...]:
    """In the order of `SPEED`."""
    texts = cell.texts * len(cell.per_repeat)
    return (
        f"{cell.tokens_per_second:.0f}",
        "1" if cell.mode == OFF else f"{cell.ratio:.2f}",
        f"{number(cell.ratio_without_loops, '.2f')} ({cell.texts_without_loops})"
        if cell.texts_without_loops
        else "-",
        number(cell.tokens_per_target_call, ".2f"),
        " ".join(f"{ms:.1f} ({rows})" for rows, ms in usual_calls(cell)) or "-",
        number(cell.overhead, ".1%"),
        "-" if cell.mode == OFF else f"{texts - cell.different}/{texts}" if cell.different else "all",
        number(cell.exact, ".0%"),
        f"{cell.looping:.0%}",
        cell.diagnosis or "-",
    )


def round_figures(cell: Cell, rounds: Rounds) -> tuple[str, ...]:
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


def wanted(need: Need) -> str:
    return f"{need.tokens_per_target_call:.2f} ({'impossible' if need.acceptance is None else f'{need.acceptance:.0%}'})"


def usual_calls(cell: Cell) -> list[tuple[int, float]]:
    """The two most frequent sizes of a decoding call, small ones first."""
    often = sorted(cell.ms_by_rows, key=lambda rows: -cell.ms_by_rows[rows][1])[:2]
    return [(rows, cell.ms_by_rows[rows][0]) for rows in sorted(often)]


def notes(cell: Cell) -> list[str]:
    """What does not fit into a column."""
    found = []
    if cell.per_position:
        found.append(
            f"{accepted(cell)} of the drafts at positions 1 to {len(cell.per_position)} accepted; "
            f"accepted tokens from {from_whom(cell)}"
        )
    if split := cell.rounds:
        found.append(
            f"a round that drafts takes {split.step_ms:.1f} ms: drafting {split.draft:.0%} ({split.draft_ms_per_position:.2f} ms "
            f"a position), target {split.target:.0%}, rest {split.rest:.0%}"
        )
        if cell.needed:
            needed = ", ".join(f"{wanted(need)} for {need.speed:g}x" for need in cell.needed)
            found.append(f"needed tok/call (acceptance): {needed}; found {round_figures(cell, split)[-1]}")
    if cell.different:
        gaps = (
            f"; where greedy ones part, the candidates are at most {max(cell.tie_nats):.0e} nat apart"
            if cell.tie_nats
            else ""
        )
        may = ", as rejection may: the distribution is the same" if cell.rejection else ""
        found.append(
            f"{cell.different} of {cell.texts * len(cell.per_repeat)} texts differ from those of {OFF}{may}{gaps}"
        )
    return [f"{cell.mode}: {note}" for note in found]


def accepted(cell: Cell) -> str:
    return (
        " ".join(f"{share:.0%}".rstrip("%") for share in cell.per_position) + " %"
        if cell.per_position
        else "-"
    )


def from_whom(cell: Cell) -> str:
    return ", ".join(f"{who} {share:.0%}" for who, share in cell.sources.items())


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def by_cell(cells: list[Cell]) -> list[list[Cell]]:
    """The modes of each workload and concurrency."""
    return [list(group) for _, group in groupby(cells, key=lambda cell: (cell.workload, cell.concurrency))]


def table(cells: list[Cell]) -> Table:
    """For the terminal: the modes of one workload at one concurrency."""
    first = cells[0]
    title = (
        f"{first.workload}, {'one at a time' if first.concurrency == 1 else f'{first.concurrency} at once'}"
    )
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("mode", overflow="fold", min_width=len(AGAIN))
    for name in TERMINAL:
        words = name == SPEED[-1]
        made.add_column(
            name.replace(", ", ",\n").replace(" (n)", "\n(n)"),
            justify="left" if words else "right",
            no_wrap=not words,
        )
    for cell in cells:
        shown = dict(zip(SPEED, figures(cell), strict=True))
        made.add_row(
            cell.mode,
            *(shown[name] for name in TERMINAL),
            style="dim" if cell.mode in (OFF, AGAIN) else "green" if cell.ratio > 1 else "",
        )
    return made


def markdown(cells: list[Cell]) -> str:
    """The same for a README, in one table."""
    head = ("workload", "at once", "mode", *SPEED, "drafts accepted, by position")
    return grid(head, [(*place(cell), *figures(cell), accepted(cell)) for cell in cells])


def rounds_markdown(cells: list[Cell]) -> str:
    """What the terminal shows as notes: the split of the rounds, and what they would have to bring."""
    head = ("workload", "at once", "mode", *ROUNDS, *(f"for {speed:g}x" for speed in SPEEDS), "from")
    rows = []
    for cell in cells:
        if cell.rounds:
            needed = [wanted(need) for need in cell.needed] or ["-"] * len(SPEEDS)
            rows.append((*place(cell), *round_figures(cell, cell.rounds), *needed, from_whom(cell)))
    return grid(head, rows)


def against_table(rows: list[Against]) -> Table:
    """For the terminal."""
    made = Table(
        title=AGAINST,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    figures = [against_figures(row) for row in rows]
    for name, column in zip(AGAINST_HEAD, zip(*figures, strict=True), strict=True):
        longest = max(len(word) for text in (name, *column) for word in text.split())
        made.add_column(name, overflow="fold", min_width=min(longest, LONG_WORD))
    for row, shown in zip(rows, figures, strict=True):
        made.add_row(*shown, style="" if row.concurrency else "bold")
    return made


def against_markdown(rows: list[Against]) -> str:
    return grid(AGAINST_HEAD, [against_figures(row) for row in rows])


def against_figures(row: Against) -> tuple[str, ...]:
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


def with_bounds(found: Estimate) -> str:
    known = found.low is not None and found.high is not None
    return f"{found.ratio:.2f}" + (f" ({found.low:.2f}-{found.high:.2f})" if known else "")


def profile_table(cells: list[Cell]) -> Table:
    """For the terminal: where a step's time goes, all workloads together."""
    made = Table(
        title="where a step's time goes",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
    )
    for name in ("", "at once", "mode", *PROFILE):
        made.add_column(name, justify="right" if name in PROFILE else "left", no_wrap=name in PROFILE)
    for row in profile_rows(cells):
        made.add_row(*row)
    return made


def profile_markdown(cells: list[Cell]) -> str:
    return grid(("workload", "at once", "mode", *PROFILE), profile_rows(cells))


def profile_rows(cells: list[Cell]) -> list[tuple[str, ...]]:
    """A row for each cell that decoded with this engine."""
    whole = [(cell, sum(cell.profile.values())) for cell in cells if cell.profile]
    return [
        (*place(cell), f"{ms:.2f}", *(f"{cell.profile[part] / ms:.1%}" for part in PARTS))
        for cell, ms in whole
    ]


def place(cell: Cell) -> tuple[str, str, str]:
    return cell.workload, str(cell.concurrency), cell.mode


def grid(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
