"""Conversations as clients send them, under templates that take one form alone: written in that form, or
refused by the message that is wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from pydantic import ValidationError

from speculon.core.errors import InvalidParameter, InvalidRequest
from speculon.core.media.parts import IMAGE
from speculon.decoding.text.conversations import arguments_of
from speculon.server.completions import read_chat
from speculon.server.pool.catalogue import Catalogue
from speculon.server.responses import ResponseRequest, read_response
from speculon.server.schemas import ChatRequest
from tests.server.inside import serving
from tests.server.templates import (
    ALTERNATING,
    BRACKETS,
    CALLS,
    CONCATENATING,
    ITERATING,
    NO_SYSTEM,
    SYSTEM_FIRST,
    THINKING,
    TURNS,
    WITH_DOCUMENTS,
    WITH_TOOLS,
    RenderedLoader,
    model_of,
    tokenizer_of,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def turn(role: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*arguments: Any) -> dict[str, Any]:
    made = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": value}}
        for i, value in enumerate(arguments)
    ]
    return turn("assistant", None, tool_calls=made)


def result(text: str) -> dict[str, Any]:
    return turn("tool", text, tool_call_id="0")


def prompt(template: Any, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt of a chat, as text."""
    body = ChatRequest.model_validate({"messages": messages, **fields})
    return bytes(read_chat(body, model_of(template)).prompts[0]).decode()


def responses_prompt(template: Any, **fields: Any) -> str:
    body = ResponseRequest.model_validate(fields)
    return bytes(read_response(body, model_of(template)).prompts[0]).decode()


Q, A = turn("user", "q"), turn("assistant", "a")
PARTS = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]


# system messages


@pytest.mark.parametrize("template", [SYSTEM_FIRST, TURNS], ids=["one alone", "any"])
@pytest.mark.parametrize(
    ("opening", "system"),
    [
        ([turn("system", "x"), turn("developer", "y")], "x\n\ny"),
        ([turn("developer", "x"), turn("system", "y"), turn("system", "z")], "x\n\ny\n\nz"),
        ([turn("system", PARTS), turn("developer", PARTS)], "xy\n\nxy"),
        ([turn("system", ""), turn("developer", "y")], "y"),
        ([turn("developer", "x")], "x"),
    ],
    ids=str,
)
def test_system_messages_at_the_beginning_are_one(
    template: str, opening: list[dict[str, Any]], system: str
) -> None:
    expected = f"<system>{system}<end><user>q<end><assistant>"
    assert prompt(template, [*opening, Q]) == expected
    joined = tokenizer_of(template).render_chat([turn("developer", system), Q])
    assert joined == expected, "over the library"


def test_instructions_and_developer_items_are_one_system_message() -> None:
    items = [turn("developer", "y"), turn("system", [{"type": "input_text", "text": "z"}]), Q]
    expected = "<system>x\n\ny\n\nz<end><user>q<end><assistant>"
    assert responses_prompt(SYSTEM_FIRST, instructions="x", input=items) == expected
    assert responses_prompt(SYSTEM_FIRST, instructions="x", input="q") == expected.replace("\n\ny\n\nz", "")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_further_on_is_tried_and_else_told_by_name(role: str) -> None:
    messages = [turn("system", "x"), Q, A, turn(role, "late"), Q]
    assert "<system>late<end>" in prompt(TURNS, messages)
    with pytest.raises(
        InvalidParameter, match="must be at the beginning.*put it at the beginning"
    ) as refusal:
        prompt(SYSTEM_FIRST, messages)
    assert (refusal.value.name, refusal.value.value) == ("messages.3", {"role": role})
    assert refusal.value.for_log == "the chat template refuses these messages", "which may quote the client"
    with pytest.raises(InvalidParameter) as refusal:
        responses_prompt(SYSTEM_FIRST, instructions="x", input=[Q, A, turn(role, "late"), Q])
    assert refusal.value.name == "input.2"


def test_refusals_name_the_message_that_they_are_about() -> None:
    def refused(template: str, *messages: dict[str, Any], **fields: Any) -> str:
        with pytest.raises(InvalidRequest) as refusal:
            prompt(template, list(messages), **fields)
        return getattr(refusal.value, "name", "")

    late = turn("system", "late")
    assert refused(SYSTEM_FIRST, turn("system", "x"), turn("developer", "y"), Q, late, Q) == "messages.3"
    assert refused(SYSTEM_FIRST, Q, late, A, late, Q) == "messages.1", "the first of two"
    assert refused(SYSTEM_FIRST, Q, calls("{}"), result("r"), late, Q, tools=[TOOL]) == "messages.3"
    assert refused(NO_SYSTEM, turn("system", "x"), Q) == "messages.0"
    assert refused(NO_SYSTEM, Q, tools=[TOOL]) == "tools", "which are a system message there"
    assert refused(BRACKETS, turn("assistant", "hello"), Q) == "messages.0"
    whole = "{{ raise_exception('no question') if messages | length < 9 }}"
    assert refused(whole, Q, A, Q) == "", "it is about no message"


