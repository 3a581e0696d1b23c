"""The application that commands register with, and the options that several have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from speculon import __version__
from speculon.commands.screen import answered, show_log
from speculon.commands.sections import WIDTH, Command, Commands

PAGE = {"max_content_width": WIDTH, "help_option_names": ["--help", "-h"]}

app = typer.Typer(
    name="speculon",
    cls=Commands,
    help="Lossless speculative decoding: the target model's own text, several tokens per target call.",
    context_settings=PAGE,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as markup, square brackets would be lost
)

Json = Annotated[bool, typer.Option("--json", help="machine-readable: JSON on stdout and nothing else")]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="vLLM's form of the speculation options; single options take precedence",
        rich_help_panel="Speculation",
    ),
]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", help="text to continue; may be repeated")
]
PromptFiles = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="file to continue; may be repeated; -: stdin")
]
AsChat = Annotated[
    bool, typer.Option("--chat", help="each prompt is a message, answered through the chat template")
]


def command(section: str, to: typer.Typer = app, name: str | None = None) -> Callable[..., Any]:
    """Registers a command under a section of the list of commands; an error is one line."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        made = to.command(name, cls=Command, context_settings=PAGE, rich_help_panel=section)
        return made(answered(function))

    return decorate


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda on: on and show_version(),
            help="print the version and exit",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="a log line per request, on stderr")
    ] = False,
) -> None:
    if verbose:
        show_log()


def show_version() -> None:
    typer.echo(f"speculon {__version__}")
    raise typer.Exit
