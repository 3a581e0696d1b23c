"""Tool calls in the forms of chat templates: parsed in whatever pieces the text comes, or left as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from speculon.decoding.text.conversations import plain_form
from speculon.decoding.text.deltas import ReplyParser, TextParser, merge_deltas
from speculon.decoding.text.tool_calls import (
    CLOSE,
    ForcedCallsParser,
    JsonCallsParser,
    NamedCallParser,
    TaggedCallsParser,
    parser_for,
)
from speculon.server.completions import generic_messages
from speculon.server.request import template_message
from speculon.server.schemas import Message
from tests.server.inside import served
from tests.server.test_answers import check_alike, events_of

HERMES = "{% if tools %}<tools>{{ tools }}</tools> answer in <tool_call></tool_call>{% endif %}{{ messages }}"
LLAMA = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}{{ messages }}'


def call(name: str = "f", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(make: Callable[[], ReplyParser], parts: list[str], cut: bool = False) -> tuple[Any, bool]:
    """The message of a text in these parts, without the calls' random ids; and whether it is a call."""
    parser = make()
    message = merge_deltas([delta for part in parts for delta in parser.push(part)] + parser.end(cut))
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())
    ]
    return (message["content"], calls), parser.called


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (HERMES, TaggedCallsParser),
        (LLAMA, JsonCallsParser),
        ("{{ messages }}", None),
        ("{{ messages }}<tool_call>", None),
        (HERMES + "<function=name>", None),
        ("", None),
    ],
)
def test_templates_tell_how_calls_are_written(template: str, parser: type | None) -> None:
    assert parser_for(template) is parser


