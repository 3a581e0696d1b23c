"""`speculon check`: whether speculation is lossless with the user's models and settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from speculon.cli.app import Json, SpeculativeConfig, command
from speculon.cli.bench import refuse_chats, show_files
from speculon.cli.generate import read_text
from speculon.cli.options import NO_REQUESTS, Flags, engine_settings, pick, read_object, settings_from
from speculon.cli.screen import counting, load_llm, print_json
from speculon.core.config import EngineConfig, SamplingParams, SpeculationConfig
from speculon.measure.check.plan import QUICK, CheckPlan
from speculon.speculation.proposers.registry import check_method

EXIT_FAILED = 1


@command("check")
@settings_from(CheckPlan, SpeculationConfig, EngineConfig, without=("prompts", "samplers", *NO_REQUESTS))
def check(
    *,
    prompt: Annotated[
        list[str] | None,
        Option("--prompt", "-p", help="text to continue; may be repeated (default: 16 built-in prompts)"),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, Option(help="a file to continue; may be repeated; - is stdin")
    ] = None,
    data: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help="prompts as JSON lines, or .gz of them: Spec-Bench, chats, prompts, HumanEval; may be "
            "repeated",
        ),
    ] = None,
    sampler: Annotated[
        list[str] | None,
        Option(
            metavar="JSON",
            help='sampling parameters, as {"temperature": 0.6}; may be repeated (default: three sets)',
        ),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="fewer runs of fewer prompts: detects only coarser errors")
    ] = False,
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="folder for report.md, check.json, check.png")
    ] = None,
    speculative_config: SpeculativeConfig = None,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """Check on your models that speculation changes no text.

    Exit code 0 when it passes, 1 when it fails, 2 for bad input.
    """
    from speculon.measure.bench.data import read_prompts

    fields = pick(CheckPlan, flags)
    of_data = [each for path in data or () for some in read_prompts(path).prompts.values() for each in some]
    if prompts := (*(prompt or ()), *map(read_text, prompt_file or ()), *of_data):
        fields["prompts"] = prompts
    if sampler:
        fields["samplers"] = tuple(SamplingParams(**read_object("sampler", text)) for text in sampler)
    plan = CheckPlan(**{**(QUICK if quick else {}), **fields})
    run(plan, with_drafts(engine_settings(flags, speculative_config)), out, as_json)


def run(plan: CheckPlan, settings: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Ends the process with code 1 unless the check has passed."""
    config = EngineConfig(**settings)  # bad input is refused before torch is imported
    check_method(config.speculation.method)
    refuse_chats(config, plan.prompts)
    llm = load_llm(settings, as_json)
    from speculon.measure.check import report
    from speculon.measure.check.run import check, check_drafter, count_tokens

    check_drafter(llm)
    with counting(as_json, "writing", count_tokens(plan), "tokens") as advance:
        findings = check(llm, plan, advance)
    made = report.CheckReport.of(sys.argv[1:], plan, llm, findings)
    files = report.write(made, out) if out else []
    if as_json:
        print_json(made.to_dict())
    else:
        report.show(made)
        show_files(files)
    if findings.outcome != "passed":
        raise typer.Exit(EXIT_FAILED)


def with_drafts(settings: dict[str, Any]) -> dict[str, Any]:
    """Policy `fixed` unless another is set: a round without drafts checks nothing."""
    if "policy" in EngineConfig(**settings).speculation.model_fields_set:
        return settings
    return {**settings, "speculation": {**settings.get("speculation", {}), "policy": "fixed"}}
