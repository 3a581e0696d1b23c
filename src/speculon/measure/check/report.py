"""A check as files and on a terminal: the verdict, three tables, a chart, and JSON with all figures."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from speculon.measure.bench.provenance import commit, machine, model_facts, versions, write_files
from speculon.measure.bench.tables import Column, markdown, terminal
from speculon.measure.check.exact import ExactResult
from speculon.measure.check.plan import OVERALL, CheckPlan, Q, named
from speculon.measure.check.run import Findings
from speculon.measure.check.sampled import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from speculon.engine.llm import LLM

STYLES = {"passed": "bold green", "failed": "bold red", "inconclusive": "bold"}
VERDICTS = {
    "passed": (
        "passed: no text differs from plain decoding by more than plain decoding differs from itself, "
        "and the check found the errors that were planted"
    ),
    "failed": "failed: texts differ from plain decoding by more than rounding or chance explains",
    "inconclusive": (
        "inconclusive: no difference was found, but this check would not have found an error either"
    ),
}
EXACT_LEGEND = (
    "Each arm is compared with plain decoding. Where two texts first differ, one fresh forward over their "
    "common part scores both tokens; regret: log p of the best token minus log p of the one chosen, in nat "
    "(with the same seed: noise included); a regret below the limit is a near-tie"
)
SAMPLED_LEGEND = (
    "Each arm is compared with plain decoding under seeds of its own. cells: prompt x sampler x position, "
    f"rejected by Benjamini and Hochberg at q = {Q:g}; p of all: one test of all cells together, rejected at "
    f"{OVERALL:g}. A rejected comparison is repeated with fresh seeds, and fails if it is rejected again"
)
WORK_LEGEND = (
    "rounds: rounds with drafts; accepted: accepted drafts; by q: rounds judged with the drafter's "
    "probabilities; wrong: rounds that ended at a wrong draft; planted: rounds in which the check kept the "
    "wrong draft on purpose"
)
COLOURS = {
    "plain": ("#6b6b6b",),
    "speculation": ("#2f6f9f", "#4c9a5f", "#7b5ea7"),
    "control": ("#b5495b", "#e08a2e", "#8c5a3c"),
}
FLOOR = 1e-9  # nat: where what did not move at all is drawn

Arm = ExactResult | Comparison
EXACT: tuple[Column[ExactResult], ...] = (
    Column("token for token", lambda result: result.label),
    Column("texts", lambda result: str(result.texts)),
    Column("tokens", lambda result: str(result.tokens)),
    Column("same", lambda result: str(result.identical)),
    Column("near-ties", lambda result: str(len(result.ties))),
    Column("failed", lambda result: str(len(result.failures))),
    Column("worst regret", lambda result: worst_regret(result)),
)
SAMPLED: tuple[Column[Comparison], ...] = (
    Column("in distribution", lambda test: test.label),
    Column("cells", lambda test: str(test.cells)),
    Column("rejected", lambda test: str(len(test.rejected))),
    Column("least p", lambda test: f"{min(test.p):.1e}"),
    Column("p of all", lambda test: f"{test.overall:.1e}"),
)
WORK: tuple[Column[Arm], ...] = (
    Column("speculation", lambda arm: arm.label),
    Column("rounds", lambda arm: str(arm.work.rounds)),
    Column("accepted", lambda arm: str(arm.work.accepted)),
    Column("by q", lambda arm: str(arm.work.by_q)),
    Column("wrong", lambda arm: str(arm.work.wrong)),
    Column("planted", lambda arm: str(arm.work.planted)),
)


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
        fields, margin = asdict(self), self.findings.margin
        findings, plan = fields.pop("findings"), fields.pop("plan").model_dump()
        for result, arm in zip(findings["exact"], self.findings.exact, strict=True):
            result |= {"identical": arm.identical, "failures": len(arm.failures)}
        plan["samplers"] = [sampler.model_dump(exclude_unset=True) for sampler in self.plan.samplers]
        return {
            "outcome": self.findings.outcome,
            **findings,
            "margin": {"measured": margin.largest, "limit": margin.limit, "moved": margin.moved},
            "plan": plan,
            **fields,
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


def worst_regret(result: ExactResult) -> str:
    regrets = [each.regret for each in result.divergences if each.regret is not None]
    return f"{max(regrets):.1e}" if regrets else "-"


def comparisons(findings: Findings) -> list[Comparison]:
    """Each, with its repetition below it."""
    return [test for first in findings.sampled for test in (first, first.again) if test]


def speculating(findings: Findings) -> list[Arm]:
    arms: list[Arm] = [*findings.exact, *comparisons(findings)]
    return [arm for arm in arms if arm.role != "plain"]


def exact_legend(findings: Findings) -> str:
    margin = findings.margin
    rule = f"the limit of a near-tie is {margin.limit:.1g} nat"
    rule = "the model is batch-invariant, so no text may differ" if margin.invariant else rule
    return (
        f"{EXACT_LEGEND}. In other batch shapes plain decoding itself changes the gap between the two best "
        f"tokens by up to {margin.largest:.1e} nat (over {len(margin.moved)} positions); {rule}"
    )


def tables_of(findings: Findings) -> list[tuple[Table, str]]:
    """For the terminal, with their legends; controls are dim."""

    def style(arm: Arm) -> str:
        return "" if arm.role == "speculation" else "dim"

    return [
        (terminal("the same texts", EXACT, findings.exact, style), exact_legend(findings)),
        (terminal("sampled texts", SAMPLED, comparisons(findings), style), SAMPLED_LEGEND),
        (terminal("what was speculated", WORK, speculating(findings), style), WORK_LEGEND),
    ]


def show(report: CheckReport) -> None:
    """On stdout: the verdict and its reasons, then one table per question."""
    console, findings = Console(highlight=False), report.findings
    console.print(VERDICTS[findings.outcome], style=STYLES[findings.outcome], markup=False)
    for line in (*findings.problems, *findings.gaps):
        console.print(f"- {line}", markup=False)
    for table, legend in tables_of(findings):
        console.print("", table, sep="\n")
        console.print(f"{legend}.", style="dim", markup=False)
    console.print(f"\n{heading(report)}", style="dim", markup=False, soft_wrap=True)


def page(report: CheckReport) -> str:
    findings = report.findings
    at = f"at {report.commit or 'an installed package'}, {report.date[:10]}, torch {report.versions['torch']}"
    parts = [
        f"**{VERDICTS[findings.outcome]}**",
        f"`{report.command}` {at}: {heading(report)}",
        *("\n".join(f"- {line}" for line in lines) for lines in (findings.problems, findings.gaps) if lines),
        markdown(EXACT, findings.exact),
        f"{exact_legend(findings)}.",
        markdown(SAMPLED, comparisons(findings)),
        f"{SAMPLED_LEGEND}.",
        markdown(WORK, speculating(findings)),
        f"{WORK_LEGEND}.",
    ]
    return "\n\n".join(parts) + "\n"


def write(report: CheckReport, folder: Path) -> list[Path]:
    """`check.json`, `report.md` and, where matplotlib is installed, `check.png`."""
    files = write_files(folder, "check.json", report.to_dict(), "report.md", page(report))
    if find_spec("matplotlib"):
        files.append(folder / "check.png")
        chart_of(report.findings, heading(report)).savefig(files[-1], dpi=150)
    return files


# the chart: p-values beside those of chance, and regrets beside plain decoding's


def chart_of(findings: Findings, title: str) -> Figure:
    from speculon.measure.bench.charts import name_panel, new_figure

    figure = new_figure(10.5, 4.4, f"{findings.outcome}: {title}")
    left, right = figure.subplots(1, 2)
    draw_p(left, findings)
    name_panel(left, "sampled texts, against plain decoding")
    draw_regrets(right, findings)
    name_panel(right, "same texts: change of the gap of the two best tokens, and regrets")
    return figure


def draw_p(panel: Any, findings: Findings) -> None:
    """The share of cells below each p: the diagonal where two arms have one distribution."""
    panel.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":", label="chance")
    for role, colours in COLOURS.items():
        tests = [test for test in findings.sampled if test.role == role]
        for test, colour in zip(tests, colours, strict=True):
            p = sorted(test.p)
            share = [(i + 1) / len(p) for i in range(len(p))]
            panel.step(
                [0, *p, 1], [0, *share, 1], where="post", color=colour, linewidth=1.4, label=test.label
            )
    panel.set_xlabel("p of a cell (prompt x sampler x position)")
    panel.set_ylabel("share of the cells at or below")
    panel.legend(frameon=False, fontsize=8, loc="lower right")


def draw_regrets(panel: Any, findings: Findings) -> None:
    """How far plain decoding differs from itself, the regrets of texts that differ, and the limit."""
    margin = findings.margin
    moved = sorted(max(nats, FLOOR) for nats in margin.moved)
    share = [1 - i / len(moved) for i in range(len(moved))]
    panel.plot(moved, share, color=COLOURS["plain"][0], label="plain, other batch shapes")
    panel.axvline(
        margin.limit, color="black", linewidth=0.8, linestyle="--", label=f"limit {margin.limit:.1e} nat"
    )
    for height, role in ((0.35, "speculation"), (0.65, "control")):
        divergences = [each for arm in findings.exact if arm.role == role for each in arm.divergences]
        regrets = [max(each.regret, FLOOR) for each in divergences if each.regret is not None]
        label = f"{'texts that differ' if role == 'speculation' else 'planted errors'}: {len(regrets)}"
        panel.scatter(regrets, [height] * len(regrets), s=18, alpha=0.6, color=COLOURS[role][0], label=label)
    panel.set_xscale("log")
    panel.set_xlabel("nat")
    panel.set_ylabel("share of positions that changed by at least so much")
    panel.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.95))