TAGGED, JSON_CALL, FORCED, TEXT = TaggedCallsParser, JsonCallsParser, ForcedCallsParser, TextParser
F = '{"name":"f","arguments":{"x":"}]\\\\\\"{<é>"}}'
G = '{"name":"g","arguments":{"y":[{}]}}'
BOTH = [("f", {"x": '}]\\"{<é>'}), ("g", {"y": [{}]})]
TWO = f"[{F},{G}]"
DEEP = f"<tool_call>{'[' * 9999}</tool_call>"
CALL = '<tool_call>{"name":"h","arguments":{}}</tool_call>'
IN_TAGS = f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>"
EMPTY: list[Any] = [("f", {})]
H: list[Any] = [("h", {})]
LINES = [("f", {"x": "a\n\tb"})]
TEXTS: dict[str, tuple[Callable[[], ReplyParser], str, Any, bool]] = {
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
    "an array": (FORCED, TWO, (None, BOTH), True),
    "a cut array": (FORCED, '[{"name":"f","argum', ("", []), False),
    "guided": (TAGGED, IN_TAGS, (None, BOTH), True),
    "guided, with text": (TAGGED, f"a {CALL}\n \n z {CALL}", ("a z ", [("h", {})] * 2), True),
    "text after a call": (TAGGED, f"a {CALL}\n \n z {CALL}", ("a z ", [("h", {})] * 2), True),
    "guided, only text": (TAGGED, "a <tool_ca", ("a <tool_ca", []), False),
    "a tag that was not guided": (TAGGED, "a <tool_call> {", ("a <tool_call> {", []), False),
    "one call": (partial(TAGGED, 1), "a" + call(x=1) + call("g") + "b", ("a", [("f", {"x": 1})]), True),
    "a closing tag in a string": (TAGGED, call(x=CLOSE), (None, [("f", {"x": CLOSE})]), True),
    "an array in tags": (TAGGED, f"<tool_call>{TWO}</tool_call>", (None, BOTH), True),
    "no closing tag": (TAGGED, f"a<tool_call>\n{F}", ("a", BOTH[:1]), True),
    "no closing tag, then text": (TAGGED, f"<tool_call>{F} so", ("so", BOTH[:1]), True),
    "no closing tag, then a call": (TAGGED, f"<tool_call>{F}\n<tool_call>{G}", (None, BOTH), True),
    "no closing bracket": (TAGGED, f"<tool_call>{G[:-1]}</tool_call>b", ("b", BOTH[1:]), True),
    "null": (TAGGED, '<tool_call>{"name":"f","arguments":null}</tool_call>', (None, EMPTY), True),
    "null, Llama": (JSON_CALL, '{"name": "f", "parameters": null}', (None, EMPTY), True),
    "null, first": (TAGGED, '<tool_call>{"arguments":null,"name":"f"}</tool_call>', (None, EMPTY), True),
    "no arguments": (TAGGED, '<tool_call>{"name":"f"}</tool_call>', (None, EMPTY), True),
    "a string of arguments": (JSON_CALL, '{"name": "f", "arguments": "{}"}', (None, EMPTY), True),
    "a line break": (TAGGED, call(x="a\n\tb").replace("\\n\\t", "\n\t"), (None, LINES), True),
    "a line break, first": (
        TAGGED, '<tool_call>{"arguments":{"x":"a\n\tb"},"name":"f"}</tool_call>', (None, LINES), True
    ),
    "more keys": (TAGGED, '<tool_call>{"name":"f","arguments":{},"id":"}"}</tool_call>', (None, EMPTY), True),
    "a semicolon": (JSON_CALL, f"{F}; {G}", (None, BOTH), True),
    "a line between": (JSON_CALL, f"{F}\n{G}\n", (None, BOTH), True),
    "an array of Llama": (JSON_CALL, TWO, (None, BOTH), True),
    "text behind": (JSON_CALL, f"{F}; {G} Done.", ("Done.", BOTH), True),
    "one of two": (partial(JSON_CALL, 1), f"{F}; {G}", (None, BOTH[:1]), True),
    "a name alone": (JSON_CALL, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', []), False),
    "a list": (JSON_CALL, "[1, 2]", ("[1, 2]", []), False),
    "a mention": (TAGGED, "Write <tool_call> here. " + CALL, ("Write <tool_call> here. ", H), True),
    "too deep": (TAGGED, DEEP, (DEEP, []), False),
    "nothing": (FORCED, "", ("", []), False),
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
    (made,) = merge_deltas(deltas + parser.end(False))["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": text}


@pytest.mark.parametrize("make", [ForcedCallsParser, TaggedCallsParser])
def test_a_call_that_is_cut_is_a_partial_call(make: type[ReplyParser]) -> None:
    """At each of its characters; in one piece and streamed, which are the same."""
    text = TWO if make is ForcedCallsParser else IN_TAGS
    starts = [text.index('arguments":') + len('arguments":'), text.rindex('arguments":') + len('arguments":')]
    for end in range(len(text)):
        parser, streamed = make(), make()
        whole = merge_deltas(parser.push(text[:end]) + parser.end(True))
        deltas = [delta for char in text[:end] for delta in streamed.push(char)] + streamed.end(True)
        merged = merge_deltas(deltas)
        calls = merged.get("tool_calls", [])
        assert [one["function"] for one in calls] == [one["function"] for one in whole.get("tool_calls", [])]
        assert (whole["content"] or "") == (merged["content"] or "") and "name" not in (
            merged["content"] or ""
        )
        assert len(calls) == sum(start <= end for start in starts) and streamed.called == bool(calls)
        for name, arguments, one in zip("fg", [F, G], calls, strict=False):
            assert one["function"]["name"] == name
            assert arguments.partition('arguments":')[2][:-1].startswith(one["function"]["arguments"])
        if calls and end < len(text) - len("}]"):
            assert calls[-1]["function"]["arguments"] in text[starts[len(calls) - 1] : end]


CUT: dict[str, tuple[Callable[[], ReplyParser], str, str | None]] = {
    "in the tag": (TAGGED, "a<tool_ca", "a<tool_ca"),
    "behind the tag": (TAGGED, "a<tool_call>\n", "a"),
    "in the name": (TAGGED, 'a<tool_call>{"name": "f', "a"),
    "a mention": (TAGGED, "a<tool_call> is", "a<tool_call> is"),
    "JSON": (JSON_CALL, '{"name": "Bob", "a', '{"name": "Bob", "a'),
    "forced": (FORCED, '[{"name":"f","argum', ""),
}


@pytest.mark.parametrize("case", CUT)
def test_a_reply_that_is_cut_shows_no_beginning_of_a_call(case: str) -> None:
    make, text, content = CUT[case]
    assert read(make, [text], cut=True) == ((content, []), False)


STREAMED = {
    "Hermes": (TAGGED, "<tool_call>\n{}\n</tool_call>"),
    "after a mention": (TAGGED, "Use <tool_call>, so: <tool_call>\n{}\n</tool_call>"),
    "Llama": (JSON_CALL, "{}"),
    "an array": (FORCED, "[{}]"),
}


@pytest.mark.parametrize("case", STREAMED)
def test_the_name_comes_first_and_the_arguments_as_they_are_written(case: str) -> None:
    make, form = STREAMED[case]
    text = form.replace("{}", json.dumps({"name": "f", "arguments": {"x": "y" * 1000}}))
    half, parser = text.index("yyy") + 500, make()
    deltas = [delta for char in text[:half] for delta in parser.push(char)]
    events = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert events[0]["function"] == {"name": "f", "arguments": ""} and len(events) > 500
    assert "".join(event["function"]["arguments"] for event in events) == '{"x": "' + "y" * 500


def test_text_behind_a_mention_of_a_tag_comes_as_it_is_written() -> None:
    parser = TAGGED()
    come = ["".join(d["content"] for d in parser.push(char)) for char in "The tag <tool_call> is x"]
    assert "".join(come) == "The tag <tool_call> is x" and come[-1] == "x"


def test_a_push_adds_once_to_a_call() -> None:
    """Clients merge the entries of a chunk by index."""
    for text in (TWO, IN_TAGS):
        for step in (1, 7, 30, 200):
            parser: ReplyParser = ForcedCallsParser() if text is TWO else TaggedCallsParser()
            for at in range(0, len(text), step):
                added = [
                    c["index"] for d in parser.push(text[at : at + step]) for c in d.get("tool_calls", ())
                ]
                assert len(added) == len(set(added))


def test_a_recogniser_that_loses_text_is_seen() -> None:
    """The twin: one that forgets what it held back."""

    class Forgetful(TaggedCallsParser):
        def end(self, cut: bool) -> list[Any]:
            return []

    assert read(Forgetful, ["a<tool_ca"]) != (("a<tool_ca", []), False)


def test_calls_that_the_model_makes_by_itself() -> None:
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
            more = {"stream": True, "stream_options": {"include_usage": True}}
            check_alike(whole, events_of(inside.post("chat/completions", **body, **more)))


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "strict": False}}
    for name in "fg"
]
ANSWER = f"say:Well: {IN_TAGS}"
PLAIN = "{{ messages }}"  # without tools


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_a_forced_call_that_max_tokens_cuts(choice: Any) -> None:
    named, cut = isinstance(choice, dict), len('[{"name":"f","arguments":{"x":"yy')
    text = '{"x":"yyyy"}' if named else '[{"name":"f","arguments":{"x":"yyyy"}}]'
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with served(template=PLAIN) as inside:
        body = {"tools": TOOLS, "tool_choice": choice, "messages": user("say:" + text)}
        body["max_tokens"] = cut - len(text.partition("{")[0] + '{"name":"f","arguments":') * named + named
        whole = inside.post("chat/completions", **body).json()
        (got,) = whole["choices"]
        assert got["finish_reason"] == "length" and not got["message"]["content"]
        (made,) = got["message"]["tool_calls"]
        assert made["function"]["name"] == "f" and made["function"]["arguments"].startswith('{"x":"y')
        chunks = events_of(inside.post("chat/completions", **body, **more))
        check_alike(whole, chunks)
        assert sum(bool(c["delta"].get("tool_calls")) for e in chunks for c in e["choices"]) > 2, (
            "not streamed"
        )


