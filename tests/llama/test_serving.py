"""A server over runtime llama, as users start it: chats, structured answers, and faults of native code."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.outside import LOCAL_HTTP, REAL, Outside, started

pytestmark = pytest.mark.timeout(300)
QUESTION = "What is the capital of France? Answer in one short sentence."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[Outside]:
    options = ("--model", "smollm2", "--runtime", "llama", "--threads", "1", "--max-context", "2048")
    options += ("--max-num-seqs", "4", "--restart-engine")
    paths, folder = os.environ["PYTHONPATH"], tmp_path_factory.mktemp("server")
    with started(folder, *options, program=REAL, PYTHONPATH=paths) as server:
        server.ready()
        yield server


def post(server: Outside, path: str = "chat/completions", **body: Any) -> httpx.Response:
    if path == "chat/completions":
        body.setdefault("messages", [{"role": "user", "content": QUESTION}])
    return httpx.post(f"{server.url()}/v1/{path}", json={"max_tokens": 24, **body}, timeout=120, **LOCAL_HTTP)


def test_the_start_says_what_runs_it(server: Outside) -> None:
    assert "smollm2 runs on llama" in server.stderr


def test_a_chat(server: Outside) -> None:
    answer = post(server, temperature=0, speculation={"stats": True}).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["speculation"]["target_calls"] > 0


def test_log_probabilities_are_those_of_the_tokens(server: Outside) -> None:
    tokens = post(server, temperature=0, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert all(token["logprob"] < 0 for token in tokens) and len(tokens) > 3
    assert all(token["logprob"] == max(one["logprob"] for one in token["top_logprobs"]) for token in tokens)


def test_a_structured_answer(server: Outside) -> None:
    city = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    content = post(server, response_format=form).json()["choices"][0]["message"]["content"]
    assert '"city"' in content


def test_a_prompt_beyond_the_context(server: Outside) -> None:
    refused = post(server, messages=[{"role": "user", "content": "word " * 10_000}])
    assert refused.status_code == 400 and "2048" in refused.text


def test_predicted_output_is_drafted(server: Outside) -> None:
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
    messages = [{"role": "user", "content": f"Repeat this code exactly:\n{code}"}]
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 40}
    predicted = {"type": "content", "content": code}
    speculation = {"stats": True, "policy": "fixed"}
    drafted = post(server, **body, prediction=predicted, speculation=speculation).json()
    plain = post(server, **body, speculation={"method": "off", "stats": True}).json()
    for answer in (drafted, plain):  # they may part at a near-tie: rows of a draft are computed together
        assert "def add" in answer["choices"][0]["message"]["content"]
    assert drafted["speculation"]["accepted"] > 0


def test_a_killed_engine_is_started_again(server: Outside) -> None:
    (engine,) = server.children()
    os.kill(engine, signal.SIGKILL)
    server.wait_for(lambda: server.children() not in ([engine], []))
    server.ready()
    assert "Paris" in post(server, temperature=0).json()["choices"][0]["message"]["content"]
    assert "the engine's process has ended by SIGKILL; it is started again" in server.stderr
