"""Tool calls in the text of a chat reply: their forms, and how they are read as the text comes.

A model whose template has a known form writes it freely. Other models get the generic form: a call between
tags, under a grammar once its opening tag is there. A forced reply is a JSON array, or one call's arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from speculon.decoding.text.deltas import Delta, more_arguments, new_call, partial_tag, text_delta

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # as Hermes and Qwen templates write a call, and the generic form
BETWEEN = " \t\r\n,;[]"  # what may stand before, between and after calls
# a call up to its arguments, as nearly all models write it
HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
FIRST_KEY = re.compile(r'\{\s*(?:$|"(\w*)($|"))')
KEYS = ("name", "arguments", "parameters", "type", "id")
WITHOUT_ARGUMENTS = {"name", "type", "id"}


class NamedCallParser:
    """One call of the function that the client has named: the whole text is its arguments."""

    tags: tuple[str, ...] = ()
    called = True
    held = ""

    def __init__(self, name: str):
        self._name, self._started = name, False

    def push(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._started:
            return [{"tool_calls": [more_arguments(0, text)]}]
        self._started = True
        return [{"tool_calls": [new_call(0, self._name, text)]}]

    def end(self, cut: bool) -> list[Delta]:
        return []


class CallsParser:
    """Reads calls, one JSON object after the other. The name is sent first, then the arguments as they come.

    Subclasses say where calls begin, and what follows them.
    """

    tags: tuple[str, ...] = ()

    def __init__(self, most: int | None = None):
        self._most = most  # calls; what follows them is dropped
        self._calls = 0
        self._held = ""  # not read yet
        self._raw = ""  # read since the calls began, and text where there is no call
        self._some = False  # whether there is a call since then
        self._state: Callable[[list[Delta]], bool] = self._text

    @property
    def called(self) -> bool:
        return self._calls > 0

    @property
    def held(self) -> str:
        return self._raw + self._held

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._state(deltas):
            pass
        return deltas

    def end(self, cut: bool) -> list[Delta]:
        in_call = self._some or self._state == self._dropped
        return [] if in_call else text_delta(self._raw + self._held)

    # Each state takes what it can of `_held`; true where the next state goes on.

    def _text(self, deltas: list[Delta]) -> bool:
        raise NotImplementedError

    def _after(self, deltas: list[Delta]) -> bool:
        """What stands in place of another call."""
        return self._no_call(deltas)

    def _between(self, deltas: list[Delta]) -> bool:
        rest = self._held.lstrip(BETWEEN)
        self._raw += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if rest.startswith("{"):
            self._named, self._json, self._scanned, self._nesting = False, "", 0, Nesting()
            self._state = self._object
            return True
        return bool(rest) and self._after(deltas)

    def _object(self, deltas: list[Delta]) -> bool:
        head = HEAD.match(self._held)
        if head and not self._named:
            self._named = True
            self._begin(deltas, head[1])
        if head and self._held.startswith("{", head.end()):
            self._held, self._nesting = self._held[head.end() :], Nesting()
            self._state = self._arguments
            return True
        if not may_be_call(self._held):
            return self._no_call(deltas)
        return self._whole_object(deltas)

    def _whole_object(self, deltas: list[Delta]) -> bool:
        """A call that is written in another order, or has no object as its arguments: read at its end."""
        json_text, end = self._nesting.read(self._held[self._scanned :])
        self._json += json_text
        if end is None:
            self._scanned = len(self._held)
            return False
        call = read_call(self._json)
        if call is None and not self._named:
            return self._no_call(deltas)
        name, arguments = call or ("", self._json)  # what was written: a client refuses it as no JSON
        if not self._named:
            self._begin(deltas, name)
        self._add(deltas, arguments)
        self._held = self._held[self._scanned + end :]
        return self._end_call()

    def _arguments(self, deltas: list[Delta]) -> bool:
        arguments, end = self._nesting.read(self._held)
        self._add(deltas, arguments)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._state, self._nesting = self._rest_of_object, Nesting(1)
        return end is not None

    def _rest_of_object(self, deltas: list[Delta]) -> bool:
        _, end = self._nesting.read(self._held)
        self._held = "" if end is None else self._held[end:]
        return end is not None and self._end_call()

    def _end_call(self) -> bool:
        self._raw, self._state = "", self._dropped if self._calls == self._most else self._between
        return True

    def _gap(self, deltas: list[Delta]) -> bool:
        self._held = self._held.lstrip()  # blanks after a call are no text
        if self._held:
            self._state = self._text
        return bool(self._held)

    def _dropped(self, deltas: list[Delta]) -> bool:
        self._held = ""
        return False

    def _no_call(self, deltas: list[Delta]) -> bool:
        """Text follows: after calls, or because there was none."""
        if not self._some:
            deltas += text_delta(self._raw)
        self._state = self._gap if self._some else self._text
        self._raw, self._some = "", False
        return True

    def _begin(self, deltas: list[Delta], name: str) -> None:
        deltas.append({"tool_calls": [new_call(self._calls, name, "")]})
        self._calls += 1
        self._some = True

    def _add(self, deltas: list[Delta], arguments: str) -> None:
        """More arguments, in one entry per push: clients merge the entries of a chunk by index."""
        (last,) = deltas[-1].get("tool_calls", (None,)) if deltas else (None,)
        if last is not None and last["index"] == self._calls - 1:
            last["function"]["arguments"] += arguments
        elif arguments:
            deltas.append({"tool_calls": [more_arguments(self._calls - 1, arguments)]})


class TaggedCallsParser(CallsParser):
    """Text, and calls between tags: of Hermes and Qwen, and in the generic form. Text between tags that is no
    call stays text.
    """

    tags: tuple[str, ...] = (OPEN, CLOSE)

    def end(self, cut: bool) -> list[Delta]:
        # the beginning of a call is no content
        return [] if cut and self._state in (self._between, self._object) else super().end(cut)

    def _text(self, deltas: list[Delta]) -> bool:
        text, opening, rest = self._held.partition(OPEN)
        if not opening:
            certain = len(text) - partial_tag(text, OPEN)
            text, rest = text[:certain], text[certain:]
        self._held = rest
        deltas += text_delta(text)
        if opening:
            self._raw, self._some, self._state = OPEN, False, self._between
        return bool(opening)

    def _after(self, deltas: list[Delta]) -> bool:
        if CLOSE.startswith(self._held) and self._held != CLOSE:
            return False
        if self._some:
            self._held = self._held.removeprefix(CLOSE)
        return self._no_call(deltas)


class JsonCallsParser(CallsParser):
    """Calls as JSON objects at the beginning of a reply (Llama 3); anything else is text."""

    def __init__(self, most: int | None = None):
        super().__init__(most)
        self._state = self._between

    def _text(self, deltas: list[Delta]) -> bool:
        deltas += text_delta(self._held)
        self._held = ""
        return False


class ForcedCallsParser(JsonCallsParser):
    """Calls in a JSON array that a grammar has forced, without any text."""

    def end(self, cut: bool) -> list[Delta]:
        return []


class Nesting:
    """Where a JSON object ends, in whatever pieces it comes."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._string, self._escaped = depth, False, False

    def read(self, text: str) -> tuple[str, int | None]:
        """(the object's text, where it ends in `text`); None where that is not in `text`.

        Raw line breaks in strings are escaped. A tag ends an object that lacks its bracket.
        """
        chars = []
        for i, char in enumerate(text):
            if self._string:
                self._string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                chars.append(json.dumps(char)[1:-1] if char < " " else char)
                continue
            if char == "<":  # no JSON has it outside of strings
                return "".join(chars), i
            chars.append(char)
            self._string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if self._depth == 0 and char in "}]":
                return "".join(chars), i + 1
        return "".join(chars), None


