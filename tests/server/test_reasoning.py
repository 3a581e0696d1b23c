"""Thinking before the answer: its own field, whole and streamed, and nothing in it is a call."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.responses import Response
from transformers import AutoTokenizer

from speculon.core.config import RequestSpeculation, SamplingParams, Thinking
from speculon.core.types import Finish
from speculon.decoding.sequence import Ending, Event
from speculon.decoding.text.deltas import ReplyParser, TextParser, ThinkingParser, merge_deltas, thinking_of
from speculon.decoding.text.stop_strings import StopStrings
from speculon.decoding.text.thinking import AnswerStart
from speculon.decoding.text.tokenizer import Stream, Tokenizer
from speculon.decoding.text.tool_calls import JsonCallsParser, TaggedCallsParser
from speculon.decoding.verify import first_stop_string
from speculon.server.choice import Choice, TaggedStream, special_tags
from speculon.server.request import GenerationRequest
from speculon.server.responses import ResponseRequest, as_chat
from tests.server import test_responses as responses
from tests.server.inside import Inside, served
from tests.server.scripted import Bytes
from tests.server.test_answers import events_of, put_together
from tests.server.test_tool_calls import HERMES, TOOLS
from tests.tiny.demo_texts import DEMO

OPENED, OWN = Thinking(opened=True), Thinking()
JSON = '{"name":"f","arguments":{}}'
CALL = f"<tool_call>{JSON}</tool_call>"
F = [("f", "{}")]
Read = tuple[str | None, str | None, list[tuple[str, str]]]
REPLIES: dict[str, tuple[Thinking, type[Any], str, Read]] = {
    "opened": (OPENED, TextParser, "plan\n</think>\n\nanswer\n", ("plan", "answer\n", [])),
    "opened twice": (OPENED, TextParser, "<think>\nplan</think>answer", ("plan", "answer", [])),
    "its own": (OWN, TextParser, "\n<think>\n a b\n</think> c", ("a b", "c", [])),
    "none": (OWN, TextParser, " answer <think>", (None, " answer <think>", [])),
    "almost": (OWN, TextParser, "<thin", (None, "<thin", [])),
    "empty": (OPENED, TextParser, "\n\n</think>\n\nanswer", (None, "answer", [])),
    "not ended": (OPENED, TextParser, "plan </thi", ("plan </thi", None, [])),
    "nothing": (OPENED, TextParser, "", (None, "", [])),
    "a call": (OPENED, TaggedCallsParser, f"plan</think>\n{CALL}", ("plan", None, F)),
    "a call inside": (OPENED, TaggedCallsParser, f"or {CALL}</think>no", (f"or {CALL}", "no", [])),
    "a call inside, Llama": (OPENED, JsonCallsParser, JSON + "</think>no", (JSON, "no", [])),
    "calls inside and after": (OWN, TaggedCallsParser, f"<think>{CALL}</think>a {CALL}", (CALL, "a ", F)),
}  # fmt: skip


def read(parser: ReplyParser, parts: Seq[str]) -> Read:
    message = merge_deltas([delta for part in parts for delta in parser.push(part)] + parser.end(False))
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return message.get("reasoning_content"), message["content"], calls


@pytest.mark.parametrize("case", REPLIES)
@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_a_thinking_is_parted_from_the_answer_in_any_pieces(case: str, cuts: list[int]) -> None:
    thinking, answer, text, message = REPLIES[case]
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert read(ThinkingParser(thinking, answer), parts) == message


def test_a_thinking_comes_as_it_is_written() -> None:
    parser, text = ThinkingParser(OPENED, TextParser), "let me see </think>yes"
    come = [parser.push(char) for char in text]
    assert come[2] == [{"reasoning_content": "t"}] and come[-1] == [{"content": "s"}]


TEMPLATES = {
    "a template that opens it": ("{{ m }}<think>\n", "</think>", OPENED),
    "a prompt that opens it": ("{{ m }}</think>", "say <think>\n", OPENED),
    "a model that opens it": ("{{ m }}</think>", "", OWN),
    "a prompt that closes it": ("{{ m }}</think>", "<think>\n\n</think>\n\n", None),
    "no thinking": ("{{ m }}", "<think>", None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_template_and_prompt_tell_how_a_reply_thinks(case: str) -> None:
    template, end, thinking = TEMPLATES[case]
    prompt = list((end if end != "</think>" else "<think>\n").encode())
    assert thinking_of(Tokenizer(Bytes(template)), [65, *prompt]) == thinking


def test_ids_that_are_no_tokens_are_left_to_the_engine() -> None:
    with served(template=OPENS) as inside:
        error = inside.post("chat/completions", prompt_token_ids=[97, 999]).json()["error"]
        assert error["param"] == "prompt_token_ids" and "token ids must be from 0" in error["message"]


OPENS, SPEAKS = "{{ messages }}<think>\n", "{{ messages }}</think>"
PART = {"type": "reasoning_text", "text": "plan"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def ask(inside: Inside, text: str, **more: Any) -> dict[str, Any]:
    """The message of a chat, which is the same as a stream."""
    body = {"messages": [{"role": "user", "content": "say:" + text}], "max_tokens": 300, **more}
    whole = inside.post("chat/completions", **body)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    (streamed,) = put_together(events_of(inside.post("chat/completions", **body, **STREAM)))["choices"]
    message, same = choice["message"], streamed["message"]
    assert (message["content"] or "") == (same["content"] or "")
    assert message.get("reasoning_content") == same.get("reasoning_content")
    assert len(message.get("tool_calls", ())) == len(same.get("tool_calls", ()))
    assert choice["finish_reason"] == streamed["finish_reason"]
    return {**message, "finish_reason": choice["finish_reason"]}


def test_a_chat_has_its_thinking_in_its_own_field() -> None:
    with served(template=OPENS) as inside:
        message = ask(inside, "plan</think>\n\nanswer")
        assert (message["reasoning_content"], message["content"]) == ("plan", "answer")
        message = ask(inside, "plan and more", max_tokens=4)
        assert (message["reasoning_content"], message["content"]) == ("plan", None)
        off = ask(inside, "answer", chat_template_kwargs={"enable_thinking": False})
        assert "reasoning_content" not in off and off["content"] == "answer"
    with served(template=SPEAKS) as inside:
        message = ask(inside, "<think>plan</think>answer")
        assert (message["reasoning_content"], message["content"]) == ("plan", "answer")
        assert "reasoning_content" not in ask(inside, "answer")
    with served() as inside:
        assert ask(inside, "<think>a</think>b")["content"] == "<think>a</think>b"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("template", [OPENS, HERMES + OPENS], ids=["generic", "Hermes"])
def test_a_call_inside_a_thinking_is_no_call(template: str, choice: str) -> None:
    """In the forms of all templates; the grammar of a forced call begins after it, too."""
    call = CALL if choice == "auto" else f"[{JSON}]"
    with served(template=template) as inside:
        message = ask(inside, f"or {CALL}</think>{call}", tools=TOOLS, tool_choice=choice)
        assert message["reasoning_content"] == f"or {CALL}" and message["finish_reason"] == "tool_calls"
        assert len(message["tool_calls"]) == 1 and not message["content"]


@pytest.mark.parametrize(
    ("template", "thinking"), [(OPENS, OPENED), (SPEAKS, OWN), ("{{ messages }}", None)], ids=str
)
def test_the_engine_is_told_where_form_and_stops_begin(template: str, thinking: Thinking | None) -> None:
    with (
        served(template=template) as inside,
        patch.object(inside.engine, "add_request", wraps=inside.engine.add_request) as add,
    ):
        ask(inside, "a</think>b", stop="STOP", response_format={"type": "json_object"})
    found = [call.args[1] for call in add.call_args_list]
    assert {params.thinking for params in found} == {thinking} and found[0].structured is not None


def test_usage_counts_the_tokens_of_a_thinking() -> None:
    """With its tags: here each character is a token."""
    body = {"messages": [{"role": "user", "content": "say:plan</think>\n\nyes"}], "max_tokens": 300}
    with served(template=OPENS) as inside:
        details = inside.post("chat/completions", **body).json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len("plan</think>\n\n")
        usage = inside.post("responses", input="say:plan</think>yes").json()["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len("plan</think>")


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("plan</think>answer", ["message"]),
        ("plan", []),
        (f"plan</think>a {CALL}", ["message", "function_call"]),
    ],
)
def test_a_response_has_its_thinking_as_an_item(text: str, types: list[str]) -> None:
    tools = [{"type": "function", "name": "f"}]
    body = {"input": "say:" + text, "max_output_tokens": 200, "tools": tools}
    with served(template=OPENS) as inside, OpenAI(base_url=inside.url + "/v1", api_key="x") as client:
        whole = inside.post("responses", **body).json()
        events = responses.events_of(inside, **body)
        assert responses.comparable(responses.check_adds_up(events)) == responses.comparable(whole)
        Response.model_validate(whole)
        reasoning, *rest = whole["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "plan"}]
        assert [item["type"] for item in rest] == types
        with client.responses.stream(model="scripted", **body) as stream:  # type: ignore[arg-type]
            types_of_events = {event.type for event in stream}
            assert "response.reasoning_text.done" in types_of_events and stream.get_final_response()
        again = [*whole["output"], {"role": "user", "content": "say:done"}]
        assert inside.post("responses", input=again, tools=tools).status_code == 200


def test_a_thinking_of_the_history_belongs_to_its_message() -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [PART]}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    empty = {"type": "reasoning", "id": "rs", "summary": []}
    for items, content, calls in (
        ([thought, {"role": "assistant", "content": "a"}], "a", 0),
        ([thought, called], None, 1),
        ([thought, {"role": "assistant", "content": "a"}, called], "a", 1),
        ([empty, {"role": "assistant", "content": "a"}], "a", 0),
    ):
        body = ResponseRequest.model_validate({"input": items})
        (message,) = as_chat(body).messages or []
        assert (message.content, len(message.tool_calls or ())) == (content, calls)
        assert (message.model_extra or {}).get("reasoning_content") == (None if items[0] is empty else "plan")


# tags that are special tokens

PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|x|>",
    "plan",
    "answer",
    JSON,
    " ",
    "<",
    ">",
    "think",
    "a",
    "aa",
)
SPECIAL = range(5)


class Special:
    """A tokenizer whose tags are special tokens."""

    chat_template = ""
    added_tokens_decoder = {i: SimpleNamespace(special=True) for i in SPECIAL}

    def __len__(self) -> int:
        return len(PIECES)

    def decode(self, ids: Seq[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return "".join(PIECES[i] for i in ids if not (skip_special_tokens and i in SPECIAL))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return PIECES.index(token) if token in PIECES else None

    def convert_ids_to_tokens(self, token: int) -> str:
        return PIECES[token]


def answer_of(pieces: list[str], parser: Any, ended: str | None = None, **params: Any) -> Any:
    """The message; `ended` is the stop string that ended it."""
    request = GenerationRequest(
        True, [[0]], SamplingParams(**params), RequestSpeculation(), "off", parser=parser
    )
    choice = Choice(0, request, Tokenizer(Special()), [0])
    events = [Event("r", 0, (PIECES.index(piece),)) for piece in pieces]
    parts = [choice.push(event) for event in [*events, Event("r", 0, (), finish=Finish("stop", ended))]]
    message = merge_deltas([delta for part in parts for delta in part.deltas])
    return message.get("reasoning_content"), message["content"], len(message.get("tool_calls", ()))


THOUGHT = partial(ThinkingParser, OWN, TaggedCallsParser)
MARKED: dict[str, tuple[Any, list[str], Any]] = {
    "a call": (TaggedCallsParser, ["<tool_call>", JSON, "</tool_call>"], (None, None, 1)),
    "no call": (TaggedCallsParser, ["plan", "<tool_call>", "answer", "<|x|>"], (None, "plananswer", 0)),
    "a thinking": (THOUGHT, ["<think>", "plan", "</think>", "answer"], ("plan", "answer", 0)),
    "both": (THOUGHT, [*"<think> plan <tool_call> </think> <tool_call>".split(), JSON], ("plan", None, 1)),
    "only text": (TextParser, ["<think>", "plan", "<|x|>", "answer"], (None, "plananswer", 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", MARKED)
def test_parsers_see_special_tokens_and_texts_do_not_show_them(case: str) -> None:
    parser, pieces, message = MARKED[case]
    assert answer_of(pieces, parser) == message


@pytest.mark.parametrize("size", range(1, 7))
def test_a_text_does_not_depend_on_how_many_tokens_an_event_has(size: int) -> None:
    """A tag that is spelled is no special token."""
    request = GenerationRequest(
        True, [[0]], SamplingParams(), RequestSpeculation(), "off", parser=TaggedCallsParser
    )
    tokens = [PIECES.index(piece) for piece in ("answer", "<", "think", ">", "plan", "<tool_call>", "answer")]
    choice, shown = Choice(0, request, Tokenizer(Special()), [0]), ""
    for at in range(0, len(tokens), size):
        shown += (
            merge_deltas(choice.push(Event("r", 0, tuple(tokens[at : at + size]))).deltas)["content"] or ""
        )
    end = choice.push(Event("r", 0, (), finish=Finish("stop"))).deltas
    assert shown + (merge_deltas(end)["content"] or "") == "answer<think>plananswer"


def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    pieces = ["plan", "<tool_call>", "answer", "<|x|>"]
    shown = answer_of(pieces, TaggedCallsParser, skip_special_tokens=False)
    assert shown == (None, "".join(pieces), 0)


CALLED = ["<tool_call>", JSON, " ", "</tool_call>"]
STOPPED: dict[str, tuple[str, list[str], Any]] = {
    "around a tag": ("nan", ["plan", "<tool_call>", "answer", " "], (None, "pla", 0)),
    "from a tag on": ("ans", ["plan", "<tool_call>", "answer"], (None, "plan", 0)),
    "as a tag's end": (">a", [">", "<tool_call>", "answer"], (None, "", 0)),
    "in a tag's name": ("ll", ["<tool_call>", "plan", "answer"], (None, "plananswer", 0)),
    "into a call": ("n{", ["plan", *CALLED], (None, "pla", 0)),
    "out of a call": ("  ", ["plan", *CALLED, " ", "answer"], (None, "plan", 1)),
    "a tag": ("</tool_call>", ["plan", *CALLED, "answer"], (None, "plan", 1)),
    "not over a thinking's end": ("na", ["<think>", "plan", "</think>", "answer"], ("plan", "answer", 0)),
    "not in a thinking": ("la", ["<think>", "plan", "</think>", "plan", "a"], ("plan", "p", 0)),
    "after a thinking's end": ("aa", ["<think>", "plan", "a", "</think>", "aa"], ("plana", None, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPPED)
def test_a_stop_string_is_found_in_the_text_that_the_client_sees(case: str) -> None:
    stop, pieces, message = STOPPED[case]
    thinking = OWN if "<think>" in pieces else None
    end = end_of(pieces, stop, thinking)
    parser, ended = THOUGHT if thinking else TaggedCallsParser, None if end is None else stop
    assert answer_of(pieces[:end], parser, ended, stop=stop, thinking=thinking) == message


def end_of(pieces: list[str], stop: str, thinking: Thinking | None) -> int | None:
    """How many tokens the engine leaves of these; None where it finds no stop string."""
    text = Tokenizer(Special())
    start = partial(AnswerStart, thinking, text) if thinking else None
    ending = Ending(frozenset(), 0, StopStrings([stop], text).find, start)
    seq: Any = SimpleNamespace(
        request=SimpleNamespace(ending=ending, prompt_len=0), tokens=[], num_output=0, answer=None
    )
    found = first_stop_string(seq, tuple(map(PIECES.index, pieces)))
    return None if found is None else found[0] + 1


def test_a_tag_stands_behind_an_unfinished_character() -> None:
    inner = AutoTokenizer.from_pretrained(DEMO)
    inner.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer = Tokenizer(inner)
    tags = special_tags(tokenizer, ["<think>", "</think>"])
    bytes_of_it, rest = tokenizer.encode("😀"), tokenizer.encode("b")
    for count in range(len(bytes_of_it)):
        stream = TaggedStream(Stream(tokenizer), tags)
        ids = [*bytes_of_it[:count], tags["</think>"], *rest]
        assert stream.push(ids) + stream.flush() == "\ufffd" * (count > 0) + "</think>b"
