"""The application that commands register with, its help pages, and the options that several commands have.

Help pages list options in sections. `--help` lists those that are needed often, `--help-all` every one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from typer import Option
from typer.core import TyperCommand, TyperGroup

from speculon import __version__
from speculon.cli.screen import answered, show_log
from speculon.core.config import EngineConfig, SamplingParams, ServeConfig, SpeculationConfig
from speculon.measure.bench.plan import BenchPlan
from speculon.measure.check.plan import CheckPlan
from speculon.train.settings import DraftSettings, HeadSettings, TrainSettings

WIDTH = 100  # columns of a help page at most
SHOW_ALL = "speculon.help_all"
ARGUMENT_TYPE = re.compile(r"<(?:list\[)?(\w+)\]?>")  # as typer shows it
TYPE_NAMES: Mapping[str, str] = {"str": "TEXT", "int": "INTEGER", "Path": "FILE"}

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "Write text": ("demo", "generate", "chat"),
    "Serve": ("serve",),
    "Get and look at models": ("pull", "inspect"),
    "Measure and check": ("bench", "check"),
    "Train": ("train", "eagle3", "draft"),
}
COMMON, SPECULATION = "Common", "Speculation"
SECTION_OF_MODEL: Mapping[type[BaseModel], str] = {
    BenchPlan: COMMON,
    CheckPlan: COMMON,
    SamplingParams: "Sampling",
    SpeculationConfig: "Settings of drafting methods",
    ServeConfig: "Server",
    EngineConfig: "Memory and speed",
    TrainSettings: "Training",
    HeadSettings: "Head",
    DraftSettings: "Draft model",
}
SECTION_OF_FIELD: Mapping[str, str] = {
    "model": COMMON,
    "generation_config": "Sampling",
    **dict.fromkeys(
        (
            "draft",
            "method",
            "policy",
            "num_speculative_tokens",
            "draft_depth",
            "acceptance",
            "chained_drafts",
        ),
        SPECULATION,
    ),
    **dict.fromkeys(
        ("gpu_layers", "kv_cache_type", "flash_attention", "mmap", "tensor_split", "rpc", "repack"),
        "llama.cpp",
    ),
    **dict.fromkeys(("memory_policy", "memory_limit_gb", "additional_memory_gb"), "Memory and speed"),
    **dict.fromkeys(("events", "events_limit_mb", "state", "allow_pickle", "trust_remote_code"), "Files"),
}
# settings that `--help` lists
OFTEN_NEEDED = frozenset(
    "model draft method policy num_speculative_tokens temperature top_p max_tokens seed stop device dtype "
    "runtime gpu_layers threads max_context kv_memory_gb max_num_seqs memory_limit_gb host port api_key "
    "target data out regenerate steps minutes layers hidden".split()
)


def section_of(model: type[BaseModel], field: str) -> str:
    section = SECTION_OF_MODEL[model]
    return SECTION_OF_FIELD.get(field, section) if model in (EngineConfig, SpeculationConfig) else section


class Command(TyperCommand):
    """A command whose help page has sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {COMMON: []}
        left_out = 0
        for param in self.get_params(ctx):
            record, section = param.get_help_record(ctx), getattr(param, "rich_help_panel", None)
            if record is None:
                continue
            if section is None or ctx.meta.get(SHOW_ALL) or param.name in OFTEN_NEEDED:
                names = ARGUMENT_TYPE.sub(lambda m: TYPE_NAMES.get(m[1], m[1].upper()), record[0])
                sections.setdefault(section or COMMON, []).append((names, record[1]))
            else:
                left_out += 1
        write_sections(formatter, sections)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all lists {left_out} more options.")


class Commands(TyperGroup):
    """The list of commands, in sections, each with the whole first sentence of its description."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections = {
            section: [
                (name, " ".join((self.commands[name].help or "").split("\n\n")[0].split()))
                for name in names
                if name in self.commands
            ]
            for section, names in COMMANDS.items()
        }
        write_sections(formatter, sections)


def write_sections(formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
    for section, records in sections.items():
        if records:
            with formatter.section(section):
                formatter.write_dl(records)


def show_all(ctx: typer.Context, requested: bool) -> None:
    """Callback of `--help-all`."""
    if requested:
        ctx.meta[SHOW_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


PAGE: Any = {"max_content_width": WIDTH, "help_option_names": ["--help", "-h"]}
GROUP: Any = {
    "cls": Commands,
    "context_settings": PAGE,
    "no_args_is_help": True,
    "rich_markup_mode": None,  # as markup, square brackets would be lost
}
app = typer.Typer(
    name="speculon",
    help="Lossless speculative decoding: the target model's own text, several tokens per target call.",
    add_completion=False,
    pretty_exceptions_enable=False,
    **GROUP,
)


def command(name: str, to: typer.Typer = app, help: str | None = None) -> Callable[..., Any]:
    """Registers a command; an error is one line."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        register = to.command(name, cls=Command, context_settings=PAGE, help=help)
        return register(answered(function))

    return decorate


@app.callback()
def options(
    version: Annotated[
        bool,
        Option(
            "--version",
            is_eager=True,
            callback=lambda on: on and show_version(),
            help="print the version and exit",
        ),
    ] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="a log line per request, on stderr")] = False,
) -> None:
    if verbose:
        show_log()


def show_version() -> None:
    typer.echo(f"speculon {__version__}")
    raise typer.Exit


Json = Annotated[bool, Option("--json", help="machine-readable: JSON on stdout and nothing else")]
VLLM_HELP = "vLLM's form of the speculation options; single options take precedence"
SpeculativeConfig = Annotated[str | None, Option(metavar="JSON", help=VLLM_HELP, rich_help_panel=SPECULATION)]
