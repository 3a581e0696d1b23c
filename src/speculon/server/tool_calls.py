"""Tool calls in the text of a chat reply: forced by a grammar, or in the form that the template asks for."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

Delta = dict[str, Any]  # of an assistant's message, as the API streams it

MAX_CALLS = 8  # in one forced reply
OPEN, CLOSE = "<tool_call>", "</tool_call>"  # as Hermes and Qwen templates write a call


class ReplyParser(Protocol):
    """Turns the text of one reply into deltas as it comes."""

    def push(self, text: str) -> list[Delta]: ...

    def end(self) -> list[Delta]:
        """The rest, once the text has ended."""
        ...

    @property
    def called(self) -> bool:
        """Whether the reply has tool calls."""
        ...


class TextParser:
    """Text without tool calls."""

    called = False

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self) -> list[Delta]:
        return []


class NamedCallParser:
    """One call of the function that the client has named: the whole text is its arguments."""

    called = True

    def __init__(self, name: str):
        self._name, self._started = name, False

    def push(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._started:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        self._started = True
        return [{"tool_calls": [new_call(0, self._name, text)]}]

    def end(self) -> list[Delta]:
        return []


class RequiredCallsParser:
    """Calls in a JSON array that a grammar has forced; sent once they are complete."""

    def __init__(self) -> None:
        self._text, self.called = "", False

    def push(self, text: str) -> list[Delta]:
        self._text += text
        return []

    def end(self) -> list[Delta]:
        calls = read_calls(self._text)
        self.called = bool(calls)
        if calls:
            return [{"tool_calls": [new_call(i, *call) for i, call in enumerate(calls)]}]
        return [{"content": self._text}] if self._text else []  # cut off by max_tokens


class TaggedCallsParser:
    """Text, and calls between tags (Hermes, Qwen). Text between tags that is no call stays text."""

    def __init__(self) -> None:
        self._held, self._calls = "", 0

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while True:
            at = self._held.find(OPEN)
            if at < 0:
                certain = len(self._held) - partial_tag(self._held, OPEN)
                return deltas + self._take_text(certain)
            deltas += self._take_text(at)
            end = self._held.find(CLOSE)
            if end < 0:
                return deltas
            deltas += self._take_call(end + len(CLOSE))

    def end(self) -> list[Delta]:
        return self._take_text(len(self._held))

    def _take_text(self, upto: int) -> list[Delta]:
        text, self._held = self._held[:upto], self._held[upto:]
        return [{"content": text}] if text and (text.strip() or not self._calls) else []

    def _take_call(self, upto: int) -> list[Delta]:
        calls = read_calls(self._held[len(OPEN) : upto - len(CLOSE)])
        if not calls:
            return self._take_text(upto)
        self._held = self._held[upto:].lstrip("\n")
        self._calls += 1
        return [{"tool_calls": [new_call(self._calls - 1, *calls[0])]}]


class JsonCallParser:
    """A call as a lone JSON object (Llama 3); anything else is text."""

    def __init__(self) -> None:
        self._text, self._is_text, self.called = "", False, False

    def push(self, text: str) -> list[Delta]:
        if self._is_text:
            return [{"content": text}] if text else []
        self._text += text
        start = self._text.lstrip()
        if not start or start.startswith("{"):
            return []
        self._is_text = True
        return [{"content": self._text}]

    def end(self) -> list[Delta]:
        if self._is_text or not self._text:
            return []
        calls = read_calls(self._text)
        self.called = bool(calls)
        return [{"tool_calls": [new_call(0, *calls[0])]}] if calls else [{"content": self._text}]


# a part of a template's source -> the parser of its tool calls
PARSERS: tuple[tuple[str, Callable[[], ReplyParser]], ...] = (
    (OPEN, TaggedCallsParser),
    ('"parameters": ', JsonCallParser),
)


def parser_for(template: str) -> Callable[[], ReplyParser] | None:
    """The parser for a model with this chat template; None where its form of calls is not known."""
    return next((parser for mark, parser in PARSERS if mark in template and "tools" in template), None)


def partial_tag(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def read_calls(text: str) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of each call in a JSON object or array; none where any part is no call."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [(call["name"], as_json(call.get("arguments", call.get("parameters", {})))) for call in calls]


def as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def new_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def merge_deltas(deltas: Seq[Delta]) -> Delta:
    """The message that a stream of deltas adds up to."""
    text = "".join(delta.get("content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message: Delta = {"role": "assistant", "content": text if text or not calls else None}
    return {**message, "tool_calls": calls} if calls else message


def calls_schema(functions: Seq[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of an array of calls of these functions: one to `MAX_CALLS`, or exactly one."""
    definitions: dict[str, Any] = {}
    forms = [call_schema(function, definitions) for function in functions]
    item = forms[0] if len(forms) == 1 else {"anyOf": forms}
    schema = {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_CALLS if parallel else 1}
    return {**schema, "$defs": definitions} if definitions else schema


def call_schema(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One call; the definitions in its parameters move into `definitions`, under the function's name."""
    name = function["name"]
    parameters = dict(function.get("parameters") or {"type": "object"})
    for key in ("$defs", "definitions"):
        own = parameters.pop(key, None)
        for part, schema in own.items() if isinstance(own, Mapping) else ():
            definitions[f"{name}.{part}"] = moved(schema, name)
    properties = {"name": {"const": name}, "arguments": moved(parameters, name)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def moved(schema: Any, name: str) -> Any:
    """`schema` with its references to its own definitions under the function's name."""
    if isinstance(schema, list):
        return [moved(part, name) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: moved_reference(part, name) if key == "$ref" else moved(part, name)
        for key, part in schema.items()
    }


def moved_reference(reference: Any, name: str) -> Any:
    for start in ("#/$defs/", "#/definitions/"):
        if isinstance(reference, str) and reference.startswith(start):
            return f"#/$defs/{name}.{reference.removeprefix(start)}"
    return reference
