"""One real server for all tests of a process that need a model: a port, and the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.recording import read
from tests.server.outside import REAL, Outside, started

EVENTS = "events.jsonl"
LIMIT = 256  # tokens that a text may have there


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """`speculon serve` of the demo model; it has to end cleanly, too."""
    folder: Path = tmp_path_factory.mktemp("server")
    options = ("--threads", "1", "--policy", "fixed", "--max-request-tokens", str(LIMIT), "--events", EVENTS)
    with started(folder, "--model", "demo", *options, program=REAL) as server:
        url = server.ready()
        yield server
        body = {"model": "demo", "prompt": "1 2 3 1 2 3 1 2", "max_tokens": 8}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
        assert server.end() == 0, server.stderr
        recording = read(folder / EVENTS)
        assert recording.rounds and not recording.cut, "the record is whole at the end"
        assert "Traceback" not in server.stderr and "never retrieved" not in server.stderr, server.stderr


@pytest.fixture(scope="session")
def client(real: Outside) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url() + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
