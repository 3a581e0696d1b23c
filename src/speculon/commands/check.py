"""`speculon check`: whether texts with speculation are the target's own, on the user's models and settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from speculon.bench.check_plan import QUICK, CheckPlan
from speculon.commands.generate import read_text
from speculon.commands.options import Given, engine_settings, read_object
from speculon.commands.screen import counting, errors, loading, print_json
from speculon.config import EngineConfig, SamplingParams
from speculon.proposers.registry import check_method

EXIT_FAILED = 1
COLOURS = {"passed": "green", "failed": "red", "not enough": "yellow"}


@dataclass(frozen=True, slots=True)
class Task:
    """What the command line asks for; None is the plan's own."""

    prompts: list[str]
    files: list[Path]
    samplers: list[str]
    sizes: dict[str, Any]
    quick: bool
    out: Path | None

    def plan(self) -> CheckPlan:
        asked: dict[str, Any] = {name: value for name, value in self.sizes.items() if value is not None}
        if prompts := (*self.prompts, *map(read_text, self.files)):
            asked["prompts"] = prompts
        if self.samplers:
            asked["samplers"] = tuple(
                SamplingParams(**read_object("sampler", text)) for text in self.samplers
            )
        return CheckPlan(**{**(QUICK if self.quick else {}), **asked})


def run(task: Task, given: Given, speculative_config: str | None, as_json: bool) -> None:
    """Ends the process with code 1 unless the check has passed."""
    plan = task.plan()  # what is wrong is told before torch is imported
    settings = with_drafts(engine_settings(given, speculative_config))
    check_method(EngineConfig(**settings).speculation.method)
    with loading(as_json) as tell:
        tell("importing torch")
        from speculon.bench import check_report as report
        from speculon.bench.check import check, check_drafter, tokens_asked
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
        check_drafter(llm)
    with counting(as_json, "writing", tokens_asked(plan), "tokens") as advance:
        findings = check(llm, plan, advance)
    made = report.CheckReport.of(sys.argv[1:], plan, llm, findings)
    files = report.write(made, task.out) if task.out else []
    if as_json:
        print_json(made.to_dict())
    else:
        show(made, files)
    if findings.outcome != "passed":
        raise typer.Exit(EXIT_FAILED)


def with_drafts(settings: dict[str, Any]) -> dict[str, Any]:
    """Policy `fixed` unless another is asked for: a round without drafts checks nothing."""
    if "policy" in EngineConfig(**settings).speculation.model_fields_set:
        return settings
    return {**settings, "speculation": {**settings.get("speculation", {}), "policy": "fixed"}}


def show(made: Any, files: list[Path]) -> None:
    from speculon.bench import check_report as report

    console, found = Console(highlight=False), made.findings
    notes = (
        f"{report.SAME_LEGEND}. {report.margin_line(found.margin)}.",
        f"{report.SAMPLED_LEGEND}. {report.planted_line(found)}.",
    )
    for table, note in zip(report.tables(found), notes, strict=True):
        console.print(table)
        console.print(f"{note}\n", style="dim", markup=False)
    console.print(report.heading(made), style="dim", markup=False, soft_wrap=True)
    for line in (*found.problems, *found.doubts):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        report.VERDICTS[found.outcome], style=f"bold {COLOURS[found.outcome]}", markup=False, soft_wrap=True
    )
    for file in files:
        errors().print(f"wrote {file}", style="dim", markup=False)
    if files and len(files) < 3:
        errors().print(
            "no chart: matplotlib is missing (pip install 'speculon[bench]')", style="yellow", markup=False
        )
