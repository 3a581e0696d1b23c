"""`speculon check`: whether speculation is lossless with the user's models and settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from speculon.bench.data import read_prompts
from speculon.check.plan import QUICK, CheckPlan
from speculon.commands.bench import refuse_chats, show_files
from speculon.commands.generate import read_text
from speculon.commands.options import Given, engine_settings, read_object
from speculon.commands.screen import counting, loading, print_json
from speculon.config import EngineConfig, SamplingParams
from speculon.proposers.registry import check_method

if TYPE_CHECKING:
    from speculon.check.report import CheckReport

EXIT_FAILED = 1
STYLES = {"passed": "bold green", "failed": "bold red", "inconclusive": "bold"}


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The command line's; None is the plan's own."""

    prompts: list[str]
    files: list[Path]
    data: list[Path]
    samplers: list[str]
    sizes: dict[str, Any]
    quick: bool
    out: Path | None

    def plan(self) -> CheckPlan:
        given: dict[str, Any] = {name: value for name, value in self.sizes.items() if value is not None}
        lines = [
            prompt for path in self.data for some in read_prompts(path).prompts.values() for prompt in some
        ]
        if prompts := (*self.prompts, *map(read_text, self.files), *lines):
            given["prompts"] = prompts
        if self.samplers:
            objects = [read_object("sampler", text) for text in self.samplers]
            given["samplers"] = tuple(SamplingParams(**values) for values in objects)
        return CheckPlan(**{**(QUICK if self.quick else {}), **given})


def run(options: CheckOptions, given: Given, speculative_config: str | None, as_json: bool) -> None:
    """Ends the process with code 1 unless the check has passed."""
    plan = options.plan()  # bad input is refused before torch is imported
    settings = with_drafts(engine_settings(given, speculative_config))
    config = EngineConfig(**settings)
    check_method(config.speculation.method)
    refuse_chats(config, plan.prompts)
    with loading(as_json) as stage:
        stage("importing torch")
        from speculon.check import report
        from speculon.check.run import check, check_drafter, count_tokens
        from speculon.llm import LLM

        llm = LLM(progress=stage, **settings)
        check_drafter(llm)
    with counting(as_json, "writing", count_tokens(plan), "tokens") as advance:
        findings = check(llm, plan, advance)
    made = report.CheckReport.of(sys.argv[1:], plan, llm, findings)
    files = report.write(made, options.out) if options.out else []
    if as_json:
        print_json(made.to_dict())
    else:
        show(made)
        show_files(files)
    if findings.outcome != "passed":
        raise typer.Exit(EXIT_FAILED)


def with_drafts(settings: dict[str, Any]) -> dict[str, Any]:
    """Policy `fixed` unless another is set: a round without drafts checks nothing."""
    if "policy" in EngineConfig(**settings).speculation.model_fields_set:
        return settings
    return {**settings, "speculation": {**settings.get("speculation", {}), "policy": "fixed"}}


def show(made: CheckReport) -> None:
    """The verdict and its reasons, then one table per question."""
    from speculon.check import report, tables

    console, found = Console(highlight=False), made.findings
    console.print(tables.VERDICTS[found.outcome], style=STYLES[found.outcome], markup=False)
    for line in (*found.problems, *found.gaps):
        console.print(f"- {line}", markup=False)
    for table, legend in tables.terminal(found):
        console.print("", table, sep="\n")
        console.print(f"{legend}.", style="dim", markup=False)
    console.print(f"\n{report.heading(made)}", style="dim", markup=False, soft_wrap=True)
