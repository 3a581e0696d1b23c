"""Tool calls in the forms of chat templates: parsed in whatever pieces the text comes, or left as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.server.tool_calls import (
    JsonCallParser,
    NamedCallParser,
    ReplyParser,
    RequiredCallsParser,
    TaggedCallsParser,
    TextParser,
    calls_schema,
    merge_deltas,
    parser_for,
)
from tests.server.inside import served
from tests.server.test_answers import check_alike, events_of

HERMES = "{% if tools %}<tools>{{ tools }}</tools> answer in <tool_call></tool_call>{% endif %}{{ messages }}"
LLAMA = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}{{ messages }}'


def call(name: str = "f", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(make: Callable[[], ReplyParser], parts: list[str]) -> tuple[Any, bool]:
    """The message of a text in these parts, without the calls' random ids; and whether it is a call."""
    parser = make()
    message = merge_deltas([delta for part in parts for delta in parser.push(part)] + parser.end())
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())
    ]
    return (message["content"], calls), parser.called


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (HERMES, TaggedCallsParser),
        (LLAMA, JsonCallParser),
        ("{{ messages }}", None),
        ("{{ messages }}<tool_call>", None),
        ("", None),
    ],
)
def test_templates_tell_how_calls_are_written(template: str, parser: type | None) -> None:
    assert parser_for(template) is parser


TAGGED, JSON_CALL = TaggedCallsParser, JsonCallParser
REQUIRED, TEXT = RequiredCallsParser, TextParser
TWO = '[{"name": "f", "arguments": {}}, {"name": "g", "parameters": {"y": []}}]'
TEXTS: dict[str, tuple[type, str, Any, bool]] = {
    "text": (TAGGED, "Hello < there", ("Hello < there", []), False),
    "a call": (TAGGED, call(x=1), (None, [("f", {"x": 1})]), True),
    "text and a call": (TAGGED, "Well:\n" + call(x="<é>"), ("Well:\n", [("f", {"x": "<é>"})]), True),
    "two calls": (TAGGED, call(x=1) + "\n" + call("g"), (None, [("f", {"x": 1}), ("g", {})]), True),
    "no JSON": (TAGGED, "<tool_call>nonsense</tool_call>", ("<tool_call>nonsense</tool_call>", []), False),
    "not a call": (TAGGED, "<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", []), False),
    "cut off": (TAGGED, 'a<tool_call>{"name": "f"', ('a<tool_call>{"name": "f"', []), False),
    "cut in the tag": (TAGGED, "a<tool_ca", ("a<tool_ca", []), False),
    "a lone object": (JSON_CALL, '{"name": "f", "parameters": {"x": 2}}', (None, [("f", {"x": 2})]), True),
    "another object": (JSON_CALL, '{"x": 2}', ('{"x": 2}', []), False),
    "no object": (JSON_CALL, "  {no", ("  {no", []), False),
    "words": (JSON_CALL, "\n hello {", ("\n hello {", []), False),
    "an array": (REQUIRED, TWO, (None, [("f", {}), ("g", {"y": []})]), True),
    "a cut array": (REQUIRED, '[{"name": "f", "argum', ('[{"name": "f", "argum', []), False),
    "nothing": (REQUIRED, "", ("", []), False),
    "spoken": (TEXT, call(), (call(), []), False),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_calls_are_recognised_in_any_pieces(case: str, cuts: list[int]) -> None:
    make, text, message, called = TEXTS[case]
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    assert read(make, [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]) == (message, called)


@given(cuts=st.lists(st.integers(1, 30), max_size=5))
def test_arguments_of_a_named_tool_stream_as_they_come(cuts: list[int]) -> None:
    text, parser = json.dumps({"x": "y" * 20}), NamedCallParser("f")
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    deltas = [delta for a, b in zip(edges, edges[1:], strict=False) for delta in parser.push(text[a:b])]
    assert len(deltas) == len(edges) - 1 and parser.called
    (made,) = merge_deltas(deltas + parser.end())["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": text}


def test_a_recogniser_that_loses_text_is_seen() -> None:
    """The twin: one that forgets what it held back."""

    class Forgetful(TaggedCallsParser):
        def end(self) -> list[Any]:
            return []

    assert read(Forgetful, ["a<tool_ca"]) != (("a<tool_ca", []), False)


def test_the_schema_of_calls_keeps_every_tools_own_definitions() -> None:
    point = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/p"}},
        "$defs": {"p": {"type": "integer"}},
    }
    named = {
        "type": "object",
        "properties": {"at": {"$ref": "#/definitions/p"}},
        "definitions": {"p": {"type": "string"}},
    }
    functions = [{"name": "a", "parameters": point}, {"name": "b", "parameters": named}, {"name": "c"}]
    schema = calls_schema(functions, parallel=True)
    assert (
        schema["$defs"] == {"a.p": {"type": "integer"}, "b.p": {"type": "string"}} and schema["maxItems"] > 1
    )
    forms = [form["properties"]["arguments"] for form in schema["items"]["anyOf"]]
    assert [form.get("properties") for form in forms] == [
        {"at": {"$ref": "#/$defs/a.p"}},
        {"at": {"$ref": "#/$defs/b.p"}},
        None,
    ]
    assert calls_schema(functions[:1], parallel=False)["maxItems"] == 1
    assert "$defs" not in calls_schema(
        [{"name": "odd", "parameters": {"$defs": [1], "definitions": None}}], parallel=True
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_that_the_model_makes_by_itself(stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    fields: dict[str, Any] = {"tools": tools, "max_tokens": 300}
    with served(template=HERMES) as inside:
        for text, reason, count in (
            ("Well: " + call(x=1) + call("g"), "tool_calls", 2),
            ("no call", "stop", 0),
            ("<tool_call>{", "stop", 0),
        ):
            body = {**fields, "messages": [{"role": "user", "content": "say:" + text}]}
            whole = inside.post("chat/completions", **body).json()
            (choice,) = whole["choices"]
            assert choice["finish_reason"] == reason and len(choice["message"].get("tool_calls", ())) == count
            assert choice["message"]["content"] == ("Well: " if count else text)
            if stream:
                more = {"stream": True, "stream_options": {"include_usage": True}}
                check_alike(whole, events_of(inside.post("chat/completions", **body, **more)))
