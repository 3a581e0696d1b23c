"""`speculon check`: whether speculation is lossless with the user's models and settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculon.cli.app import Json, SpeculativeConfig, command
from speculon.cli.bench import refuse_chats, show_files
from speculon.cli.generate import read_text
from speculon.cli.options import NO_REQUESTS, Given, engine_settings, read_object, settings_from
from speculon.cli.screen import counting, load_llm, print_json
from speculon.core.config import EngineConfig, SamplingParams, SpeculationConfig
from speculon.speculation.proposers.registry import check_method

if TYPE_CHECKING:
    from speculon.measure.check.plan import CheckPlan

EXIT_FAILED = 1


Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="text to continue; may be repeated (default: 16 built-in prompts)"),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="prompts as JSON lines, or .gz of them: Spec-Bench, chats, prompts, HumanEval; may be repeated",
    ),
]
Samplers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JSON",
        help='sampling parameters, as {"temperature": 0.6}; may be repeated (default: three sets)',
    ),
]
Control = Annotated[
    float | None,
    typer.Option(
        help="share of wrong drafts that the control accepts; the check must detect it (default: 0.5)"
    ),
]
Cases = Annotated[
    int | None,
    typer.Option(help="number of prompts that are sampled from, from the first on (default: 4)"),
]


@command("check")
@settings_from(SpeculationConfig, EngineConfig, without=NO_REQUESTS)
def check(
    *,
    prompt: Prompts = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="a file to continue; may be repeated; - is stdin")
    ] = None,
    data: Data = None,
    sampler: Samplers = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="of a greedy or seeded completion (default: 64)")
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="sampled completions per arm, prompt and sampler (default: 192)")
    ] = None,
    positions: Annotated[
        int | None, typer.Option(help="tokens of a sampled completion (default: 12)")
    ] = None,
    cases: Cases = None,
    seeds: Annotated[
        int | None, typer.Option(help="seeded completions per prompt and sampler (default: 4)")
    ] = None,
    control: Control = None,
    seed: Annotated[int | None, typer.Option(help="seed of the check (default: 0)")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="fewer runs of fewer prompts: detects only coarser errors")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for report.md, check.json, check.png")
    ] = None,
    speculative_config: SpeculativeConfig = None,
    as_json: Json = False,
    given: Given,
) -> None:
    """Check on your models that speculation changes no text.

    Exit code 0 when it passes, 1 when it fails, 2 for bad input.
    """
    from speculon.measure.bench.data import read_prompts
    from speculon.measure.check.plan import QUICK, CheckPlan

    sizes = {
        "max_tokens": max_tokens,
        "runs": runs,
        "positions": positions,
        "cases": cases,
        "seeds": seeds,
        "seed": seed,
        "control": control,
    }
    fields: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    of_data = [each for path in data or () for some in read_prompts(path).prompts.values() for each in some]
    if prompts := (*(prompt or ()), *map(read_text, prompt_file or ()), *of_data):
        fields["prompts"] = prompts
    if sampler:
        fields["samplers"] = tuple(SamplingParams(**read_object("sampler", text)) for text in sampler)
    plan = CheckPlan(**{**(QUICK if quick else {}), **fields})
    run(plan, with_drafts(engine_settings(given, speculative_config)), out, as_json)


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
