"""The settings file: which one is read, and the line that sets a value."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from speculon.errors import ConfigError

FILE = "speculon.toml"
VARIABLE = "SPECULON_CONFIG"
TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")
AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")


def settings_file() -> Path | None:
    """The file that `SPECULON_CONFIG` names, else `speculon.toml` in the current folder, or none."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return Path(FILE) if os.path.isfile(FILE) else None
    if not os.path.isfile(named):
        raise ConfigError(f"{VARIABLE} = {named!r}: no such file")
    return Path(named)


def place(keys: Sequence[str]) -> str | None:
    """File and line that set a value, as a message shows them; None where the file does not set it."""
    path = settings_file()
    try:
        line = None if path is None else line_of(path.read_text(encoding="utf-8"), keys)
    except (OSError, UnicodeDecodeError):
        return None
    return None if line is None else f"{path}, line {line}"


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """The line that sets a key, or else the innermost table or inline table around it."""
    found, depth, table = None, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := TABLE.match(line):
            path = table = parts(header[1])
        elif key := KEY.match(line):
            path = [*table, *parts(key[1])]
        else:
            continue
        if len(path) > depth and path == list(keys[: len(path)]):
            found, depth = number, len(path)
    return found


def parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def syntax_error(error: Exception) -> ConfigError:
    """A file that is not TOML, with the line."""
    text = str(error)
    line = AT_LINE.search(text)
    where = f", line {line[1]}" if line else ""
    return ConfigError(f"{os.environ.get(VARIABLE, FILE)}{where}: {AT_LINE.sub('', text).strip()}")
