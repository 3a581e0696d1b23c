"""Help pages: options in sections; `--help` lists those that most people need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from pydantic import BaseModel
from typer.core import TyperCommand, TyperGroup

from speculon.config import EngineConfig, SamplingParams, ServeConfig, SpeculationConfig
from speculon.train.settings import (
    DraftSettings,
    FlashSettings,
    HeadSettings,
    MtpSettings,
    SparkSettings,
    TrainSettings,
)

WIDTH = 100  # columns of a help page at most
WHOLE = "speculon.help_all"
TYPE = re.compile(r"<(?:list\[)?(\w+)\]?>")  # as typer shows the type of an argument
TYPES: Mapping[str, str] = {"str": "TEXT", "int": "INTEGER", "Path": "FILE"}
COMMON = "Common"
TEXT, SERVER, MODELS, MEASURE, TRAIN = "Write text", "Serve", "Look at models", "Measure and check", "Train"

BY_MODEL: Mapping[type[BaseModel], str] = {
    SamplingParams: "Sampling",
    SpeculationConfig: "Settings of drafting methods",
    ServeConfig: "Server",
    EngineConfig: "Memory and speed",
    TrainSettings: "Training",
    HeadSettings: "Head",
    DraftSettings: "Draft model",
    FlashSettings: "Block drafter",
    SparkSettings: "Block drafter",
    MtpSettings: "MTP modules",
}
BY_NAME: Mapping[str, str] = {
    "model": COMMON,
    "generation_config": "Sampling",
    **dict.fromkeys(
        ("draft", "method", "policy", "num_speculative_tokens", "acceptance", "chained_drafts"), "Speculation"
    ),
    **dict.fromkeys(("memory_policy", "memory_limit_gb", "additional_memory_gb"), "Memory and speed"),
    **dict.fromkeys(("events", "events_limit_mb", "state", "allow_pickle", "trust_remote_code"), "Files"),
}
# settings that `--help` lists
FIRST = frozenset(
    "model draft method policy num_speculative_tokens temperature top_p max_tokens seed stop device dtype "
    "threads max_context kv_memory_gb max_num_seqs memory_limit_gb host port api_key target data out "
    "regenerate steps minutes layers hidden block".split()
)


def section_of(model: type[BaseModel], name: str) -> str:
    return (
        BY_NAME.get(name, BY_MODEL[model]) if model in (EngineConfig, SpeculationConfig) else BY_MODEL[model]
    )


class Command(TyperCommand):
    """A command whose help page has sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        whole = ctx.meta.get(WHOLE, False)
        sections: dict[str, list[tuple[str, str]]] = {COMMON: []}
        left_out = 0
        for param, record in self.help_records(ctx):
            section = getattr(param, "rich_help_panel", None)
            if section is None or whole or param.name in FIRST:
                sections.setdefault(section or COMMON, []).append(record)
            else:
                left_out += 1
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all lists {left_out} more options.")

    def help_records(self, ctx: Any) -> Iterator[tuple[Any, tuple[str, str]]]:
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                names, what = record
                yield param, (TYPE.sub(lambda found: TYPES.get(found[1], found[1].upper()), names), what)


class Commands(TyperGroup):
    """The list of commands, in sections, each with the whole first sentence of its description."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {
            name: [] for name in (TEXT, SERVER, MODELS, MEASURE, TRAIN)
        }
        for name, command in self.commands.items():
            first = " ".join((command.help or "").split("\n\n")[0].split())
            sections[getattr(command, "rich_help_panel", TRAIN)].append((name, first))
        for section, records in sections.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)


def show_all(ctx: typer.Context, given: bool) -> None:
    """Callback of `--help-all`."""
    if given:
        ctx.meta[WHOLE] = True
        typer.echo(ctx.get_help())
        raise typer.Exit
