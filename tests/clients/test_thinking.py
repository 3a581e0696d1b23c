"""openai with a model that thinks before it answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .conftest import ROOT, served

MODEL = ROOT / "tests" / "models" / "demo"
# the demo model writes again what it has read three times
THOUGHT: list[Any] = [{"role": "user", "content": "<think>\nimport os\n</think>\nimport sys\n" * 3}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the demo model with a template that opens a thinking."""
    folder = tmp_path_factory.mktemp("models") / "thinking"
    shutil.copytree(MODEL, folder)
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "chat_template": fields["chat_template"] + "<think>\n"}))
    with served(str(folder), tmp_path_factory.mktemp("thinking"), "--no-warmup", "--method", "ngram") as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def both(client: openai.OpenAI, **given: Any) -> tuple[str, str]:
    """Thinking and answer of a chat, which are the same in a stream."""
    given = {"model": "thinking", "messages": THOUGHT, "temperature": 0, **given}
    message = client.chat.completions.create(**given).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**given, stream=True)]
    thinking = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    answer = "".join(delta.content or "" for delta in deltas)
    assert thinking == (getattr(message, "reasoning_content", None) or "")
    assert answer == (message.content or "")
    return thinking, answer


def test_a_thinking_is_a_field_of_its_own(client: openai.OpenAI) -> None:
    thinking, answer = both(client, max_tokens=40)
    assert thinking == "import os" and answer.startswith("import ")


def test_a_thinking_may_be_all_there_is_room_for(client: openai.OpenAI) -> None:
    assert both(client, max_tokens=2) == ("import", "")
