"""What a benchmark says: a file with its circumstances, tables, and a chart."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.bench import tables
from speculon.bench.advice import Advice
from speculon.bench.against import Against, against_best_fixed
from speculon.bench.cell import Cell
from speculon.bench.plan import BenchPlan
from speculon.bench.provenance import commit, machine, model_facts, versions
from speculon.bench.settings import as_toml
from speculon.bench.workloads import Case, fingerprint

if TYPE_CHECKING:
    from speculon.llm import LLM

MEASURED = (
    "tokens_per_second: tokens written / wall time from submission to the last token, prompt processing and "
    "all "
    "Python included, prefix cache off; decode_*: the same over steps without prompt tokens. "
    "ratio: median over (group of prompts, repeat) of a mode's speed / the speed of `off` on the same group "
    "in the "
    "same repeat; `off again` repeats `off` and shows the noise; ratio_without_loops: over the pairs of "
    "single "
    "texts of which neither ends repeating itself. "
    "rounds: decoding calls that verified drafts. needed: tokens per target call for a speed s: "
    "s * (ms of such a call) / (ms of a plain one); acceptance a, equal at every position, with "
    "sum_{i=0..K} a^i of that; null: impossible. "
    "profile: mean ms of a decoding step, part by part. "
    "policy: of the mode's requests; each mode has policies of its own, which begin with the costs that the "
    "engine "
    "measured at start, and observe rounds of this mode alone. "
    "speeds: tokens_per_second by repeat and group of prompts, in the order of the cases. "
    "against_best_fixed: over_best: geometric mean over groups of a mode's speed / that of the fixed mode "
    "(`off` "
    "among them) that was fastest on the other half of the groups; picked: by the first half, and by the "
    "second; "
    "over_plain, again: the mode's speed, and that of `off again`, / that of `off`; low, high: 90 % "
    "interval, from "
    "resampled groups of each cell."
)
WIDENED = "the same function at the call cost of a larger model"


@dataclass(slots=True)
class Report:
    """Everything a stranger needs to repeat the run, and the figures."""

    command: str
    plan: dict[str, Any]
    model: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    cells: list[Cell]
    against_best_fixed: list[Against] = field(default_factory=list)
    advice: Advice | None = None
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
        advice: Advice | None = None,
    ) -> Report:
        model = {**model_facts(llm), "widened_to": plan.widen and plan.widen * 1_000_000}
        return cls(
            shlex.join(["speculon", *argv]),
            {**asdict(plan), "data": plan.data and plan.data.facts()},
            model,
            workload_facts(cases),
            cells,
            against_best_fixed(cells),
            advice,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def workload_facts(cases: dict[str, list[Case]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "cases": len(some),
            "prompt_tokens": [len(case.prompt) for case in some],
            "fingerprint": fingerprint(some),
        }
        for name, some in cases.items()
    }


def write(report: Report, folder: Path) -> list[Path]:
    """`bench.json`, `bench.md` and, with matplotlib, `bench.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "bench.json", folder / "bench.md"]
    files[0].write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(markdown(report), encoding="utf-8")
    if find_spec("matplotlib"):
        from speculon.bench.chart import draw

        files.append(draw(report.cells, model_line(report), folder / "bench.png"))
    return files


def markdown(report: Report) -> str:
    cells, against = report.cells, report.against_best_fixed
    parts = [heading(report), tables.verdict(cells, against)]
    if report.advice:
        parts += ["\n".join(f"- {line}" for line in report.advice.answer)]
        parts += [f"```toml\n{as_toml(report.advice.settings)}```"]
    if against:
        parts += [f"## {tables.AGAINST}", tables.against_markdown(against), f"{tables.AGAINST_LEGEND}."]
        parts.append("## All modes")
    parts += [tables.markdown(cells), f"{tables.LEGEND}."]
    parts += [line for cell in cells if (line := tables.difference(cell))]
    parts += [tables.rounds_markdown(cells), f"{tables.ROUNDS_LEGEND}."]
    parts += [tables.profile_markdown(cells), f"{tables.PROFILE_LEGEND}."]
    return "\n\n".join(parts) + "\n"


def heading(report: Report) -> str:
    plan = report.plan
    return (
        f"`{report.command}` at {report.commit or 'an installed package'}, {report.date[:10]}: "
        f"{model_line(report)}, torch {report.versions['torch']}; medians of {plan['repeats']} alternated "
        "repeats "
        f"of {plan['prompts']} prompts, up to {plan['max_tokens']} tokens each"
    )


def model_line(report: Report) -> str:
    model, machine = report.model, report.machine
    millions = model["widened_to"] and model["widened_to"] // 10**6
    wide = f" widened to {millions} M parameters: {WIDENED}" if millions else ""
    drafts = "".join(f", {method} {name}" for method, name in model["drafts"].items())
    return (
        f"{model['name']}{wide}, {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, "
        f"{model['dtype']}{drafts}; {machine.get('gpu', machine['cpu'])}, "
        f"{model['threads']} thread{'s' * (model['threads'] > 1)}"
    )
