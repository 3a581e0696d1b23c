"""Simon Willison's `llm`: the command and the library, with a model that a YAML file adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import llm
import pytest

from .forms import Person

MODEL = "speculon-demo"


@pytest.fixture(autouse=True)
def folder(base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its settings, apart from the user's."""
    fields = [
        ("model_id", MODEL),
        ("model_name", "demo"),
        ("api_base", base_url),
        ("supports_schema", "true"),
    ]
    lines = "\n  ".join(f"{name}: {value}" for name, value in fields)
    (tmp_path / "extra-openai-models.yaml").write_text(f"- {lines}\n")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, env=os.environ, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_streams_and_logs() -> None:
    options = ("-o", "max_tokens", "16", "-o", "temperature", "0")
    streamed = command("-m", MODEL, "Add two numbers.", *options)
    assert streamed.strip() and streamed == command("-m", MODEL, "Add two numbers.", "--no-stream", *options)
    logs = json.loads(command("logs", "--json"))
    assert [log["model"] for log in logs] == [MODEL] * 2 and logs[0]["response"]


def test_the_library() -> None:
    model = llm.get_model(MODEL)
    answer = model.prompt("Add two numbers.", max_tokens=16, temperature=0)
    whole = model.prompt("Add two numbers.", max_tokens=16, temperature=0, stream=False)
    assert answer.text() == whole.text()
    assert answer.usage().output == 16


def test_a_conversation_goes_on() -> None:
    conversation = llm.get_model(MODEL).conversation()
    for question in ("Add two numbers.", "Now three."):
        assert conversation.prompt(question, max_tokens=8, temperature=0).text()
    assert len(conversation.responses) == 2


def test_a_schema() -> None:
    answer = llm.get_model(MODEL).prompt("A person.", schema=Person, max_tokens=200, temperature=0.8, seed=5)
    assert Person.model_validate_json(answer.text())
