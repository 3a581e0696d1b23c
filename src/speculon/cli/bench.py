"""`speculon bench`: modes against each other on held-out work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Option

from speculon.cli.app import Json, command
from speculon.cli.options import NO_REQUESTS, Flags, engine_settings, pick, settings_from
from speculon.cli.screen import counting, errors, lacks_template, load_llm, print_json, say
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import BenchError, InvalidParameter
from speculon.measure.bench.plan import BenchPlan, make_plan

if TYPE_CHECKING:
    from speculon.measure.bench.advice import Advice

FOLDER = Path("speculon-bench")


Write = Annotated[
    Path | None,
    Option(metavar="FILE", help="--advise, and put the settings into FILE and its table [speculation]"),
]
Out = Annotated[
    Path | None,
    Option(
        metavar="FOLDER",
        help="folder for bench.json, bench.md, bench.png (default: speculon-bench; none with --json)",
    ),
]


@command("bench")
@settings_from(BenchPlan, SpeculationConfig, EngineConfig, without=("method", "state", *NO_REQUESTS))
def bench(
    *,
    quick: Annotated[bool, Option("--quick", help="8 prompts of 64 tokens, concurrency 1 and 4")] = False,
    advise: Annotated[
        bool, Option("--advise", help="settings of the fastest mode, as speculon.toml in the folder")
    ] = False,
    write: Write = None,
    out: Out = None,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """Compare modes on held-out code, edits and prose.

    Modes are alternated in one run, plain decoding is measured twice, and policies are compared with the best
    fixed mode.
    """
    from speculon.measure.bench import report
    from speculon.measure.bench import settings as settings_file
    from speculon.measure.bench.advice import advise as advice_on
    from speculon.measure.bench.advice import refuse_no_advice
    from speculon.measure.bench.run import run

    out = out or (None if as_json else FOLDER)
    # with a prefix cache a later mode would find the prompt's pages
    settings = {"prefix_cache": False, **engine_settings(flags), "state": None}
    config = EngineConfig(**settings)  # bad input is refused before torch is imported
    plan = make_plan({**pick(BenchPlan, flags), "fuse": config.fuse}, quick)
    if plan.data:
        refuse_chats(config, chain(*plan.data.prompts.values()))
    if advise or write:
        refuse_no_advice(plan, config)
        if write is None and out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write = out / EngineConfig.file
    if write:
        settings_file.check_writable(write)
    llm = load_llm(plan.engine_settings(settings, config), as_json)
    if "modes" not in flags:
        plan = plan.at_hand(llm.engine.proposers.lacking)
    with counting(as_json, "measuring", plan.measurements, still=True) as advance:
        cells, cases = run(llm, plan, advance)
    advice, no_advice = None, None
    try:
        advice = advice_on(cells, llm, config.speculation.suffix_pools) if advise or write else None
    except BenchError as error:
        no_advice = error  # raised when what was measured is saved
    results = report.Report.of(sys.argv[1:], plan, llm, cells, cases, advice)
    files = report.write(results, out) if out else []
    if advice and write:
        settings_file.write(write, advice.settings)
        files.append(write)
    if as_json:
        print_json(results.to_dict())
    else:
        if advice:
            show_advice(advice, write or Path(EngineConfig.file))
        report.show(results)
        show_files(files)
    if no_advice:
        raise no_advice


def refuse_chats(config: EngineConfig, prompts: Iterable[Any]) -> None:
    """Raises `InvalidParameter` for the first chat of a file, where the checkpoint has no template."""
    from speculon.measure.bench.data import DATA, NO_TEMPLATE, Prompt

    chat = next((p for p in prompts if isinstance(p, Prompt) and not isinstance(p.content, str)), None)
    if chat is not None and lacks_template(config):
        raise InvalidParameter(DATA, chat.place, NO_TEMPLATE)


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
