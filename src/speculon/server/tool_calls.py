"""Tool calls in the text of a chat reply: their forms, their grammars, and how they are read.

A model whose template has a known form writes it freely. Other models get the generic form: a call between
tags, under a grammar once its opening tag is there. A forced reply is a JSON array, or one call's arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

Delta = dict[str, Any]  # of an assistant's message, as the API streams it

TOOLS = "tools"  # the field that the forms of calls come from
MAX_CALLS = 8  # in one forced reply
OPEN, CLOSE = "<tool_call>", "</tool_call>"  # as Hermes and Qwen templates write a call, and the generic form
# a call as grammars write it, up to its arguments
CALL_START = '{"name":"'
CALL = re.compile(CALL_START + '([^"]*)","arguments":')


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
        return text_delta(text)

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
            return [more_arguments(0, text)]
        self._started = True
        return [{"tool_calls": [new_call(0, self._name, text)]}]

    def end(self) -> list[Delta]:
        return []


class GuidedCallsParser:
    """Text, and calls between tags that a grammar guides. Arguments are sent as they come, also where
    `max_tokens` cuts them.
    """

    def __init__(self) -> None:
        self._held, self._calls, self._name = "", 0, ""
        self._nesting = Nesting()
        self._state, self._after = self._text, self._close  # at the start, and after a call's arguments

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._state(deltas):
            pass
        return deltas

    def end(self) -> list[Delta]:
        # elsewhere the grammar's own text is held, which no client asked for
        return text_delta(self._held) if self._state == self._text else []

    # Each state takes what it can of `_held`; true where the next state goes on.

    def _text(self, deltas: list[Delta]) -> bool:
        text, opening, rest = self._held.partition(OPEN)
        if not opening:
            certain = len(text) - partial_tag(text, OPEN)
            text, rest = text[:certain], text[certain:]
        self._held = rest
        deltas += text_delta(text)
        if opening:
            self._state = self._head
        return bool(opening)

    def _head(self, deltas: list[Delta]) -> bool:
        if self._held.startswith(CALL_START) or CALL_START.startswith(self._held):
            return self._begin(CALL.match(self._held))
        deltas += text_delta(OPEN)  # the grammar did not see this tag: a special token cut it
        self._state = self._text
        return True

    def _begin(self, found: re.Match[str] | None) -> bool:
        if found:
            self._name, self._held, self._nesting = found[1], self._held[found.end() :], Nesting()
            self._calls += 1
            self._state = self._arguments
        return bool(found)

    def _arguments(self, deltas: list[Delta]) -> bool:
        end = self._nesting.end(self._held)
        arguments, self._held = self._held[:end], "" if end is None else self._held[end + 1 :]
        if self._name:
            deltas.append({"tool_calls": [new_call(self._calls - 1, self._name, arguments)]})
        elif arguments:
            deltas.append(more_arguments(self._calls - 1, arguments))
        self._name = ""
        if end is not None:
            self._state = self._after
        return end is not None

    def _close(self, deltas: list[Delta]) -> bool:
        closed = self._held.startswith(CLOSE)
        if closed:
            self._held, self._state = self._held.removeprefix(CLOSE), self._gap
        return closed

    def _gap(self, deltas: list[Delta]) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._text
        return bool(self._held)


class RequiredCallsParser(GuidedCallsParser):
    """Calls in a JSON array that a grammar has forced, without any text."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._after = self._next

    def _next(self, deltas: list[Delta]) -> bool:
        return self._begin(CALL.search(self._held))  # beyond the array's bracket, or a comma


class Nesting:
    """Where an object's last value ends, in whatever pieces the JSON comes."""

    def __init__(self) -> None:
        self._depth, self._string, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """Index of the bracket that closes the object; None where it is not in `text`."""
        for i, char in enumerate(text):
            if self._string:
                self._string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth == 0:
                    return i
                self._depth -= 1
        return None


class TaggedCallsParser:
    """Text, and calls between tags (Hermes, Qwen). Text between tags that is no call stays text."""

    most: int | None = None  # calls; what follows them is dropped

    def __init__(self) -> None:
        self._held, self._calls, self._gap = "", 0, False

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while True:
            if self._calls == self.most:
                self._held = ""
            if self._gap:  # blanks after a call are no text, in whatever pieces they come
                self._held = self._held.lstrip()
                self._gap = not self._held
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
        return text_delta(text)

    def _take_call(self, upto: int) -> list[Delta]:
        calls = read_calls(self._held[len(OPEN) : upto - len(CLOSE)])
        if not calls:
            return self._take_text(upto)
        self._held, self._gap = self._held[upto:], True
        self._calls += 1
        return [{"tool_calls": [new_call(self._calls - 1, *calls[0])]}]


