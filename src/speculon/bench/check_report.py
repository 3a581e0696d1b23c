"""What a check says: its verdict, two tables, and a file with everything behind them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from speculon.bench.check import Findings
from speculon.bench.check_plan import OVERALL, CheckPlan, Q, named
from speculon.bench.check_same import Margin, Sameness
from speculon.bench.check_sampled import Comparison
from speculon.bench.check_texts import Work
from speculon.bench.report import commit, machine, model_facts, versions
from speculon.bench.tables import grid

if TYPE_CHECKING:
    from speculon.llm import LLM

SAME = (
    "token for token",
    "texts",
    "tokens",
    "rounds",
    "accepted",
    "same",
    "near-ties",
    "failed",
    "worst regret",
)
SAME_LEGEND = (
    "against plain decoding; where a text first differs, a fresh forward over what the two share is the judge; "
    "regret: log p of the best token less that of the one taken, in nat (of the same seed: with its noise)"
)
SAMPLED = (
    "sampled, in distribution",
    "rounds",
    "accepted",
    "by q",
    "cells",
    "rejected",
    "least p",
    "p of all",
)
SAMPLED_LEGEND = (
    "against plain decoding, each arm with seeds of its own; by q: rounds judged by rejection, with the drafter's q; cells: "
    f"prompt x sampler x position, rejected by Benjamini and Hochberg at q = {Q:g}; p of all: every cell together, rejected at "
    f"{OVERALL:g}. What is rejected once is repeated with fresh seeds, and fails when it is rejected again"
)
VERDICTS = {
    "passed": "passed: no text departs from the target's further than plain decoding does, and the planted errors were found",
    "failed": "failed: texts depart from the target's by more than rounding or chance",
    "not enough": "not enough: nothing speaks against speculation, but this check could not have told",
}
Rows = Iterator[tuple[str, ...]]


@dataclass(slots=True)
class CheckReport:
    """Everything a stranger needs to repeat the check, and what it found."""

    command: str
    plan: CheckPlan
    model: dict[str, Any]
    findings: Findings
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    commit: str | None = field(default_factory=commit)
    versions: dict[str, str] = field(default_factory=versions)
    machine: dict[str, Any] = field(default_factory=machine)

    @classmethod
    def of(cls, argv: list[str], plan: CheckPlan, llm: LLM, findings: Findings) -> CheckReport:
        setting = llm.config.speculation
        used = {"method": setting.method, "policy": setting.policy, "num_speculative_tokens": setting.most()}
        return cls(shlex.join(["speculon", *argv]), plan, {**model_facts(llm), "speculation": used}, findings)

    def to_dict(self) -> dict[str, Any]:
        found = self.findings
        plan = asdict(self.plan)
        plan["samplers"] = [sampler.model_dump(exclude_unset=True) for sampler in self.plan.samplers]
        facts = {
            name: getattr(self, name)
            for name in ("command", "model", "date", "commit", "versions", "machine")
        }
        said = {"outcome": found.outcome, "problems": found.problems, "doubts": found.doubts}
        same = [
            {**asdict(one), "identical": one.identical, "failures": len(one.failures)} for one in found.same
        ]
        return {
            **said,
            "margin": {
                "measured": found.margin.largest,
                "limit": found.margin.limit,
                "moved": found.margin.moved,
            },
            "same": same,
            "sampled": [asdict(one) for one in found.sampled],
            "plan": plan,
            **facts,
        }


def same_rows(findings: Findings) -> Rows:
    """In the order of `SAME`."""
    for one in findings.same:
        counts = (one.identical, len(one.ties), len(one.failures))
        yield one.label, str(one.texts), str(one.tokens), *work(one.work), *map(str, counts), worst(one)


def work(done: Work) -> tuple[str, str]:
    return (str(done.rounds), str(done.accepted)) if done.rounds else ("-", "-")


def worst(one: Sameness) -> str:
    known = [parting.regret for parting in one.partings if parting.regret is not None]
    return f"{max(known):.1e}" if known else "-"


def sampled_rows(findings: Findings) -> Rows:
    """In the order of `SAMPLED`; repetitions stand below what they repeat."""
    for one in (row for first in findings.sampled for row in (first, first.again) if row):
        yield (
            one.label,
            *work(one.work),
            str(one.work.by_rejection) if one.work.rounds else "-",
            str(one.cells),
            str(len(one.rejected)),
            f"{min(one.p):.1e}",
            f"{one.overall:.1e}",
        )


def margin_line(margin: Margin) -> str:
    rule = "the limit" if margin.half else f"the limit in fp32 is {margin.limit:g}"
    return (
        f"plain decoding under other batch shapes: the gap of the two best tokens moves by up to {margin.largest:.1e} nat "
        f"over {len(margin.moved)} positions; {rule}"
    )


def planted_line(findings: Findings) -> str:
    arms: list[Sameness | Comparison] = [*findings.same, *findings.sampled]
    counts = [f"{one.work.planted} of {one.work.wrong}" for one in arms if one.kind == "control"]
    return f"planted errors: {', '.join(counts)} rounds with a wrong draft kept it, in the order of the rows"


def heading(report: CheckReport) -> str:
    model, plan = report.model, report.plan
    used = model["speculation"]
    drafts = "".join(f", {method} {name}" for method, name in model["drafts"].items())
    samplers = "; ".join(named(sampler) for sampler in plan.samplers)
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}{drafts}; method {used['method']}, "
        f"policy {used['policy']}, K = {used['num_speculative_tokens']}; {report.machine.get('gpu', report.machine['cpu'])}; "
        f"{len(plan.prompts)} prompts; {plan.runs} runs per arm, prompt and sampler; sampled with {samplers}"
    )


def table(head: tuple[str, ...], rows: Rows, kinds: list[str]) -> Table:
    """For the terminal; controls are dim."""
    made = Table(header_style="dim", box=None, pad_edge=False, collapse_padding=True)
    made.add_column(head[0], no_wrap=True)
    for name in head[1:]:
        made.add_column(name.replace(" ", "\n").replace("-", "-\n"), justify="right", no_wrap=True)
    for row, kind in zip(rows, kinds, strict=True):
        made.add_row(*row, style="" if kind == "speculation" else "dim")
    return made


def tables(findings: Findings) -> tuple[Table, Table]:
    kinds = [row.kind for one in findings.sampled for row in (one, one.again) if isinstance(row, Comparison)]
    return (
        table(SAME, same_rows(findings), [one.kind for one in findings.same]),
        table(SAMPLED, sampled_rows(findings), kinds),
    )


def markdown(report: CheckReport) -> str:
    found = report.findings
    parts = [
        f"**{VERDICTS[found.outcome]}**",
        f"`{report.command}` at {report.commit or 'an installed package'}, {report.date[:10]}, torch {report.versions['torch']}: "
        f"{heading(report)}",
        *("\n".join(f"- {line}" for line in lines) for lines in (found.problems, found.doubts) if lines),
        grid(SAME, list(same_rows(found))),
        f"{SAME_LEGEND}. {margin_line(found.margin)}.",
        grid(SAMPLED, list(sampled_rows(found))),
        f"{SAMPLED_LEGEND}. {planted_line(found)}.",
    ]
    return "\n\n".join(parts) + "\n"


def write(report: CheckReport, folder: Path) -> list[Path]:
    """`check.json`, `report.md` and, where matplotlib is installed, `check.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "check.json", folder / "report.md"]
    files[0].write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(markdown(report), encoding="utf-8")
    if find_spec("matplotlib"):
        from speculon.bench.check_chart import draw

        files.append(draw(report.findings, heading(report), folder / "check.png"))
    return files
