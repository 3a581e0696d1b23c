"""The official client against the real server: structured output, tool calls, predictions."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.server.test_openai import ASK, chat, spec
from tests.server.test_tool_schemas import TWELVE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "birth", "description": "A birth", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
FORMED = {"max_tokens": 200, "seed": 5, "temperature": 0.8}


def test_a_text_follows_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = chat(client, **FORMED, response_format=form, stream=True)
    person = json.loads("".join(chunk.choices[0].delta.content or "" for chunk in answer))
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99


def test_a_text_is_a_json_object(client: openai.OpenAI) -> None:
    choice = chat(
        client, max_tokens=200, seed=1, temperature=0.5, response_format={"type": "json_object"}
    ).choices[0]
    text = choice.message.content
    assert text.lstrip().startswith("{") and (
        choice.finish_reason == "length" or isinstance(json.loads(text), dict)
    )
    assert chat(client, temperature=0, response_format={"type": "text"}).choices[0].finish_reason == "length"


def test_tools_that_are_required(client: openai.OpenAI) -> None:
    answer = chat(client, **FORMED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.id.startswith("call_") and call.function.name in ("birth", "now")
    assert isinstance(json.loads(call.function.arguments), dict)


def test_a_tool_that_is_named(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "birth"}}
    (choice,) = chat(client, **FORMED, tools=TOOLS, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("birth", "tool_calls")
    assert set(json.loads(call.function.arguments)) == {"name", "age"}


def test_tools_that_may_not_be_used(client: openai.OpenAI) -> None:
    assert chat(client, tools=TOOLS, tool_choice="none", temperature=0).choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}})
    assert caught.value.param == "tool_choice.function.name"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_call_that_the_model_begins_follows_its_schema(client: openai.OpenAI, stream: bool) -> None:
    """The demo model begins one only if it is made to prefer the tag to a JSON object."""
    prefer = {"logit_bias": {str(tokens_of(client, "<")[0]): 50}, "response_format": {"type": "json_object"}}
    more = {**FORMED, **prefer, "tools": TOOLS, "parallel_tool_calls": False}
    answer = chat(client, **more, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        name, arguments = calls[0].function.name, "".join(call.function.arguments for call in calls)
        reason = chunks[-1].finish_reason
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        (call,) = message.tool_calls
        name, arguments, content = call.function.name, call.function.arguments, message.content or ""
    assert (reason, content) == ("tool_calls", "")
    assert set(json.loads(arguments)) == {"birth": {"name", "age"}, "now": set()}[name]


def tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    url = str(client.base_url).replace("/v1/", "/tokenize")
    tokens: list[int] = httpx.post(url, json={"prompt": text}).json()["tokens"]
    return tokens


def test_text_is_the_same_with_tools_that_are_not_called(client: openai.OpenAI) -> None:
    plain = chat(client, tools=TOOLS, temperature=0, **spec(method="off")).choices[0]
    for way in ({}, spec(method="ngram", num_speculative_tokens=8)):
        drafted = chat(client, tools=TOOLS, tool_choice="auto", temperature=0, **way).choices[0]
        assert (drafted.message.content, drafted.finish_reason) == (plain.message.content, "length")
        assert drafted.message.tool_calls is None


def test_a_tool_answers_and_the_chat_goes_on(client: openai.OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    assert chat(client, messages=messages, temperature=0).choices[0].message.content


def test_a_prediction_is_accepted_or_rejected(client: openai.OpenAI) -> None:
    ask = {"temperature": 0, "max_tokens": 60}
    plain = chat(client, **ask)
    text = plain.choices[0].message.content
    right = chat(client, **ask, prediction={"type": "content", "content": text})
    assert right.choices[0].message.content == text
    accepted = right.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted > plain.usage.completion_tokens * 0.6
    wrong = chat(
        client, **ask, prediction={"type": "content", "content": [{"type": "text", "text": "xyz " * 40}]}
    )
    assert wrong.choices[0].message.content == text
    details = wrong.usage.completion_tokens_details
    assert details.accepted_prediction_tokens < accepted / 4 and details.rejected_prediction_tokens >= 0
    details = plain.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0


def test_a_tool_that_no_call_fits_is_refused_where_it_is_forced(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})
    assert refusal.value.param == "tools" and "llguidance" not in refusal.value.message, refusal.value
    assert chat(client, tools=[*TOOLS, tool], temperature=0).choices[0].message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_odd_schemas_of_other_tools_refuse_no_chat(client: openai.OpenAI, choice: Any) -> None:
    answer = chat(client, **FORMED, tools=[*TOOLS, *TWELVE], tool_choice=choice).choices[0]
    assert choice == "auto" or answer.message.tool_calls
