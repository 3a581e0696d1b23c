"""An answer that goes on from a text: its prompt ends with that text, and only the rest is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from speculon.core.config import Thinking
from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter
from speculon.decoding.text.deltas import ContinuedParser, TextParser, ThinkingParser, merge_deltas
from speculon.decoding.text.tool_calls import JsonCallsParser, TaggedCallsParser
from speculon.server.completions import read_chat
from speculon.server.pool.catalogue import Catalogue
from speculon.server.schemas import ChatRequest
from tests.server.inside import Inside, serving
from tests.server.templates import BRACKETS, CALLS, THINKING, TURNS, RenderedLoader, model_of
from tests.server.test_answers import events_of
from tests.server.test_conversations import TOOL, A, Q, calls, prompt, result, turn

GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with serving(Catalogue.of_one({"model": "scripted"}), RenderedLoader(THINKING)) as inside:
        yield inside


# the prompt


@pytest.mark.parametrize(
    "fields",
    [GOES_ON, {"continue_final_message": True}, {"continue_final_message": "content"}],
    ids=str,
)
def test_the_prompt_ends_with_the_text_of_the_last_message(fields: dict[str, Any]) -> None:
    assert (
        prompt(TURNS, [Q, turn("assistant", "The answer")], **fields) == "<user>q<end><assistant>The answer"
    )
    assert prompt(TURNS, [Q, turn("assistant", "a ")], **fields).endswith("<assistant>a ")
    assert prompt(BRACKETS, [Q, turn("assistant", "a ")], **fields).endswith("[/INST] a"), (
        "it is trimmed there"
    )
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "answer"}]
    assert prompt(TURNS, [Q, turn("assistant", parts)], **fields).endswith("<assistant>The answer")


def test_the_message_may_say_it_itself() -> None:
    """As Mistral's and DeepSeek's clients do."""
    assert prompt(TURNS, [Q, turn("assistant", "a", prefix=True)]).endswith("<assistant>a")
    assert prompt(TURNS, [Q, turn("assistant", "a", prefix=True), Q]).endswith("<user>q<end><assistant>")
    with pytest.raises(InvalidParameter, match=r"messages\.1\.prefix"):
        prompt(TURNS, [Q, turn("assistant", "a", prefix=True)], continue_final_message=False)


def test_without_it_the_last_message_is_a_whole_one() -> None:
    whole = "<user>q<end><assistant>a<end>"
    assert (
        prompt(TURNS, [Q, A]) == prompt(TURNS, [Q, A], continue_final_message=False) == whole + "<assistant>"
    )
    assert prompt(TURNS, [Q, A], add_generation_prompt=False) == whole


@pytest.mark.parametrize("text", ["", " \n", None])
def test_an_empty_message_is_where_an_answer_begins(text: str | None) -> None:
    for template in (TURNS, BRACKETS, THINKING):
        assert prompt(template, [Q, turn("assistant", text)], **GOES_ON) == prompt(template, [Q])


def test_neighbours_that_become_one_are_continued() -> None:
    text = prompt(BRACKETS, [Q, A, turn("assistant", "The")], **GOES_ON)
    assert text == "[INST] q [/INST] a\n\nThe"


def test_a_thinking_is_continued_where_there_is_no_more() -> None:
    thinking = turn("assistant", "", reasoning_content="Let me")
    for fields in (GOES_ON, {"continue_final_message": "reasoning_content"}):
        assert prompt(THINKING, [Q, thinking], **fields).endswith("<assistant><think>\nLet me")
    answer = {**thinking, "content": "The"}
    assert prompt(THINKING, [Q, answer], **GOES_ON).endswith("<think>\nLet me\n</think>\n\nThe")
    after = {"continue_final_message": "content"}
    assert prompt(THINKING, [Q, thinking], **after).endswith("<think>\nLet me\n</think>\n\n")


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "both": ([Q, A], {"add_generation_prompt": True}, "add_generation_prompt"),
    "a user": ([Q], {}, "must be the assistant's"),
    "a tool": ([Q, calls("{}"), result("r")], {}, "must be the assistant's"),
    "calls": ([Q, calls("{}")], {}, "send their results"),
    "a forced call": ([Q, A], {"tools": [TOOL], "tool_choice": "required"}, "forced tool call"),
    "no thinking": (
        [Q, turn("assistant", "", reasoning_content="x")],
        {},
        "cannot leave the last message open",
    ),
    "token ids": ([], {"messages": None, "prompt_token_ids": [1]}, "needs messages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_continued_is_refused_by_name(case: str) -> None:
    messages, fields, why = REFUSED[case]
    with pytest.raises(InvalidParameter, match=why) as refusal:
        body = {"messages": messages, "continue_final_message": True, **fields}
        read_chat(ChatRequest.model_validate(body), model_of(TURNS))
    assert refusal.value.name == "continue_final_message"


def test_a_template_that_rewrites_the_last_message_is_told(inside: Inside) -> None:
    shouting = TURNS.replace("m.content", "m.content | upper")
    with pytest.raises(InvalidParameter, match="cannot leave the last message open"):
        prompt(shouting, [Q, turn("assistant", "the")], **GOES_ON)


def test_a_continued_answer_is_not_captured(tmp_path: Path) -> None:
    """A line of a half answer and its rest would be two answers in a row."""
    model = replace(model_of(TURNS), config=ServeConfig(capture=tmp_path))
    for fields, kept in (({}, True), ({"continue_final_message": True}, False)):
        body = ChatRequest.model_validate({"messages": [Q, A], **fields})
        assert bool(read_chat(body, model).captured_prompts) == kept


# the reply


TEXTS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "text": ("The answer", " is 42", {"content": " is 42"}, False),
    "the beginning of no tag": ("a <", "b", {"content": "b"}, False),
    "more of no tag": ("a <tool_c", "ar", {"content": "ar"}, False),
    "the beginning of a tag": (
        "a <tool", '_call>{"name": "f", "arguments": {}}</tool_call>', {"content": None}, True,
    ),
    "a tag and no call": ("<tool_call>\n{", "no", {"content": "no"}, False),
    "a call": ("Well: ", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', {"content": None}, True),
    "a call before": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>', {"content": "\n"}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
@given(cuts=st.lists(st.integers(0, 80), max_size=6))
def test_what_is_new_is_shown_in_any_pieces(case: str, cuts: list[int]) -> None:
    begun, text, message, called = TEXTS[case]
    parser = ContinuedParser(begun, TaggedCallsParser)
    edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    merged = merge_deltas([delta for part in parts for delta in parser.push(part)] + parser.end(False))
    assert merged["content"] == message["content"] and parser.called == called
    assert len(merged.get("tool_calls", [])) == called


def test_a_text_goes_on_that_would_be_a_call_at_its_beginning() -> None:
    """Llama's calls are JSON at the beginning of a reply, and only there."""
    call = '{"name": "f", "parameters": {}}'
    assert ContinuedParser("As JSON: ", JsonCallsParser).push(call) == [{"content": call}]
    parser = ContinuedParser('{"na', JsonCallsParser)
    assert "tool_calls" in parser.push('me": "f", "parameters": {}}')[0] and parser.called


