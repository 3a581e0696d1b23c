"""`speculon bench`: modes against each other on held-out work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from speculon.cli.app import Json, command
from speculon.cli.options import NO_REQUESTS, Given, engine_settings, settings_from
from speculon.cli.screen import counting, errors, lacks_template, load_llm, print_json, say
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import BenchError, InvalidParameter

if TYPE_CHECKING:
    from speculon.measure.bench.advice import Advice
    from speculon.measure.bench.data import PromptFile
    from speculon.measure.bench.plan import BenchPlan

FOLDER = Path("speculon-bench")
QUICK: dict[str, Any] = {"prompts": 8, "max_tokens": 64, "repeats": 1, "concurrency": (1, 4)}


Workloads = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="of code, edit, prose, mixed, warm; NAME@T: at temperature T (default: all)"
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="prompts as JSON lines, or .gz of them: Spec-Bench, chats, prompts, HumanEval; each "
        "category is a workload, instead of the usual ones or beside those of --workloads",
    ),
]
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
Write = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="--advise, and put the settings into FILE and its table [speculation]"),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="folder for bench.json, bench.md, bench.png (default: speculon-bench; none with --json)",
    ),
]


@command("bench")
@settings_from(SpeculationConfig, EngineConfig, without=("method", "state", *NO_REQUESTS))
def bench(
    *,
    workloads: Workloads = None,
    data: Data = None,
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
    write: Write = None,
    out: Out = None,
    as_json: Json = False,
    given: Given,
) -> None:
    """Compare modes on held-out code, edits and prose.

    Modes are alternated in one run, plain decoding is measured twice, and policies are compared with the best
    fixed mode.
    """
    options = {
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
    run(
        options,
        quick,
        advise or write is not None,
        write,
        out or (None if as_json else FOLDER),
        given,
        as_json,
    )


def run(
    options: dict[str, Any],
    quick: bool,
    advised: bool,
    write: Path | None,
    out: Path | None,
    given: Given,
    as_json: bool,
) -> None:
    from speculon.measure.bench import report
    from speculon.measure.bench import settings as settings_file
    from speculon.measure.bench.advice import advise
    from speculon.measure.bench.run import run as compare

    # with a prefix cache a later mode would find the prompt's pages
    settings = {"prefix_cache": False, **engine_settings(given), "state": None}
    config = EngineConfig(**settings)  # bad input is refused before torch is imported
    plan = make_plan(options, quick, config)
    if advised:
        check_advisable(plan, config)
        write = write or place_in(out)
    if write:
        settings_file.check_writable(write)
    llm = load_llm(settings | needed_settings(settings, config, plan), as_json)
    if options["modes"] is None:
        plan = plan.at_hand(llm.engine.proposers.lacking)
    with counting(as_json, "measuring", plan.measurements, still=True) as advance:
        cells, cases = compare(llm, plan, advance)
    advice, nothing = None, None
    try:
        advice = advise(cells, llm, config.speculation.suffix_pools) if advised else None
    except BenchError as error:
        nothing = error  # raised when what was measured is saved
    made = report.Report.of(sys.argv[1:], plan, llm, cells, cases, advice)
    files = report.write(made, out) if out else []
    if advice and write:
        settings_file.write(write, advice.settings)
        files.append(write)
    if as_json:
        print_json(made.to_dict())
    else:
        if advice:
            show_advice(advice, write or Path(EngineConfig.file))
        report.show(made)
        show_files(files)
    if nothing:
        raise nothing


def make_plan(options: dict[str, Any], quick: bool, config: EngineConfig) -> BenchPlan:
    from speculon.measure.bench.data import DATA, read_prompts
    from speculon.measure.bench.plan import BenchPlan

    named = {name: value for name, value in options.items() if value is not None}
    fields = {**(QUICK if quick else {}), **named, "fuse": config.fuse}
    if DATA in named:
        data = read_prompts(named[DATA])
        refuse_chats(config, chain(*data.prompts.values()))
        fields |= fields_of(data, named, fields)
    return BenchPlan(**fields)


def check_advisable(plan: BenchPlan, config: EngineConfig) -> None:
    """Raises before anything is measured where there would be nothing to advise, or no way to write it."""
    from speculon.measure.bench import settings as settings_file
    from speculon.measure.bench.plan import parse_mode

    if plan.widen:
        raise InvalidParameter("widen", plan.widen, "is no model to advise on: leave out --advise")
    if not any(parse_mode(mode).speculates for mode in plan.modes):
        raise InvalidParameter("modes", ",".join(plan.modes), "name one that drafts, for --advise")
    for mode in map(parse_mode, plan.modes):
        settings_file.as_toml(
            settings_file.whole(config, settings_file.settings(config.speculation, mode, ()))
        )


def place_in(out: Path | None) -> Path | None:
    """Where an advice is written in the folder of the results, which is made."""
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    return out / EngineConfig.file


def refuse_chats(config: EngineConfig, prompts: Iterable[Any]) -> None:
    """Raises `InvalidParameter` for the first chat of a file, where the checkpoint has no template."""
    from speculon.measure.bench.data import DATA, NO_TEMPLATE, Prompt

    chat = next((p for p in prompts if isinstance(p, Prompt) and not isinstance(p.content, str)), None)
    if chat is not None and lacks_template(config):
        raise InvalidParameter(DATA, chat.place, NO_TEMPLATE)


def fields_of(data: PromptFile, named: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields where a file is measured, with the concurrencies that its prompts suffice for.

    A concurrency that somebody named is left as it is.
    """
    from speculon.measure.bench.data import DATA
    from speculon.measure.bench.plan import BenchPlan

    found: dict[str, Any] = {DATA: data, "workloads": with_data(data, named.get("workloads", ()))}
    if "concurrency" not in named:
        fewest = min(map(len, data.prompts.values()))
        usual = fields.get("concurrency", BenchPlan().concurrency)
        found["concurrency"] = tuple(count for count in usual if count <= fewest)
    return found


