"""A published model, SmolLM2, with openai."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

MODEL = "smollm2"
CAPITAL: list[Any] = [{"role": "user", "content": "Complete: The capital of France is"}]  # no near-tie
GREEDY: dict[str, Any] = {"messages": CAPITAL, "temperature": 0, "max_tokens": 12}
ADD = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture
def client(smollm2_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=smollm2_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_stream_is_the_whole_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, **GREEDY).choices[0].message.content
    chunks = client.chat.completions.create(model=MODEL, **GREEDY, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert whole and "Paris" in whole


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": ADD}}
    messages: Any = [{"role": "user", "content": "Add 7 and 12."}]
    message = (
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=[tool],
            tool_choice="required",
            temperature=0,
            max_tokens=200,
        )
        .choices[0]
        .message
    )
    for call in message.tool_calls or [None]:
        assert call.function.name == "add" and json.loads(call.function.arguments).keys() == {"a", "b"}