@pytest.mark.parametrize("step", [1, 3, 99])
def test_a_thinking_goes_on_and_ends(step: int) -> None:
    text = " see.\n</think>\n\nIt is 42"
    for begun in ("Let me ", "<think>\nLet me "):
        parser = ContinuedParser(begun, lambda: ThinkingParser(Thinking(opened=True), TextParser))
        deltas = [delta for i in range(0, len(text), step) for delta in parser.push(text[i : i + step])]
        message = merge_deltas(deltas + parser.end(False))
        assert (message["reasoning_content"], message["content"]) == (" see.", "It is 42")


# through the server


def test_the_answer_is_what_comes_after_the_text(inside: Inside) -> None:
    messages = [Q, turn("assistant", "say:more")]
    whole = inside.post("chat/completions", messages=messages, **GOES_ON)
    assert whole.json()["choices"][0]["message"] == {"role": "assistant", "content": "more"}, whole.text
    chunks = events_of(inside.post("chat/completions", messages=messages, stream=True, **GOES_ON))
    streamed = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
    assert streamed == "more"


def test_openais_client_continues_a_thinking(inside: Inside) -> None:
    client = OpenAI(base_url=f"{inside.url}/v1", api_key="none")
    last: Any = turn("assistant", "", reasoning_content="say:hm")
    answer = client.chat.completions.create(model="scripted", messages=[Q, last], extra_body=GOES_ON)  # type: ignore[list-item]
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", None)


def test_contradictory_fields_are_a_refusal_that_names_both(inside: Inside) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    response = inside.post("chat/completions", messages=[Q, A], **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "continue_final_message")
    assert "add_generation_prompt = True" in error["message"]


def test_tokenize_shows_the_prompt(inside: Inside) -> None:
    def text(**fields: Any) -> str:
        tokens = inside.client.post("/tokenize", json={"messages": [Q, A], **fields}).json()["tokens"]
        return bytes(tokens).decode()

    assert text(**GOES_ON).endswith("</think>\n\na")
    assert text().endswith("a<end><assistant><think>\n") and text(add_generation_prompt=False).endswith(
        "a<end>"
    )


def test_tools_stay_tools(inside: Inside) -> None:
    said = 'say:<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    with serving(Catalogue.of_one({"model": "scripted"}), RenderedLoader(CALLS)) as it:
        messages = [Q, turn("assistant", said)]
        (choice,) = it.post("chat/completions", messages=messages, tools=[TOOL], **GOES_ON).json()["choices"]
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    )
