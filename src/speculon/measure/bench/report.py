"""What a benchmark says: a file with its circumstances, tables, and a chart."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from speculon.core.telemetry import PARTS
from speculon.core.types import Reason
from speculon.measure.bench.against import Against, MeanRatio, against_best_fixed
from speculon.measure.bench.cell import Cell
from speculon.measure.bench.diagnosis import GATED
from speculon.measure.bench.plan import AGAIN, BenchPlan
from speculon.measure.bench.provenance import commit, machine, model_facts, versions, write_files
from speculon.measure.bench.tables import Column, markdown, number, terminal
from speculon.measure.bench.workloads import Case, fingerprint
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.llm import LLM

MEASURED = (
    "tokens_per_second: tokens written / wall time from submission to the last token, prompt processing "
    "and all Python included, prefix cache off; decode_*: the same over steps without prompt tokens. "
    "ratio: median over (group of prompts, repeat) of a mode's speed / the speed of `off` on the same "
    "group in the same repeat; `off again` repeats `off` and shows the noise; ratio_without_loops: over "
    "the pairs of single texts of which neither ends repeating itself. "
    "profile: mean ms of a decoding step, part by part. policy: of the mode's requests; each mode has "
    "policies of its own, which begin with the costs that the engine measured at start, and observe rounds "
    "of this mode alone. speeds: tokens_per_second by repeat and group of prompts, in the order of the "
    "cases. against_best_fixed: over_best: geometric mean over groups of a mode's speed / that of the "
    "fixed mode (`off` among them) that was fastest on the other half of the groups; picked: by the first "
    "half, and by the second; over_plain, again: the mode's speed, and that of `off again`, / that of "
    "`off`; low, high: 90 % interval, from resampled groups of each cell. Where requests arrive at a rate "
    "(plan.request_rate): tokens_per_second counts the tokens until the last request has its first one, over "
    "the time since the first arrived; first_token_ms: from a request's arrival to its first token, waiting "
    "included; per_token_ms: from there to its last token, by the tokens after the first; both p50 and p95 "
    "over the texts of all repeats."
)

TERMINAL_LEGEND = (
    "tok/s: tokens per second, with the time for prompts; x off: speed relative to `off`, the median of "
    "pairs; tok/call: tokens per target call; accepted: share of the drafts; same: texts equal to those of "
    "`off`; diagnosis: why a mode pays or does not (docs/bench.md)"
)
LATENCY_LEGEND = (
    "tok/s: tokens per second until the last request has begun; x off: speed relative to `off`, the median "
    "of pairs; first token: ms from a request's arrival, waiting included; per token: ms for each further "
    "token; both as p50 / p95"
)
TERMINAL_LATENCY_LEGEND = (
    f"{LATENCY_LEGEND}; same: texts equal to those of `off`; diagnosis: why a mode pays or does not "
    "(docs/bench.md)"
)
LEGEND = (
    "tok/s: tokens per second, with the time for prompts; x off: speed relative to `off`, the median of "
    "pairs; no loops: the same over the n texts that do not end in a repetition; ms (rows): time of a "
    "decoding "
    "call of the target, for its two most frequent numbers of rows; engine: share of a step that goes "
    "neither "
    "into the target nor into drafts; same: texts equal to those of `off`; exact: texts equal to the "
    "expected "
    "one; loops: texts that end in a repetition and are not the expected one; diagnosis: why a mode pays "
    "or does not (docs/bench.md says how this is decided); from: share of the accepted tokens by method"
)
AGAINST = "policies against the best fixed mode"
AGAINST_TERMINAL_LEGEND = (
    "best fixed: the fastest mode with a fixed K, chosen on one half of the prompts and compared on the "
    "other; 90 %: confidence interval; when it contains 1, the comparison is undecided"
)
AGAINST_LEGEND = (
    "best fixed: the fastest mode with a fixed policy (`off` is one), chosen on one half of the prompts and "
    "compared on the other, for both halves; x: geometric mean over groups of prompts, in the last rows over "
    "all cells; 90 %: confidence interval from resampled groups; off again: plain decoding relative to "
    "itself, which shows the noise"
)
PROFILE_LEGEND = (
    "ms: mean time of a decoding step, followed by the shares of its parts; prepare: schedule, pages and "
    "batch; decide: the policy; propose: drafting; forward: the target; verify: sampling and acceptance; "
    "commit: tokens and pages; settle: results for proposers and callers"
)


# figures


def ratio(cell: Cell) -> str:
    return "1" if cell.mode == OFF else f"{cell.ratio:.2f}"


def ratio_without_loops(cell: Cell) -> str:
    if not cell.texts_without_loops:
        return "-"
    return f"{number(cell.ratio_without_loops, '.2f')} ({cell.texts_without_loops})"


def same(cell: Cell) -> str:
    if cell.mode == OFF:
        return "-"
    return f"{texts_of(cell) - cell.different}/{texts_of(cell)}" if cell.different else "all"


def texts_of(cell: Cell) -> int:
    """Of all repeats."""
    return cell.texts * len(cell.per_repeat)


def usual_calls(cell: Cell) -> str:
    """The two most frequent sizes of a decoding call, small ones first."""
    often = sorted(cell.ms_by_rows, key=lambda rows: -cell.ms_by_rows[rows][1])[:2]
    return " ".join(f"{cell.ms_by_rows[rows][0]:.1f} ({rows})" for rows in sorted(often)) or "-"


def by_position(cell: Cell) -> str:
    shares = " ".join(f"{share:.0%}".rstrip("%") for share in cell.per_position)
    return f"{shares} %" if shares else "-"


def by_source(cell: Cell) -> str:
    return ", ".join(f"{source} {share:.0%}" for source, share in cell.sources.items()) or "-"


def share_of_step(part: str, cell: Cell) -> str:
    return f"{cell.profile[part] / sum(cell.profile.values()):.1%}"


def p50_p95(ms: tuple[float, float] | None, form: str) -> str:
    return "-" if ms is None else " / ".join(format(one, form) for one in ms)


def with_bounds(speed: MeanRatio) -> str:
    return f"{speed.ratio:.2f}" + (f" ({speed.bounds})" if speed.low is not None else "")


# columns

PLACE: tuple[Column[Cell], ...] = (
    Column("workload", lambda cell: cell.workload),
    Column("concurrency", lambda cell: str(cell.concurrency)),
    Column("mode", lambda cell: cell.mode),
)
SPEED: Column[Cell] = Column("tok/s", lambda cell: f"{cell.tokens_per_second:.0f}")
RATIO, SAME = Column("x off", ratio), Column("same", same)
PER_CALL: Column[Cell] = Column("tok/call", lambda cell: number(cell.tokens_per_target_call, ".2f"))
DIAGNOSIS: Column[Cell] = Column("diagnosis", lambda cell: cell.diagnosis or "-", words=True)
ALL_FIGURES = (
    *PLACE,
    SPEED,
    RATIO,
    Column("x off, no loops (n)", ratio_without_loops),
    PER_CALL,
    Column("ms (rows)", usual_calls),
    Column("engine", lambda cell: number(cell.overhead, ".1%")),
    SAME,
    Column("exact", lambda cell: number(cell.exact, ".0%")),
    Column("loops", lambda cell: f"{cell.looping:.0%}"),
    DIAGNOSIS,
    Column("drafts accepted, by position", by_position),
    Column("from", by_source),
)
TERMINAL: tuple[Column[Cell], ...] = (
    PLACE[-1],
    SPEED,
    RATIO,
    PER_CALL,
    Column("accepted", lambda cell: number(cell.acceptance_rate, ".0%")),
    SAME,
    DIAGNOSIS,
)
LATENCY: tuple[Column[Cell], ...] = (
    Column("first token", lambda cell: p50_p95(cell.first_token_ms, ".0f")),
    Column("per token", lambda cell: p50_p95(cell.per_token_ms, ".1f")),
)
TERMINAL_LATENCY = (PLACE[-1], SPEED, RATIO, *LATENCY, SAME, DIAGNOSIS)
PROFILE: tuple[Column[Cell], ...] = (
    *PLACE,
    Column("ms", lambda cell: f"{sum(cell.profile.values()):.2f}"),
    *(Column(part, partial(share_of_step, part)) for part in PARTS),
)
POLICY_PLACE: tuple[Column[Against], ...] = (
    Column("workload", lambda row: row.workload),
    Column("concurrency", lambda row: str(row.concurrency or "-")),
    Column("mode", lambda row: row.mode, words=True),
)
AGAINST_ALL = (
    *POLICY_PLACE,
    Column("best fixed", lambda row: " / ".join(dict.fromkeys(row.picked)) or "-"),
    Column("x best fixed (90 %)", lambda row: with_bounds(row.over_best)),
    Column("", lambda row: row.over_best.verdict),
    Column("x off (90 %)", lambda row: with_bounds(row.over_plain)),
    Column("off again", lambda row: f"{row.again.ratio:.2f}"),
)
AGAINST_TERMINAL = (
    *POLICY_PLACE,
    Column("x best fixed", lambda row: f"{row.over_best.ratio:.2f}"),
    Column("90 %", lambda row: row.over_best.bounds),
    Column("", lambda row: row.over_best.verdict, words=True),
)


@dataclass(slots=True)
class Report:
    """Everything a stranger needs to repeat the run, and the figures."""

    command: str
    plan: dict[str, Any]
    model: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    cells: list[Cell]
    against_best_fixed: list[Against] = field(default_factory=list)
    measured: str = MEASURED
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    commit: str | None = field(default_factory=lambda: commit())
    versions: dict[str, str] = field(default_factory=lambda: versions())
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    @classmethod
    def of(
        cls,
        argv: list[str],
        plan: BenchPlan,
        llm: LLM,
        cells: list[Cell],
        cases: dict[str, list[Case]],
    ) -> Report:
        return cls(
            shlex.join(["speculon", *argv]),
            {**plan.model_dump(exclude={"data"}), "data": plan.data and plan.data.facts()},
            model_facts(llm),
            {
                name: {
                    "cases": len(some),
                    "prompt_tokens": [len(case.prompt) for case in some],
                    "fingerprint": fingerprint(some),
                }
                for name, some in cases.items()
            },
            cells,
            against_best_fixed(cells),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def write(report: Report, folder: Path) -> list[Path]:
    """`bench.json`, `bench.md` and, with matplotlib, `bench.png`."""
    files = write_files(folder, "bench.json", report.to_dict(), "bench.md", page(report))
    if find_spec("matplotlib"):
        from speculon.measure.bench.charts import chart_of

        files.append(folder / "bench.png")
        chart_of(report.cells, model_line(report)).savefig(files[-1], dpi=150)
    return files


def page(report: Report) -> str:
    cells, against = report.cells, report.against_best_fixed
    parts = [heading(report), verdict(cells, against)]
    if against:
        parts += [f"## {AGAINST}", markdown(AGAINST_ALL, against), f"{AGAINST_LEGEND}."]
        parts.append("## All modes")
    if arrive(cells):
        parts += [markdown((*PLACE, SPEED, RATIO, *LATENCY), cells), f"{LATENCY_LEGEND}."]
    parts += [markdown(ALL_FIGURES, cells), f"{LEGEND}{gates(cells)}."]
    parts += [line for cell in cells if (line := difference(cell))]
    parts += [profile_markdown(cells), f"{PROFILE_LEGEND}."]
    return "\n\n".join(parts) + "\n"


def heading(report: Report) -> str:
    plan = report.plan
    return (
        f"`{report.command}` at {report.commit or 'an installed package'}, {report.date[:10]}: "
        f"{model_line(report)}, torch {report.versions['torch']}; medians of {plan['repeats']} alternated "
        f"repeats of {prompts_of(plan)}, up to {plan['max_tokens']} tokens each{process_of(plan)}"
    )


def process_of(plan: Mapping[str, Any]) -> str:
    """How requests arrive; empty where they begin together."""
    rate = plan.get("request_rate")
    return "" if rate is None else f", which arrive as a Poisson process of {rate:g} a second"


def prompts_of(plan: Mapping[str, Any]) -> str:
    """How many prompts each workload has: those of a file may be fewer than were asked for."""
    most, known = plan["prompts"], (plan.get("data") or {}).get("prompts", {})
    counts = sorted({min(most, known.get(name.partition("@")[0], most)) for name in plan["workloads"]})
    shown = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"{shown} prompt{'s' * (counts != [1])}"


def model_line(report: Report) -> str:
    model, machine = report.model, report.machine
    drafts = "".join(f", {method} {name}" for method, name in model["drafts"].items())
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, "
        f"{model['dtype']}{drafts}; {machine.get('gpu', machine['cpu'])}, "
        f"{model['threads']} thread{'s' * (model['threads'] > 1)}"
    )


# sentences


def verdict(cells: Sequence[Cell], against: Sequence[Against]) -> str:
    """The result in a sentence for the fastest mode, and one for each policy."""
    sentences = [fastest(cells)]
    for row in against:
        if row.concurrency is None:
            speed = row.over_best
            sure = f", 90 % {speed.bounds}: {speed.verdict}" if speed.low is not None else ""
            sentences.append(f"{row.mode} compared with the best fixed mode: {speed.ratio:.2f}x{sure}.")
    return " ".join(sentences)


def fastest(cells: Sequence[Cell]) -> str:
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        ratios.setdefault(cell.mode, []).append(cell.ratio)
    noise = mean_ratio(ratios[AGAIN])
    means = {mode: mean_ratio(some) for mode, some in ratios.items() if mode not in {OFF, AGAIN}}
    mode = max(means, key=means.__getitem__, default=OFF)
    ending = f"(plain decoding against itself: {noise:.2f}x)."
    if means and means[mode] > max(1.0, noise):
        return f"Fastest mode: {mode}, {means[mode]:.2f}x plain decoding {ending}"
    best = f" The best of them, {mode}, reached {means[mode]:.2f}x" if means else ""
    return f"No mode was faster than plain decoding.{best} {ending}"


def mean_ratio(ratios: Sequence[float]) -> float:
    """Geometric."""
    return exp(fmean(log(ratio) for ratio in ratios))


def gates(cells: Sequence[Cell]) -> str:
    """What the reasons in the diagnoses of gated modes mean, for the end of a legend."""
    diagnoses = (cell.diagnosis or "" for cell in cells)
    codes = {each.removeprefix(f"{GATED}: ") for each in diagnoses if each.startswith(GATED)}
    return "".join(f"; {GATED}: {code}: {Reason(code).sentence}" for code in sorted(codes))


def difference(cell: Cell) -> str | None:
    """That texts are not those of plain decoding, and why they need not be; None: they are."""
    if not cell.different:
        return None
    line = f"{cell.mode}: {cell.different} of {texts_of(cell)} texts differ from those of {OFF}"
    if cell.rejection:
        line += ", as its rule of acceptance allows: the distribution is the same"
    if cell.tie_nats:
        apart = f"{max(cell.tie_nats):.0e} nat apart"
        line += f"; where greedy texts differ, the two tokens are at most {apart}, a near-tie"
    return line


# tables


def by_cell(cells: list[Cell]) -> list[list[Cell]]:
    """The modes of each workload and concurrency."""
    return [list(group) for _, group in groupby(cells, key=lambda cell: (cell.workload, cell.concurrency))]


def speed_table(cells: list[Cell]) -> Table:
    """For the terminal: the modes of one workload at one concurrency."""

    def style(cell: Cell) -> str:
        return "dim" if cell.mode in (OFF, AGAIN) else "green" if cell.ratio > 1 else ""

    columns = TERMINAL_LATENCY if arrive(cells) else TERMINAL
    return terminal(f"{cells[0].workload}, concurrency {cells[0].concurrency}", columns, cells, style)


def arrive(cells: Sequence[Cell]) -> bool:
    """Whether the requests of these cells arrived at a rate."""
    return cells[0].first_token_ms is not None


def against_table(rows: list[Against]) -> Table:
    """For the terminal."""
    return terminal(AGAINST, AGAINST_TERMINAL, rows, lambda row: "" if row.concurrency else "bold")


def profile_markdown(cells: list[Cell]) -> str:
    """Where a step's time goes: a row for each cell that decoded with this engine."""
    return markdown(PROFILE, [cell for cell in cells if cell.profile])


def show(report: Report) -> None:
    """On stdout: the result as a sentence, then the speed of each mode, then the policies."""
    console = Console(highlight=False)
    console.print(verdict(report.cells, report.against_best_fixed), style="bold", markup=False)
    for cells in by_cell(report.cells):
        console.print("", speed_table(cells), sep="\n")
        for line in filter(None, map(difference, cells)):
            console.print(f"  {line}", style="dim", markup=False)
    legend = TERMINAL_LATENCY_LEGEND if arrive(report.cells) else TERMINAL_LEGEND
    console.print(f"\n{legend}{gates(report.cells)}.\n", style="dim", markup=False)
    if report.against_best_fixed:
        console.print(against_table(report.against_best_fixed))
        console.print(f"{AGAINST_TERMINAL_LEGEND}.\n", style="dim", markup=False)
    console.print(heading(report), style="dim", markup=False, soft_wrap=True)