# a part of a template's source -> the parser of its tool calls
PARSERS: tuple[tuple[str, type[CallsParser]], ...] = (
    (OPEN, TaggedCallsParser),
    ('"parameters": ', JsonCallsParser),
)
NOT_JSON = ("<function=", "<arg_key>")  # of templates with the same tags, but no JSON between them


def parser_for(template: str) -> type[CallsParser] | None:
    """The parser for a model with this chat template; None where its form of calls is not known."""
    if "tools" not in template or any(mark in template for mark in NOT_JSON):
        return None
    return next((parser for mark, parser in PARSERS if mark in template), None)


def may_be_call(text: str) -> bool:
    """Whether an object that begins so may be a call, by its first key."""
    match = FIRST_KEY.match(text)
    if match is None:
        return False
    key, closed = match[1] or "", match[2]
    return key in KEYS if closed else any(name.startswith(key) for name in KEYS)


def read_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call; None where it is no call."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = next((call[key] for key in ("arguments", "parameters") if key in call), ...)
    if arguments is ...:
        return None if call.keys() - WITHOUT_ARGUMENTS else (call["name"], "{}")
    return call["name"], "{}" if arguments in (None, "") else as_json(arguments)


def as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tagged_call(name: str, arguments: Any) -> str:
    """A call in the generic form."""
    call = {"name": name, "arguments": arguments}
    return OPEN + json.dumps(call, ensure_ascii=False, separators=(",", ":")) + CLOSE
