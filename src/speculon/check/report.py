"""A check as files: the verdict, three tables, a chart, and JSON with everything behind them."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.bench.provenance import commit, machine, model_facts, versions
from speculon.check import tables
from speculon.check.plan import CheckPlan, named
from speculon.check.run import Findings

if TYPE_CHECKING:
    from speculon.llm import LLM


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
        found, margin = self.findings, self.findings.margin
        samplers = [sampler.model_dump(exclude_unset=True) for sampler in self.plan.samplers]
        counts = [{"identical": one.identical, "failures": len(one.failures)} for one in found.exact]
        return {
            "outcome": found.outcome,
            "problems": found.problems,
            "gaps": found.gaps,
            "margin": {"measured": margin.largest, "limit": margin.limit, "moved": margin.moved},
            "exact": [{**asdict(one), **more} for one, more in zip(found.exact, counts, strict=True)],
            "sampled": [asdict(one) for one in found.sampled],
            "plan": {**asdict(self.plan), "samplers": samplers},
            "command": self.command,
            "model": self.model,
            "date": self.date,
            "commit": self.commit,
            "versions": self.versions,
            "machine": self.machine,
        }


def heading(report: CheckReport) -> str:
    model, plan = report.model, report.plan
    used = model["speculation"]
    drafts = "".join(f", {method} {name}" for method, name in model["drafts"].items())
    samplers = "; ".join(named(sampler) for sampler in plan.samplers)
    return (
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}{drafts}; "
        f"method {used['method']}, policy {used['policy']}, K = {used['num_speculative_tokens']}; "
        f"{report.machine.get('gpu', report.machine['cpu'])}; {len(plan.prompts)} prompts; "
        f"{plan.runs} runs per arm, prompt and sampler; sampled with {samplers}"
    )


def markdown(report: CheckReport) -> str:
    found = report.findings
    at = f"at {report.commit or 'an installed package'}, {report.date[:10]}, torch {report.versions['torch']}"
    parts = [
        f"**{tables.VERDICTS[found.outcome]}**",
        f"`{report.command}` {at}: {heading(report)}",
        *("\n".join(f"- {line}" for line in lines) for lines in (found.problems, found.gaps) if lines),
        tables.markdown(found),
    ]
    return "\n\n".join(parts) + "\n"


def write(report: CheckReport, folder: Path) -> list[Path]:
    """`check.json`, `report.md` and, where matplotlib is installed, `check.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "check.json", folder / "report.md"]
    files[0].write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files[1].write_text(markdown(report), encoding="utf-8")
    if find_spec("matplotlib"):
        from speculon.check.chart import draw

        files.append(draw(report.findings, heading(report), folder / "check.png"))
    return files
