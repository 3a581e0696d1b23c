"""litellm: whole, streamed and asynchronous."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from .forms import ASK


@pytest.fixture
def given(base_url: str) -> dict[str, Any]:
    place = {"model": "openai/demo", "api_base": base_url, "api_key": "none"}
    return {**place, "messages": ASK, "max_tokens": 16, "temperature": 0}


def test_completion(given: dict[str, Any]) -> None:
    answer = litellm.completion(**given)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_a_stream_is_the_whole_text(given: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == litellm.completion(**given).choices[0].message.content
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [16]


def test_acompletion(given: dict[str, Any]) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**given) for _ in range(4)))

    answers = {answer.choices[0].message.content for answer in asyncio.run(ask())}
    assert answers == {litellm.completion(**given).choices[0].message.content}


def test_text_completion(given: dict[str, Any]) -> None:
    fields = {**given, "model": "text-completion-openai/demo", "prompt": "def add(a, b):\n"}
    del fields["messages"]
    assert litellm.text_completion(**fields).choices[0].text


def test_a_refusal_names_the_field(given: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**given, top_p=7)


def test_hints_for_caches_change_nothing(given: dict[str, Any]) -> None:
    hint = {"type": "ephemeral"}
    part = {"type": "text", "text": ASK[0]["content"], "cache_control": hint}
    hinted = {**given, "messages": [{"role": "user", "content": [part]}]}
    plain = litellm.completion(**given).choices[0].message.content
    more = {"extra_body": {"cache_control": hint, "num_ctx": 2048, "cache_prompt": True}}
    assert litellm.completion(**hinted, **more).choices[0].message.content == plain
    chunks = litellm.completion(**hinted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain
