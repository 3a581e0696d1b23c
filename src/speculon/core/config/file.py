"""The settings file: which one is read, and the line that sets a value."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from speculon.core.errors import ConfigError

FILE = "speculon.toml"
VARIABLE = "SPECULON_CONFIG"
MODELS = "SPECULON_MODELS"  # folders of models that have a name
CACHE = "SPECULON_CACHE"  # the folder where loads keep what they found; empty: nothing is kept
PART = r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[\w-]+)"  # of a dotted key; quoted, it may have dots itself
DOTTED = rf"{PART}(?:\s*\.\s*{PART})*"
TABLE = re.compile(rf"\s*\[\s*({DOTTED})\s*\]\s*(?:#.*)?$")
KEY = re.compile(rf"\s*({DOTTED})\s*=")
AT_LINE = re.compile(r"\(at line (\d+), column \d+\)")


def settings_file() -> Path | None:
    """The file that `SPECULON_CONFIG` names, else `speculon.toml` in the current folder, or none."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return Path(FILE) if os.path.isfile(FILE) else None
    if not os.path.isfile(named):
        raise ConfigError(f"{VARIABLE} = {named!r}: no such file")
    return Path(named)


def cache_folder() -> Path | None:
    """Where loads keep what they found; None: nowhere."""
    named = os.environ.get(CACHE)
    if named is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return None if base.startswith("~") else Path(base) / "speculon" / "loads"  # a user without a home
    return Path(named) if named else None


def models_folder() -> Path | None:
    """Where `speculon pull` puts models: beside what loads keep, or inside the folder of `SPECULON_CACHE`."""
    folder = cache_folder()
    return None if folder is None else (folder if CACHE in os.environ else folder.parent) / "models"


def place(keys: Sequence[str], path: Path | None = None) -> str | None:
    """File and line that set a value, as a message shows them; None where the file does not set it."""
    path = path or settings_file()
    try:
        line = None if path is None else line_of(path.read_text(encoding="utf-8"), keys)
    except (OSError, UnicodeDecodeError):
        return None
    return None if line is None else f"{path}, line {line}"


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """The line that sets a key, or a key of it, or else the innermost table or inline table around it."""
    setting_line, depth, table = None, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := TABLE.match(line):
            path = table = parts(header[1])
        elif key := KEY.match(line):
            path = [*table, *parts(key[1])]
        else:
            continue
        shared = path[: len(keys)]
        if len(shared) > depth and shared == list(keys[: len(shared)]):
            setting_line, depth = number, len(shared)
    return setting_line


def parts(dotted: str) -> list[str]:
    return [unquoted(part) for part in re.findall(PART, dotted)]


def unquoted(part: str) -> str:
    try:
        return next(iter(tomllib.loads(f"{part} = 0")))
    except tomllib.TOMLDecodeError:  # an escape that TOML lacks: the parser of the file refuses it
        return part.strip("\"'")


def syntax_error(error: Exception, path: Path | None = None) -> ConfigError:
    """A file that is not TOML, with the line."""
    text = str(error)
    line = AT_LINE.search(text)
    where = f", line {line[1]}" if line else ""
    name = os.environ.get(VARIABLE, FILE) if path is None else path
    return ConfigError(f"{name}{where}: {AT_LINE.sub('', text).strip()}")