# turns that alternate


@pytest.mark.parametrize("template", [ALTERNATING, BRACKETS], ids=["Gemma", "Mistral"])
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["", "tools"])
def test_a_user_may_speak_after_a_tool(template: str, tools: list[Any]) -> None:
    answered = [Q, calls("{}"), result("1"), result("2"), turn("user", "next")]
    text = prompt(template, answered, tools=tools)
    assert "<tool_response>1</tool_response>\n<tool_response>2</tool_response>\n\nnext" in text
    again = prompt(template, [*answered, A, calls("{}"), result("3"), Q, Q], tools=tools)
    assert '\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>' in again, "an answer and its call are one"
    assert "<tool_response>3</tool_response>\n\nq\n\nq" in again


def test_neighbours_of_one_role_are_one_message_where_turns_alternate() -> None:
    messages = [turn("system", "s"), Q, turn("user", PARTS), A, turn("assistant", "b"), Q]
    assert prompt(ALTERNATING, messages) == "<user>sq\n\nxy<end><model>a\n\nb<end><user>q<end><model>"
    assert prompt(BRACKETS, messages) == "s[INST] q\n\nxy [/INST] a\n\nb</s>[INST] q [/INST]"
    assert prompt(TURNS, messages[1:3]) == "<user>q<end><user>xy<end><assistant>", "others get them as sent"
    assert prompt(TURNS, [Q, A, A]) == "<user>q<end><assistant>a<end><assistant>a<end><assistant>"


def test_images_keep_their_places_in_messages_that_become_one() -> None:
    """A tool's result, and then a user with parts."""
    messages = [Q, A, turn("user", "result"), turn("user", f"see {IMAGE} and {IMAGE}")]
    text = tokenizer_of(ALTERNATING).render_chat(messages, with_images="")
    assert text.endswith("<user>result\n\nsee <image> and <image><end><model>")


def test_messages_that_become_one_keep_their_calls_and_their_thinking() -> None:
    first = turn("assistant", "a", reasoning_content="why")
    second = {**calls('{"x": 1}'), "reasoning_content": "how"}
    strict = ITERATING.replace(
        "<{{ m.role }}>",
        "{% if m.role == messages[loop.index0 - 1].role and loop.index0 %}{{ raise_exception('twice') }}"
        "{% endif %}<{{ m.role }} {{ m.reasoning_content }}>",
    )
    text = prompt(strict, [Q, first, second, result("r")], tools=[TOOL])
    assert "<assistant why\n\nhow>a<tool_call>f(x=1;)</tool_call><end><tool >r" in text


# arguments of calls


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("", {}),
        (None, {}),
        ([], {}),
        ([1], {}),
        ("[1]", {}),
        ("null", {}),
        (5, {}),
        (False, {}),
        ('{"x": 1', {}),
        ("call me", {}),
        ("9" * 5000, {}),
        ("[" * 100_000, {}),
        ({"x": 1}, {"x": 1}),
        ('{"x": 1}', {"x": 1}),
        ('"{\\"x\\": 1}"', {"x": 1}),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("template", [ITERATING, CONCATENATING, TURNS], ids=["iterated", "a text", "generic"])
def test_arguments_of_earlier_calls_are_an_object(template: str, sent: Any, read: dict[str, Any]) -> None:
    assert arguments_of(sent) == read
    expected = {
        ITERATING: "f(x=1;)" if read else "f()",
        CONCATENATING: 'f({"x": 1})' if read else "f({})",
        TURNS: '"arguments":{"x":1}' if read else '"arguments":{}',
    }[template]
    assert expected in prompt(template, [Q, calls(sent), result("r")], tools=[TOOL])
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": sent}
    output = {"type": "function_call_output", "call_id": "1", "output": "r"}
    flat = [{"type": "function", "name": "f"}]
    assert expected in responses_prompt(template, input=[Q, item, output], tools=flat)


def test_a_call_of_a_custom_tool_has_its_text_as_the_input() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "é\n"}}
    history = [Q, turn("assistant", None, tool_calls=[call]), result("r")]
    assert 'f(input="é\\n";)' in prompt(ITERATING, history, tools=[TOOL])
    for damaged in ({"type": "custom"}, {"type": "custom", "custom": {"name": "f", "input": 1}}):
        with pytest.raises(ValidationError, match=r"tool_calls\.0"):
            prompt(TURNS, [Q, turn("assistant", None, tool_calls=[damaged]), result("r")])


def test_a_call_without_arguments_has_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f"}}
    assert "f()" in prompt(
        ITERATING, [Q, turn("assistant", None, tool_calls=[call]), result("r")], tools=[TOOL]
    )
    written = tokenizer_of(ITERATING).render_chat([Q, calls('{"x": 2}'), result("r")], [TOOL])
    assert "f(x=2;)" in written, "the library reads them, too"


# named templates

NAMED = {"default": TURNS, "tool_use": WITH_TOOLS, "rag": WITH_DOCUMENTS}
DOCUMENTS = [{"title": "t", "text": "x"}]


