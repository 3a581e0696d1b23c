"""`speculon bench`: modes against each other on held-out work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from speculon.bench import report, tables
from speculon.bench import settings as settings_file
from speculon.bench.advice import Advice, advise
from speculon.bench.data import DATA, NO_TEMPLATE, Prompt, PromptFile, read_prompts
from speculon.bench.plan import FIXED, BenchPlan, parse_mode
from speculon.bench.run import run as compare
from speculon.commands.options import Given, engine_settings
from speculon.commands.screen import counting, errors, loading, print_json
from speculon.commands.templates import lacks_template
from speculon.config import EngineConfig
from speculon.errors import BenchError, InvalidParameter

FOLDER = Path("speculon-bench")
QUICK: dict[str, Any] = {"prompts": 8, "max_tokens": 64, "repeats": 1, "concurrency": (1, 4)}


def run(
    options: dict[str, Any],
    quick: bool,
    advised: bool,
    write: Path | None,
    out: Path | None,
    given: Given,
    as_json: bool,
) -> None:
    # with a prefix cache a later mode would find the prompt's pages
    settings = {"prefix_cache": False, **engine_settings(given), "state": None}
    config = EngineConfig(**settings)  # bad input is refused before torch is imported
    plan = make_plan(options, quick, config)
    out, advised = out or (None if as_json else FOLDER), advised or write is not None
    if advised:
        check_advisable(plan, config)
        write = write or place_in(out)
    if write:
        settings_file.check_writable(write)
    settings |= needed_settings(settings, config, plan)
    with loading(as_json) as stage:
        stage("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=stage, **settings)
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
        show(made)
        show_files(files)
    if nothing:
        raise nothing


def make_plan(options: dict[str, Any], quick: bool, config: EngineConfig) -> BenchPlan:
    named = {name: value for name, value in options.items() if value is not None}
    fields = {**(QUICK if quick else {}), **named, "fuse": config.fuse}
    if DATA in named:
        data = read_prompts(named[DATA])
        refuse_chats(config, chain(*data.prompts.values()))
        fields |= fields_of(data, named, fields)
    return BenchPlan(**fields)


def check_advisable(plan: BenchPlan, config: EngineConfig) -> None:
    """Raises before anything is measured where there would be nothing to advise, or no way to write it."""
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
    chat = next(
        (one for one in prompts if isinstance(one, Prompt) and not isinstance(one.content, str)), None
    )
    if chat is not None and lacks_template(config):
        raise InvalidParameter(DATA, chat.place, NO_TEMPLATE)


def fields_of(data: PromptFile, named: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields where a file is measured, with the concurrencies that its prompts suffice for.

    A concurrency that somebody named is left as it is.
    """
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


def show(made: report.Report) -> None:
    """The result as a sentence, then the speed of each mode, then the policies."""
    console = Console(highlight=False)
    console.print(tables.verdict(made.cells, made.against_best_fixed), style="bold", markup=False)
    for cells in tables.by_cell(made.cells):
        console.print("", tables.speed_table(cells), sep="\n")
        for line in filter(None, map(tables.difference, cells)):
            console.print(f"  {line}", style="dim", markup=False)
    console.print(f"\n{tables.TERMINAL_LEGEND}.\n", style="dim", markup=False)
    if made.against_best_fixed:
        console.print(tables.against_table(made.against_best_fixed))
        console.print(f"{tables.AGAINST_TERMINAL_LEGEND}.\n", style="dim", markup=False)
    console.print(report.heading(made), style="dim", markup=False, soft_wrap=True)


def show_advice(advice: Advice, path: Path) -> None:
    """The answer, and how its settings are used."""
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
        errors().print(f"wrote {file}", style="dim", markup=False)
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
