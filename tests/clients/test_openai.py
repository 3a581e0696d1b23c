"""openai, of the release that other clients are built on: chat, completions, and the responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .forms import ASK, FORMED

QUESTION = "Write a function that adds two numbers."


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_address_comes_from_the_environment(
    base_url: str, only_this_machine_is_contacted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with openai.OpenAI(max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        answer = client.chat.completions.create(model="demo", messages=ASK, max_tokens=8)
    assert answer.choices[0].message.content
    assert only_this_machine_is_contacted == {"127.0.0.1"}, "what is contacted is noticed"


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    given = {"model": "demo", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    events = list(client.responses.create(**given, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    answer = client.responses.create(**given)
    assert answer.object == "response" and text == answer.output_text
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 16


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_a_tool_is_called_and_its_result_is_read(client: openai.OpenAI, choice: Any) -> None:
    given = {"model": "demo", "tools": [ADD], "parallel_tool_calls": False, **FORMED}
    message = client.chat.completions.create(**given, messages=ASK, tool_choice=choice).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    messages = [*ASK, message, result]
    answer = client.chat.completions.create(**given, messages=messages, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None and answer.message.content


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    given = {"model": "demo", "messages": ASK, "tools": [ADD], "tool_choice": "required", **FORMED}
    whole = client.chat.completions.create(**given).choices[0].message.tool_calls
    with client.chat.completions.stream(**given) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in streamed] == [
        (one.function.name, one.function.arguments) for one in whole
    ]


def test_usage_so_far_is_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="demo", prompt="def add(", max_tokens=9, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-2:] == [counts[-1]] * 2 and 0 < counts[-1] <= 9