def test_a_named_template_is_chosen_by_what_a_chat_has() -> None:
    assert prompt(NAMED, [Q]) == prompt(NAMED, [Q], tools=[], documents=[]) == "<user>q<end><assistant>"
    assert prompt(NAMED, [Q], tools=[TOOL]) == prompt(WITH_TOOLS, [Q], tools=[TOOL])
    assert prompt(NAMED, [Q], tools=[TOOL]).startswith('TOOLS <tools>[{"type": "function"')
    assert prompt(NAMED, [Q], tools=[TOOL], tool_choice="none") == "<user>q<end><assistant>"
    assert prompt(NAMED, [Q], documents=DOCUMENTS) == "[t: x]<user>q<end><assistant>"
    assert responses_prompt(NAMED, input=[Q], tools=[{"type": "function", "name": "f"}]).startswith("TOOLS")


def test_a_named_template_also_says_how_calls_are_parsed() -> None:
    body = ChatRequest.model_validate({"messages": [Q], "tools": [TOOL]})
    assert read_chat(body, model_of(NAMED)).form is None, "in the model's own form, which is not constrained"
    unknown = {"default": TURNS, "tool_use": "{{ tools }} in an unknown form" + TURNS}
    assert read_chat(body, model_of(unknown)).form is not None
    assert "You can call these functions" in prompt(unknown, [Q], tools=[TOOL])
    assert "unknown form" not in prompt(unknown, [Q], tools=[TOOL])


def test_documents_need_a_template_that_shows_them() -> None:
    assert prompt(WITH_DOCUMENTS, [Q], documents=DOCUMENTS).startswith("[t: x]")
    for template in (TURNS, {"default": TURNS, "tool_use": CALLS}):
        with pytest.raises(InvalidParameter) as refusal:
            prompt(template, [Q], documents=DOCUMENTS)
        assert refusal.value.name == "documents"


def test_a_checkpoint_may_have_named_templates_alone() -> None:
    assert prompt({"tool_use": WITH_TOOLS}, [Q], tools=[TOOL]).startswith("TOOLS")
    with pytest.raises(InvalidRequest, match="templates only for tool_use"):
        prompt({"tool_use": WITH_TOOLS}, [Q])


def test_the_template_of_a_processor_may_be_named_too() -> None:
    text = tokenizer_of(TURNS).render_chat(
        [Q], [TOOL], with_images={"default": TURNS, "tool_use": WITH_TOOLS}
    )
    assert text.startswith("TOOLS")


# parts of answers


@pytest.mark.parametrize(
    "answer",
    [
        turn("assistant", [{"type": "refusal", "refusal": "No."}]),
        turn("assistant", None, refusal="No."),
        turn("assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}, *PARTS[:0],
                           {"type": "text", "text": "No."}]),
        turn("assistant", [{"type": "redacted_thinking", "data": "s"}, {"type": "text", "text": "No."}]),
        turn("assistant", [{"type": "thinking", "thinking": [], "closed": True},
                           {"type": "text", "text": "No.", "annotations": []}]),
    ],
    ids=["refusal", "a refused message", "thinking", "redacted", "closed"],
)  # fmt: skip
def test_an_answer_may_have_a_refusal_or_a_thinking(answer: dict[str, Any]) -> None:
    assert prompt(TURNS, [Q, answer, Q]) == "<user>q<end><assistant>No.<end><user>q<end><assistant>"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "reasoning": "hm"},
    ],
    ids=str,
)
def test_a_thinking_is_what_templates_show_as_such(part: dict[str, Any]) -> None:
    answer = turn("assistant", [part, {"type": "text", "text": "a"}])
    assert "<think>\nhm\n</think>\n\na<end>" in prompt(THINKING, [Q, answer, Q])


@pytest.mark.parametrize(
    "part", [{"type": "refusal", "refusal": "No."}, {"type": "thinking", "thinking": "x"}]
)
@pytest.mark.parametrize("role", ["user", "system"])
def test_only_answers_have_such_parts(part: dict[str, Any], role: str) -> None:
    with pytest.raises(InvalidParameter, match="only messages of the assistant") as refusal:
        prompt(TURNS, [turn(role, [part]), Q])
    assert refusal.value.name == "messages.0.content.0.type"


# through the server


def test_an_agents_conversation_is_answered_over_http() -> None:
    with serving(Catalogue.of_one({"model": "scripted"}), RenderedLoader(ALTERNATING)) as inside:
        client = OpenAI(base_url=f"{inside.url}/v1", api_key="none")
        messages: Any = [turn("developer", "x"), turn("system", "y"), Q, calls(""), result("1"), Q]
        answer = client.chat.completions.create(model="scripted", messages=messages, max_tokens=5)
        assert answer.choices[0].message.content == "abcde"
        bad = inside.post("chat/completions", messages=[Q, A, turn("system", "late"), Q])
        error = bad.json()["error"]
        assert bad.status_code == 400 and error["param"] == "messages.2" and "put it at" in error["message"]
