"""What a log may hold of a request: names, types and lengths, never its text."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from typing import Any

PLAIN_NAME = re.compile(r"\w{1,32}", re.ASCII)
WORD = re.compile(r"\w{4,}")
SHOWN_DIGITS = 10  # longer numbers may be a card's or a telephone's


class LogFormatter(logging.Formatter):
    """Shows exceptions as types and places. Their messages may quote a request."""

    def formatException(self, info: Any) -> str:
        return "\n".join(tracebacks(info[1]))


def tracebacks(error: BaseException) -> Iterator[str]:
    """One traceback for each exception of a chain or a group, causes first."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for inner in (*parts, *([cause] if cause else [])):
        yield from tracebacks(inner)
        yield "which led to:"
    frames = "".join(traceback.format_tb(error.__traceback__))
    yield f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}"


def without_text(name: str, value: Any, limit: str) -> str:
    """A refused field without its text. A limit that repeats a word of the value is left out."""
    shown = "" if isinstance(value, int | float | None) else repr(value)
    quotes = any(word in shown for word in WORD.findall(limit))
    return f"{name_for_log(name)} = {described(value)}" + ("" if quotes else f": {limit}")


def name_for_log(name: str) -> str:
    """A field's name. From the first part that is no plain name on, it is shown as a length."""
    parts = name.split(".")
    plain = next((i for i, part in enumerate(parts) if not PLAIN_NAME.fullmatch(part)), len(parts))
    rest = ".".join(parts[plain:])
    return ".".join([*parts[:plain], *([f"({len(rest)} characters)"] if rest else [])])


def described(value: Any) -> str:
    """Short numbers as they are; other values as a type and a length."""
    match value:
        case str():
            return f"a string of {len(value)} characters"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} fields"
        case None | bool() | int() | float():
            shown = repr(value)
            return shown if len(shown) <= SHOWN_DIGITS else f"a number of {len(shown)} characters"
    return f"a value of type {type(value).__name__}"


def path_for_log(path: str, known: set[str]) -> str:
    """A path with those of its parts that are known; others are shown as their length."""
    return "/".join(part if part in known else f"({len(part)} characters)" for part in path.split("/"))