def test_calls_in_the_generic_form() -> None:
    """As langchain's `bind_tools` and instructor's parallel mode ask, with the official client."""
    fields: dict[str, Any] = {"model": "scripted", "max_tokens": 300, "tools": TOOLS}
    with served(template=PLAIN) as inside, OpenAI(base_url=inside.url + "/v1", api_key="x") as client:
        for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "auto", "parallel_tool_calls": True}):
            answer = client.chat.completions.create(messages=user(ANSWER), **fields, **more)
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Well: "
            made = choice.message.tool_calls or []
            assert [(c.function.name, json.loads(c.function.arguments)) for c in made] == BOTH  # type: ignore[union-attr]
        results = [{"role": "tool", "tool_call_id": c.id, "content": "1"} for c in made]
        history = [*user("q"), choice.message.model_dump(), *results, *user("say:done")]
        answer = client.chat.completions.create(messages=history, **fields)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("done", "stop")


def test_a_chat_with_tools_for_a_template_without() -> None:
    calls = [
        {"function": {"name": "f", "arguments": {"x": "é"}}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
    ]
    named = [(str(i), message) for i, message in enumerate(messages)]
    names, written = zip(*generic_messages(named, TOOLS, "Call:"), strict=True)
    tools, system, question, called, answered = written
    assert names == ("tools", "0", "1", "2", "3") and system == messages[0]
    assert tools["role"] == "system" and tools["content"].startswith('Call:\n{"name": "f"')
    assert question == {"role": "user", "content": "q"}
    f, g = '{"name":"f","arguments":{"x":"é"}}', '{"name":"g","arguments":{}}'
    content = f"<tool_call>{f}</tool_call>\n<tool_call>{g}</tool_call>"
    assert called == {"role": "assistant", "content": content}
    results = "<tool_response>1</tool_response>\n<tool_response>2</tool_response>"
    assert answered == {"role": "user", "content": results}
    assert generic_messages(named[:2], [], "Call:") == named[:2]


def test_an_empty_list_of_calls_is_no_list() -> None:
    """Templates ask whether there is a list; Llama's refuses one without exactly one call."""
    for calls in ([], None):
        message = Message(role="assistant", content="a", tool_calls=calls)
        assert plain_form(template_message(message)) == {"role": "assistant", "content": "a"}
    made = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [made]})
    assert len(plain_form(template_message(message))["tool_calls"]) == 1


def test_one_call_at_most() -> None:
    with served(template=HERMES) as inside:
        body = {"messages": user("say:" + call(x=1) + call("g")), "tools": TOOLS, "max_tokens": 300}
        for parallel in (True, False):
            (choice,) = inside.post("chat/completions", **body, parallel_tool_calls=parallel).json()[
                "choices"
            ]
            assert len(choice["message"]["tool_calls"]) == 1 + parallel


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages.0.function_call",
        ),
    ],
)
def test_the_fields_before_tools_are_refused_by_name(more: dict[str, Any], param: str) -> None:
    with served() as inside:
        response = inside.post("chat/completions", **{"messages": user("q"), **more})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["message"].endswith("use tools, tool_choice and tool_calls")
        nothing = {"messages": [{**user("say:a")[0], "function_call": None}], "functions": None}
        assert inside.post("chat/completions", **nothing).status_code == 200
