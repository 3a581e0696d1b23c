"""langchain-openai: messages, streams, batches from threads, structured answers and tools."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI

from .forms import FORMED, City, Person

QUESTION = "Write a function that adds two numbers."


def model(base_url: str, **fields: Any) -> ChatOpenAI:
    own = {"model": "demo", "api_key": "none", "max_tokens": 16, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=base_url, **{**own, **fields})


def test_a_stream_is_the_whole_text(base_url: str) -> None:
    chat = model(base_url)
    answer = chat.invoke(QUESTION)
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] == 16
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == answer.content


def test_a_batch_from_threads_has_each_ones_text(base_url: str) -> None:
    chat = model(base_url)
    questions = [f"{QUESTION} Call it add{n}." for n in range(8)]
    together = [answer.content for answer in chat.batch(questions)]
    assert together == [chat.invoke(question).content for question in questions]


def test_structured_output(base_url: str) -> None:
    form = model(base_url, **FORMED).with_structured_output(Person, method="json_schema")
    assert isinstance(form.invoke(QUESTION), Person)


def test_a_tool_is_called(base_url: str) -> None:
    answer = model(base_url, **FORMED).bind_tools([Person, City], tool_choice="any").invoke(QUESTION)
    assert answer.tool_calls and not answer.invalid_tool_calls
    for call in answer.tool_calls:
        assert {"Person": Person, "City": City}[call["name"]].model_validate(call["args"])


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}], ids=["by default", "auto"])
def test_a_tool_may_be_called(base_url: str, choice: dict[str, Any]) -> None:
    answer = model(base_url, **FORMED).bind_tools([Person, City], **choice).invoke(QUESTION)
    assert isinstance(answer, AIMessage) and not answer.invalid_tool_calls
    assert answer.content or answer.tool_calls
