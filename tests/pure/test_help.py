"""Help pages: whole in 80 columns, short, and complete where all options are asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon.cli import app
from speculon.cli.app import OFTEN_NEEDED, SECTION_OF_FIELD
from speculon.cli.inspect import FIT, FORM
from speculon.core.config import EngineConfig, SamplingParams, ServeConfig, SpeculationConfig
from speculon.train.settings import (
    DraftSettings,
    FlashSettings,
    HeadSettings,
    MtpSettings,
    SparkSettings,
    TrainSettings,
)
from tests.documents import command_line

COMMANDS = [
    *(["generate"], ["chat"], ["serve"], ["inspect"], ["demo"], ["bench"], ["check"]),
    *(["train", method] for method in ("eagle3", "draft", "dflash", "dspark", "mtp")),
]
LINES = 85  # of a short page at 80 columns; all options take up to 300
MODELS = (
    *(SamplingParams, SpeculationConfig, EngineConfig, ServeConfig),
    *(TrainSettings, HeadSettings, DraftSettings, FlashSettings, SparkSettings, MtpSettings),
)


def page(*arguments: str, columns: int = 80) -> str:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments), catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def options_of(command: list[str]) -> list[Any]:
    found = command_line()
    for name in command:
        found = found.commands[name]
    return found.params


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_page_is_short_and_no_name_is_cut(command: list[str], columns: int) -> None:
    text = page(*command, "--help", columns=columns)
    # a text may name an option of another command
    options = (option for each in COMMANDS for option in options_of(each))
    known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert flags(text) <= known | {"--help", "--help-all"}
    assert "…" not in text and "..." not in text.replace("[ARGS]...", "")
    lines = text.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= columns


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_all_options_are_listed_on_request(command: list[str]) -> None:
    whole = page(*command, "--help-all")
    options = [option for option in options_of(command) if option.param_type_name == "option"]
    assert len(options) > 2 and {option.opts[0] for option in options} <= flags(whole)
    assert max(map(len, whole.splitlines())) <= 80
    short = page(*command, "--help")
    left_out = re.search(r"--help-all lists (\d+) more options", short)
    hidden = {option.opts[0] for option in options} - flags(short)
    assert len(hidden) == (int(left_out[1]) if left_out else 0)


def test_square_brackets_are_part_of_the_text() -> None:
    assert "its table [speculation]" in " ".join(page("bench", "--help").split())
    assert "auto[:FOLDER]" in " ".join(page("generate", "--help").split())


def test_inspect_has_only_what_it_uses() -> None:
    fields = {*SpeculationConfig.model_fields, *EngineConfig.model_fields}
    settings = {option.name for option in options_of(["inspect"])} & fields
    assert settings - {"model"} == {*FIT, *FORM}


def test_the_list_of_commands_has_whole_sentences() -> None:
    text = page("--help")
    assert "..." not in text.replace("[ARGS]...", "")
    assert all(re.search(rf"^  {command[0]} ", text, re.MULTILINE) for command in COMMANDS)
    places = [text.index(f"\n  {name} ") for name in ("generate", "serve", "inspect", "bench", "train")]
    assert places == sorted(places)


def test_the_tables_of_sections_name_settings_that_exist() -> None:
    known = {name for model in MODELS for name in model.model_fields}
    assert known >= OFTEN_NEEDED and known >= set(SECTION_OF_FIELD)
