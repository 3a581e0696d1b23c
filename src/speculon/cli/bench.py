"""`speculon bench`: modes against each other on held-out work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from speculon.cli.app import Json, command
from speculon.cli.options import NO_REQUESTS, Flags, engine_settings, pick, settings_from
from speculon.cli.screen import counting, errors, lacks_template, load_llm, print_json, say
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import InvalidParameter
from speculon.measure.bench.plan import BenchPlan, make_plan

FOLDER = Path("speculon-bench")

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
    out: Out = None,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """Compare modes on held-out code, edits and prose.

    Modes are alternated in one run, plain decoding is measured twice, and policies are compared with the best
    fixed mode.
    """
    from speculon.measure.bench import report
    from speculon.measure.bench.run import run

    out = out or (None if as_json else FOLDER)
    # with a prefix cache a later mode would find the prompt's pages
    settings = {"prefix_cache": False, **engine_settings(flags), "state": None}
    config = EngineConfig(**settings)  # bad input is refused before torch is imported
    plan = make_plan(pick(BenchPlan, flags), quick)
    if plan.data:
        refuse_chats(config, chain(*plan.data.prompts.values()))
    llm = load_llm(plan.engine_settings(settings, config), as_json)
    if "modes" not in flags:
        plan = plan.at_hand(llm.engine.proposers.lacking)
    with counting(as_json, "measuring", plan.measurements, still=True) as advance:
        cells, cases = run(llm, plan, advance)
    results = report.Report.of(sys.argv[1:], plan, llm, cells, cases)
    files = report.write(results, out) if out else []
    if as_json:
        print_json(results.to_dict())
    else:
        report.show(results)
        show_files(files)


def refuse_chats(config: EngineConfig, prompts: Iterable[Any]) -> None:
    """Raises `InvalidParameter` for the first chat of a file, where the checkpoint has no template."""
    from speculon.measure.bench.data import DATA, NO_TEMPLATE, DataPrompt

    chat = next((p for p in prompts if isinstance(p, DataPrompt) and not isinstance(p.content, str)), None)
    if chat is not None and lacks_template(config):
        raise InvalidParameter(DATA, chat.place, NO_TEMPLATE)


def show_files(files: list[Path]) -> None:
    """On stderr."""
    for file in files:
        say(f"wrote {file}")
    if files and not any(file.suffix == ".png" for file in files):
        missing = "no chart was drawn, because matplotlib is not installed: pip install 'speculon[bench]'"
        errors().print(missing, style="bold", markup=False)
