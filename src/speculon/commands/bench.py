"""`speculon bench`: modes against each other on held-out work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from speculon.bench import report, tables
from speculon.bench.plan import FIXED, Plan, parse_mode
from speculon.bench.run import run as compare
from speculon.commands.options import Given, engine_settings
from speculon.commands.screen import counting, errors, loading, print_json
from speculon.config import EngineConfig
from speculon.errors import InvalidParameter

FOLDER = Path("speculon-bench")
QUICK: dict[str, Any] = {"prompts": 8, "max_tokens": 64, "repeats": 1, "concurrency": (1, 4)}


def run(asked: dict[str, Any], quick: bool, out: Path | None, given: Given, as_json: bool) -> None:
    # else a later mode would find the prompt's pages
    settings = {"prefix_cache": False, **engine_settings(given), "state": None}
    config = EngineConfig(**settings)  # what is wrong is told before torch is imported
    plan = Plan(
        **{
            **(QUICK if quick else {}),
            **{k: v for k, v in asked.items() if v is not None},
            "fuse": config.fuse,
        }
    )
    if "suffix_pools" not in config.speculation.model_fields_set:
        pools = max(config.speculation.suffix_pools, plan.users)
        settings["speculation"] = {**settings.get("speculation", {}), "suffix_pools": pools}
    if plan.widen:
        settings["fuse"] = False  # until it is wide
    if config.warmup is None:  # whatever the engine is set to: a mode may name another policy
        settings["warmup"] = any(
            parse_mode(mode).policy(config.speculation.policy) != FIXED for mode in plan.modes
        )
    with loading(as_json) as tell:
        tell("importing torch")
        from speculon.llm import LLM

        llm = LLM(progress=tell, **settings)
    if asked["modes"] is None:
        plan = plan.at_hand(llm.engine.proposers.lacking)
    with counting(as_json, "measuring", plan.measurements, still=True) as advance:
        cells, cases = compare(llm, plan, advance)
    made = report.Report.of(sys.argv[1:], plan, llm, cells, cases)
    out = out or (None if as_json else FOLDER)
    files = report.write(made, out) if out else []
    if as_json:
        return print_json(made.to_dict())
    console = Console(highlight=False)
    for some in tables.by_cell(cells):
        console.print(tables.table(some))
        for note in (note for cell in some for note in tables.notes(cell)):
            console.print(f"  {note}", style="dim", markup=False)
        console.print()
    console.print(f"{tables.LEGEND}.\n", style="dim", markup=False)
    if made.against_best_fixed:
        console.print(tables.against_table(made.against_best_fixed))
        console.print(f"{tables.AGAINST_LEGEND}.\n", style="dim", markup=False)
    console.print(tables.profile_table(cells))
    console.print(f"{tables.PROFILE_LEGEND}.\n", style="dim", markup=False)
    console.print(report.heading(made), style="dim", markup=False, soft_wrap=True)
    for file in files:
        errors().print(f"wrote {file}", style="dim", markup=False)
    if files and len(files) < 3:
        errors().print(
            "no chart: matplotlib is missing (pip install 'speculon[bench]')", style="yellow", markup=False
        )


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