def with_data(data: PromptFile, workloads: tuple[str, ...]) -> tuple[str, ...]:
    """The workloads that were named, and all of the file where none of it was.

    `data` and `data@T` are all of the file.
    """
    from speculon.measure.bench.data import DATA

    found: list[str] = []
    for text in workloads:
        name, at_sign, temperature = text.partition("@")
        every = data.prompts if name == DATA else (name,)
        found += [f"{one}{at_sign}{temperature}" for one in every]
    if not any(name.startswith(f"{DATA}:") for name in found):
        found += data.prompts
    return tuple(found)


def needed_settings(settings: dict[str, Any], config: EngineConfig, plan: BenchPlan) -> dict[str, Any]:
    """The engine's settings that follow from the plan, where nobody set them."""
    from speculon.measure.bench.plan import FIXED, parse_mode

    found: dict[str, Any] = {}
    if "suffix_pools" not in config.speculation.model_fields_set:
        pools = max(config.speculation.suffix_pools, plan.users)
        found["speculation"] = {**settings.get("speculation", {}), "suffix_pools": pools}
    if plan.widen:
        found["fuse"] = False  # until it is wide
    if config.warmup is None:  # a mode may name another policy than the engine's
        policies = {parse_mode(mode).policy(config.speculation.policy) for mode in plan.modes}
        found["warmup"] = policies != {FIXED}
    return found


def show_advice(advice: Advice, path: Path) -> None:
    """The answer, and how its settings are used."""
    from speculon.measure.bench import settings as settings_file

    console = Console(highlight=False)
    first, *others = advice.answer
    console.print(first, style="bold", markup=False)
    for line in others:
        console.print(f"- {line}", markup=False)
    console.print(f"\n{settings_file.as_toml(advice.settings)}", markup=False, soft_wrap=True)
    console.print(f"next: {settings_file.next_command(path)}\n", style="bold", markup=False, soft_wrap=True)


def show_files(files: list[Path]) -> None:
    """On stderr."""
    for file in files:
        say(f"wrote {file}")
    if files and not any(file.suffix == ".png" for file in files):
        missing = "no chart: matplotlib is missing (pip install 'speculon[bench]')"
        errors().print(missing, style="bold", markup=False)


def words(name: str, text: str | None) -> tuple[str, ...] | None:
    """`code,edit` as a tuple; None stays unset."""
    if text is None:
        return None
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidParameter(name, text, "name at least one")
    return found


def numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    found = words(name, text)
    if found and not all(part.isdecimal() for part in found):
        raise InvalidParameter(name, text, "whole numbers with commas between")
    return tuple(map(int, found)) if found else None
