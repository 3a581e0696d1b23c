"""Commands that measure: benchmarks and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speculon.cli.app import Json, SpeculativeConfig, command
from speculon.commands.options import NO_REQUESTS, Given, settings_from
from speculon.commands.sections import MEASURE
from speculon.config import EngineConfig, SpeculationConfig

Modes = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="METHOD:K/POLICY/RULE, of which only METHOD is required: auto, suffix:8, auto:8/solo, "
        "draft_model:4/block. Without POLICY a mode with K is fixed, and one without K runs under "
        "--policy (default: methods at several K, and auto under three policies)",
    ),
]
Widen = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="widen the target to N million parameters: the same text at the cost of a larger model",
    ),
]
BenchData = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="prompts as JSON lines, or .gz of them: Spec-Bench, chats, prompts, HumanEval; each category "
        "is a workload, instead of the usual ones or beside those of --workloads",
    ),
]
DataFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="prompts as JSON lines, or .gz of them: Spec-Bench, chats, prompts, HumanEval; may be repeated",
    ),
]
BenchFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="folder for bench.json, bench.md, bench.png (default: speculon-bench; none with --json)",
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="--advise, and put the settings into FILE and its table [speculation]"),
]
Samplers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JSON",
        help='sampling parameters, as {"temperature": 0.6}; may be repeated (default: three sets)',
    ),
]
CheckPrompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="text to continue; may be repeated (default: 16 built-in prompts)"),
]
Control = Annotated[
    float | None,
    typer.Option(
        help="share of wrong drafts that the control accepts; the check must detect it (default: 0.5)"
    ),
]


@command(MEASURE)
@settings_from(SpeculationConfig, EngineConfig, without=("method", "state", *NO_REQUESTS))
def bench(
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="of code, edit, prose, mixed, warm; NAME@T: at temperature T (default: all)"
        ),
    ] = None,
    data: BenchData = None,
    modes: Modes = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="concurrent requests (default: 1,4,8)")
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="per workload (default: 32)")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens per prompt (default: 128)")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="measurements of each mode; medians are reported (default: 1)")
    ] = None,
    with_transformers: Annotated[
        bool | None, typer.Option(help="also measure transformers' generate, one request at a time")
    ] = None,
    with_variant: Annotated[
        bool | None,
        typer.Option(help="also measure plain decoding without batch invariance: what that costs"),
    ] = None,
    widen: Widen = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="8 prompts of 64 tokens, concurrency 1 and 4")
    ] = False,
    advise: Annotated[
        bool, typer.Option("--advise", help="settings of the fastest mode, as speculon.toml in the folder")
    ] = False,
    write: SettingsFile = None,
    out: BenchFolder = None,
    as_json: Json = False,
    given: Given = {},  # noqa: B006
) -> None:
    """Compare modes on held-out code, edits and prose.

    Modes are alternated in one run, plain decoding is measured twice, and policies are compared with the best
    fixed mode.
    """
    from speculon.commands.bench import numbers, run, words

    requested = {
        "workloads": words("workloads", workloads),
        "data": data,
        "modes": words("modes", modes),
        "concurrency": numbers("concurrency", concurrency),
        "prompts": prompts,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "with_transformers": with_transformers,
        "with_variant": with_variant,
        "widen": widen,
    }
    run(requested, quick, advise, write, out, given, as_json)


@command(MEASURE)
@settings_from(SpeculationConfig, EngineConfig, without=NO_REQUESTS)
def check(
    prompt: CheckPrompts = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="a file to continue; may be repeated; - is stdin")
    ] = None,
    data: DataFiles = None,
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
    cases: Annotated[
        int | None,
        typer.Option(help="number of prompts that are sampled from, from the first on (default: 4)"),
    ] = None,
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
    given: Given = {},  # noqa: B006
) -> None:
    """Check on your models that speculation changes no text.

    Exit code 0 when it passes, 1 when it fails, 2 for bad input.
    """
    from speculon.commands.check import CheckOptions, run

    sizes = {
        "max_tokens": max_tokens,
        "runs": runs,
        "positions": positions,
        "cases": cases,
        "seeds": seeds,
        "seed": seed,
    }
    texts = (prompt or [], prompt_file or [], data or [])
    task = CheckOptions(*texts, sampler or [], {**sizes, "control": control}, quick, out)
    run(task, given, speculative_config, as_json)
