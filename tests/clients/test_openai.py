"""openai, of the release that other clients are built on: chat, completions, and the responses API."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from .forms import ASK

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


def test_a_stream_is_the_whole_text(client: openai.OpenAI) -> None:
    def ask(**fields: bool):  # type: ignore[no-untyped-def]
        given = {"model": "demo", "prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0}
        return client.completions.create(**given, **fields)

    assert "".join(chunk.choices[0].text for chunk in ask(stream=True)) == ask().choices[0].text


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="demo", input=QUESTION, max_output_tokens=16, temperature=0)
    assert answer.object == "response" and answer.output_text
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 16


def test_streamed_responses(client: openai.OpenAI) -> None:
    given = {"model": "demo", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    events = list(client.responses.create(**given, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == client.responses.create(**given).output_text
