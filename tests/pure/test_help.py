"""Help pages: complete where all options are asked for, and true about what they leave out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from speculon.cli import app
from tests.documents import command_line, flags


def commands(group: Any, *path: str) -> dict[str, Any]:
    """Every command that runs something, by its words."""
    if not hasattr(group, "commands"):
        return {" ".join(path): group}
    return {name: c for word, sub in group.commands.items() for name, c in commands(sub, *path, word).items()}


COMMANDS = commands(command_line())


def page(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments), catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_lists_all_options_on_request_and_else_says_how_many_it_leaves_out(command: str) -> None:
    short, whole = page(*command.split(), "--help"), page(*command.split(), "--help-all")
    options = {p.opts[0] for p in COMMANDS[command].params if p.param_type_name == "option"}
    assert len(options) > 1 and options <= flags_in(whole) <= flags() | {"--help-all"}
    left_out = re.search(r"--help-all lists (\d+) more options", short)
    assert len(options - flags_in(short)) == (int(left_out[1]) if left_out else 0)
    assert "…" not in whole, "a name is cut"


def test_square_brackets_are_part_of_the_text() -> None:
    assert "auto[:FOLDER]" in " ".join(page("generate", "--help").split())


def test_the_list_has_every_command() -> None:
    text = page("--help")
    assert all(re.search(rf"^  {command.split()[0]} ", text, re.MULTILINE) for command in COMMANDS)
