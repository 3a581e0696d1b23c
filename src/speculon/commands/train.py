"""`speculon train`: a drafter for a target, from texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from speculon.checked import Checked
from speculon.commands.options import Given, pick
from speculon.commands.screen import bar, counting, errors, output, print_json
from speculon.train.settings import (
    STEPS,
    DraftSettings,
    FlashSettings,
    HeadSettings,
    MtpSettings,
    SparkSettings,
    TrainSettings,
)

EXIT_STOPPED = 130
WHOLE = 10_000  # steps of the bar
PLACE = "{task.percentage:.0f} %  {task.description}"
FORMS: Mapping[str, type[Checked]] = {
    "eagle3": HeadSettings,
    "draft": DraftSettings,
    "dflash": FlashSettings,
    "dspark": SparkSettings,
    "mtp": MtpSettings,
}


class Screen:
    """How far a run is, on stderr."""

    def __init__(self, as_json: bool):
        self.as_json = as_json

    def tell(self, stage: str) -> None:
        if not self.as_json:
            errors().print(stage, style="dim", markup=False)

    def counting(self, what: str, total: int, unit: str) -> Any:
        return counting(self.as_json, what, total, unit)

    @contextmanager
    def training(self) -> Iterator[Callable[[float, Mapping[str, Any]], None]]:
        columns = (
            TextColumn("training"),
            BarColumn(),
            TextColumn(PLACE),
            TimeElapsedColumn(),
        )
        with bar(self.as_json, "", *columns, total=WHOLE) as (progress, task):

            def advance(share: float, entry: Mapping[str, Any]) -> None:
                progress.update(
                    task,
                    completed=share * WHOLE,
                    description=f"step {entry['step']}, loss {entry['loss']:.3f}",
                )
                if "expected_accepted" in entry and not self.as_json:
                    progress.console.print(measured(entry), style="dim", markup=False)

            yield advance


def measured(entry: Mapping[str, Any]) -> str:
    full = ", ".join(f"{share:.0%}" for share in entry["accuracy_full"])
    return (
        f"step {entry['step']}: accuracy by position on held-out rows, after correct drafts, {full}; "
        f"{entry['expected_accepted']:.2f} accepted per draft"
    )


def length(record: Mapping[str, Any]) -> str:
    """The length of a run, and which limit ended it."""
    ended_by = f"{record['ended_by']} = {record['settings'][record['ended_by']] or STEPS:g}"
    return f"{record['steps']} steps in {record['minutes']:g} minutes; ended by {ended_by}"


def run(method: str, given: Given, as_json: bool) -> None:
    settings = TrainSettings(**pick(TrainSettings, given))  # refuses wrong settings before torch is imported
    form = FORMS[method](**pick(FORMS[method], given))
    screen = Screen(as_json)
    screen.tell("importing torch")
    from speculon.train.run import METHODS, train

    try:
        done = train(METHODS[method](form), settings, screen)
    except KeyboardInterrupt:  # outside of training, which handles it
        errors().print(f"stopped; the same command resumes from {settings.folder}", markup=False)
        raise typer.Exit(EXIT_STOPPED) from None
    if done.record is None:
        errors().print(
            f"stopped at step {done.step}; the same command resumes from {settings.folder}",
            markup=False,
        )
        raise typer.Exit(EXIT_STOPPED)
    if as_json:
        return print_json(asdict(done)["record"])
    console = output()
    console.print(f"{settings.out}: {method} for {settings.target}, {length(done.record)}", markup=False)
    if found := done.record.get("evaluation"):
        shares = ", ".join(f"{share:.0%}" for share in found["acceptance_per_position"])
        rate = f"{found['tokens_per_target_call']:.2f} tokens per target call on held-out texts"
        console.print(f"{rate}; accepted by position: {shares}")