class OneTaggedCallParser(TaggedCallsParser):
    """The same, for a reply of one call at most."""

    most = 1


class JsonCallParser:
    """A call as a lone JSON object (Llama 3); anything else is text."""

    def __init__(self) -> None:
        self._text, self._is_text, self.called = "", False, False

    def push(self, text: str) -> list[Delta]:
        if self._is_text:
            return text_delta(text)
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


# a part of a template's source -> the parsers of its tool calls: of any number, and of one
PARSERS: tuple[tuple[str, Callable[[], ReplyParser], Callable[[], ReplyParser]], ...] = (
    (OPEN, TaggedCallsParser, OneTaggedCallParser),
    ('"parameters": ', JsonCallParser, JsonCallParser),
)
NOT_JSON = ("<function=", "<arg_key>")  # of templates with the same tags, but no JSON between them


def parser_for(template: str, parallel: bool = True) -> Callable[[], ReplyParser] | None:
    """The parser for a model with this chat template; None where its form of calls is not known."""
    if "tools" not in template or any(mark in template for mark in NOT_JSON):
        return None
    return next((many if parallel else one for mark, many, one in PARSERS if mark in template), None)


def partial_tag(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def read_calls(text: str) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of each call in a JSON object or array; none where any part is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [(call["name"], as_json(call.get("arguments", call.get("parameters", {})))) for call in calls]


def as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tagged_call(name: str, arguments: Any) -> str:
    """A call in the generic form."""
    call = {"name": name, "arguments": arguments}
    return OPEN + json.dumps(call, ensure_ascii=False, separators=(",", ":")) + CLOSE


def new_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def more_arguments(index: int, text: str) -> Delta:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def text_delta(text: str) -> list[Delta]:
    return [{"content": text}] if text else []


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
    item, definitions = any_call(functions)
    return {
        "type": "array",
        "items": item,
        "minItems": 1,
        "maxItems": MAX_CALLS if parallel else 1,
        **definitions,
    }


def calls_grammar(
    functions: Seq[Mapping[str, Any]], parallel: bool, special_ids: Seq[int] = (), form: Any = None
) -> str:
    """Lark grammar of a reply in the generic form: free text, and calls of these functions between tags.

    A call ends a reply that is not `parallel`. With `form`, a JSON schema, the reply is calls or such JSON.
    `special_ids` are the special tokens that free text may have.
    """
    item, definitions = any_call(functions)
    call = f'"{CLOSE}"\nbody: {json_rule({**item, **definitions})}\n'
    if form is not None:
        calls = "call+" if parallel else "call"
        return f'start: {calls} | form\nform: {json_rule(form)}\ncall: "{OPEN}" body {call}'
    # to llguidance a special token is no text, so free text has them by their ids
    free = f"TEXT <[{','.join(map(str, special_ids))}]>" if special_ids else "TEXT"
    start = f"(call | {free})* TEXT" if parallel else f"({free})* (call | TEXT)"
    return (
        # a token may be a part of a character
        '%llguidance {"allow_invalid_utf8": true}\n'
        f'start: {start}\nTEXT: /(?s:.)*/\nhead[lazy]: TEXT "{OPEN}"\ncall: head body {call}'
    )


def json_rule(schema: Any) -> str:
    """Compact JSON of this schema, in a Lark grammar."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_flexible": False}, **schema})


def any_call(functions: Seq[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Schema of a call of one of these functions, and its definitions (`$defs`), if it has any."""
    definitions: dict[str, Any] = {}
    forms = [call_schema(function, definitions) for function in functions]
    return (forms[0] if len(forms) == 1 else {"anyOf": forms}), {"$defs": definitions} if definitions else {}


def call_schema(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One call; the definitions in its parameters move into `definitions`, under the function's name."""
    name = function["name"]
    parameters = dict(function.get("parameters") or {"type": "object"})
    for key in ("$defs", "definitions"):
        own = parameters.pop(key, None)
        for part, schema in own.items() if isinstance(own, Mapping) else ():
            definitions[f"{name}.{part}"] = moved(schema, name)
    arguments = moved(parameters, name)
    if any(f'"#/$defs/{name}{end}' in json.dumps(arguments | definitions) for end in '"/'):
        definitions[name] = arguments  # it refers to itself
    properties = {"name": {"const": name}, "arguments": arguments}
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
    whole = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return f"#/$defs/{name}{reference[1:]}" if whole else reference


def own_pointer(message: str, names: Seq[str]) -> str:
    """A complaint about a pointer into the definitions, as the function's own schema has it."""
    for name in names:
        for inner, own in ((f"'/$defs/{name}.", "'/$defs/"), (f"'/$defs/{name}/", "'/")):
            if inner in message:
                return f"parameters of {name}: {message.replace(inner, own)}"
    return message
