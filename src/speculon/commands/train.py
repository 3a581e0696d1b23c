"""`speculon train`: a drafter for one's own target, from one's own texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from speculon.checked import Checked
from speculon.commands.options import Given, pick
from speculon.commands.screen import bar, counting, errors, print_json
from speculon.train.settings import DraftSettings, HeadSettings, TrainSettings

EXIT_STOPPED = 130
WHOLE = 10_000  # parts that the bar has
PLACE = "{task.percentage:.0f} %  {task.description}"
FORMS: Mapping[str, type[Checked]] = {"eagle3": HeadSettings, "draft": DraftSettings}


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
    return f"step {entry['step']}: right with all before them on held-out rows {full}; {entry['expected_accepted']:.2f} in a row"


def run(method: str, given: Given, as_json: bool) -> None:
    settings = TrainSettings(**pick(TrainSettings, given))  # what is wrong is told before torch is imported
    form = FORMS[method](**pick(FORMS[method], given))
    screen = Screen(as_json)
    screen.tell("importing torch")
    from speculon.train import methods
    from speculon.train.run import train

    try:
        done = train(methods.METHODS[method](form), settings, screen)
    except KeyboardInterrupt:  # not while it trains: there it is waited for
        errors().print(
            f"stopped; the same command goes on with what is there ({settings.folder})", markup=False
        )
        raise typer.Exit(EXIT_STOPPED) from None
    if done.record is None:
        errors().print(
            f"stopped at step {done.step}; the same command goes on from there ({settings.folder})",
            markup=False,
        )
        raise typer.Exit(EXIT_STOPPED)
    if as_json:
        return print_json(asdict(done)["record"])
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{settings.out}: {method} for {settings.target}, {done.step} steps", markup=False)
    if tried := done.record.get("evaluation"):
        shares = ", ".join(f"{share:.0%}" for share in tried["acceptance_per_position"])
        console.print(
            f"{tried['tokens_per_target_call']:.2f} tokens per target call on held-out texts; accepted by position: {shares}"
        )
