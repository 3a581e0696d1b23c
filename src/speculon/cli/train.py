"""`speculon train`: a drafter for a target, from texts; a command for each form of drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from speculon.cli.app import GROUP, Json, app, command
from speculon.cli.options import Flags, pick, settings_from
from speculon.cli.screen import bar, counting, errors, output, print_json, say
from speculon.core.checked import Checked
from speculon.train.settings import STEPS, DraftSettings, HeadSettings, TrainSettings

EXIT_STOPPED = 130
WHOLE = 10_000  # steps of the bar
PLACE = "{task.percentage:.0f} %  {task.description}"
FORMS: Mapping[str, tuple[type[Checked], str]] = {
    "eagle3": (HeadSettings, "Train an EAGLE-3 head, which drafts from the target's hidden states."),
    "draft": (DraftSettings, "Distil a small language model that drafts for the target."),
}
RESUMES = "After an interruption the same command resumes."

trainer = typer.Typer(help="Train a drafter for your target, on your texts.", **GROUP)
app.add_typer(trainer, name="train")


def add_command(method: str, form: type[Checked], help: str) -> None:
    @command(method, to=trainer, help=f"{help}\n\n{RESUMES}")
    @settings_from(TrainSettings, form)
    def train(*, as_json: Json = False, flags: Flags) -> None:
        run(method, form, flags, as_json)


for method, (form, help) in FORMS.items():
    add_command(method, form, help)


def run(method: str, form: type[Checked], flags: Flags, as_json: bool) -> None:
    settings = TrainSettings(**pick(TrainSettings, flags))  # refuses wrong settings before torch is imported
    shape = form(**pick(form, flags))
    screen = Screen(as_json)
    screen.tell("importing torch")
    from speculon.train.run import METHODS, train

    try:
        done = train(METHODS[method](shape), settings, screen)
    except KeyboardInterrupt:  # outside of training, which handles it
        errors().print(f"stopped; the same command resumes from {settings.folder}", markup=False)
        raise typer.Exit(EXIT_STOPPED) from None
    if done.record is None:
        text = f"stopped at step {done.step}; the same command resumes from {settings.folder}"
        errors().print(text, markup=False)
        raise typer.Exit(EXIT_STOPPED)
    if as_json:
        return print_json(asdict(done)["record"])
    console = output()
    console.print(f"{settings.out}: {method} for {settings.target}, {length(done.record)}", markup=False)
    if evaluation := done.record.get("evaluation"):
        shares = ", ".join(f"{share:.0%}" for share in evaluation["acceptance_per_position"])
        rate = f"{evaluation['tokens_per_target_call']:.2f} tokens per target call on held-out texts"
        console.print(f"{rate}; accepted by position: {shares}")


class Screen:
    """How far a run is, on stderr."""

    def __init__(self, as_json: bool):
        self.as_json = as_json

    def tell(self, stage: str) -> None:
        if not self.as_json:
            say(stage)

    def counting(self, what: str, total: int, unit: str) -> Any:
        return counting(self.as_json, what, total, unit)

    @contextmanager
    def training(self) -> Iterator[Callable[[float, Mapping[str, Any]], None]]:
        columns = (TextColumn("training"), BarColumn(), TextColumn(PLACE), TimeElapsedColumn())
        with bar(self.as_json, "", *columns, total=WHOLE) as (progress, task):

            def advance(share: float, entry: Mapping[str, Any]) -> None:
                words = f"step {entry['step']}, loss {entry['loss']:.3f}"
                progress.update(task, completed=share * WHOLE, description=words)
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
