"""Layers on RPC servers: the same text, and typed errors where llama.cpp would end the process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from speculon import LLM
from speculon.core.errors import ConfigError
from speculon.runtimes.llama import servers
from speculon.runtimes.llama.library import library
from tests.llama.conftest import TOY, Toy
from tests.llama.slow_link import SlowLink
from tests.llama.test_drafts import GREEDY, PLAIN, PROMPTS, check_drafts, texts
from tests.server.outside import LOCAL_HTTP, PATIENCE, REAL, Outside, started

LONG = 3000  # tokens, so that both streams run when the stage is killed
DELAY = 0.002  # seconds per direction of a slow link
TABLES = """
[models.split]
model = "{split}"
rpc = ["127.0.0.1:{port}"]

[models.local]
model = "{local}"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.llama.rpc_server", str(port)]
    child = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.fixture(autouse=True)
def needs_rpc() -> None:
    assert library().llama_supports_rpc(), "make llama builds it with GGML_RPC"


def test_layers_on_a_server_give_the_same_texts(toy: Toy) -> None:
    path, port = str(toy()), free_port()
    with LLM(path, tokenizer=None, **TOY) as llm:
        local = texts(llm, GREEDY, PLAIN)
    with serving(port), LLM(path, tokenizer=None, rpc=(f"127.0.0.1:{port}",), **TOY) as llm:
        assert texts(llm, GREEDY, PLAIN) == local
        check_drafts(llm)


@contextmanager
def two_stages() -> Iterator[list[SlowLink]]:
    """Two servers, each behind a slow link."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        for port in ports:
            stack.enter_context(serving(port))
        yield [stack.enter_context(closing(SlowLink(port, DELAY))) for port in ports]


def trips_and_calls(llm: LLM, links: list[SlowLink], speculation: Any = None) -> tuple[int, int]:
    """Round trips over all links, and calls of the target, for one text.

    It is written twice: at the first call of so many rows, llama.cpp asks the servers for sizes of tensors.
    """
    llm.generate([PROMPTS[0]], GREEDY, speculation=speculation)
    before, began = sum(link.round_trips for link in links), time.monotonic()
    (out,) = llm.generate([PROMPTS[0]], GREEDY, speculation=speculation)
    trips = sum(link.round_trips for link in links) - before
    assert len(out.token_ids) == GREEDY.max_tokens
    assert time.monotonic() - began >= trips * 2 * DELAY
    return trips, out.speculation.target_calls


def test_drafts_save_round_trips_over_slow_links(toy: Toy) -> None:
    """A call crosses each link once, whether it has one row or five."""
    path = str(toy(num_hidden_layers=4))
    with LLM(path, tokenizer=None, **TOY) as llm:
        local = texts(llm, GREEDY, PLAIN)
    right = {"method": "prediction", "policy": "fixed", "num_speculative_tokens": 4}
    with two_stages() as links:
        with LLM(path, tokenizer=None, rpc=tuple(link.address for link in links), **TOY) as llm:
            assert texts(llm, GREEDY, PLAIN) == local
            check_drafts(llm)
            trips, calls = trips_and_calls(llm, links, PLAIN)
            fewer_trips, fewer_calls = trips_and_calls(llm, links, {**right, "prediction": tuple(local[0])})
    assert calls == GREEDY.max_tokens and fewer_calls * 4 <= calls
    assert (trips, fewer_trips) == (2 * calls, 2 * fewer_calls)


def test_a_draft_model_is_computed_on_this_side_of_a_slow_link(toy: Toy) -> None:
    path = str(toy(num_hidden_layers=4))
    own = {"draft": path, "method": "draft_model", "policy": "fixed", "num_speculative_tokens": 4}
    with two_stages() as links:
        settings = {"rpc": tuple(link.address for link in links), "speculation": own, **TOY}
        with LLM(path, tokenizer=None, **settings) as llm:
            trips, calls = trips_and_calls(llm, links)
    assert calls * 4 <= GREEDY.max_tokens
    assert trips == 2 * calls


@pytest.mark.parametrize("endpoint", ["50052", "[::1]:50052", "host:0", "a:b"])
def test_an_address_that_llama_cpp_cannot_read(toy: Toy, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        LLM(str(toy()), rpc=(endpoint,), **TOY)


def test_nobody_is_there(toy: Toy) -> None:
    with pytest.raises(ConfigError, match="no RPC server of llama.cpp answers there"):
        LLM(str(toy()), rpc=(f"127.0.0.1:{free_port()}",), **TOY)


def test_a_server_that_is_busy_or_of_another_kind(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ConfigError, match="one client at a time"):
            LLM(str(toy()), rpc=(f"127.0.0.1:{silent.getsockname()[1]}",), **TOY)


def test_a_server_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with serving(port):
        monkeypatch.setattr(servers, "VERSION", (1, 0))
        with pytest.raises(ConfigError, match=r"its protocol is \d+\.\d+, that of this package 1\.0"):
            servers.greet("x", ("127.0.0.1", port))


def test_a_server_that_dies_ends_the_process_with_a_reason(toy: Toy) -> None:
    """In a process of its own, as the engine of a server is."""
    port = free_port()
    program = f"""
from speculon import LLM, SamplingParams
llm = LLM({str(toy())!r}, tokenizer=None, rpc=("127.0.0.1:{port}",), runtime="llama", warmup=False,
          max_num_seqs=1, max_context=256, repack=False)
print("loaded", flush=True)
input()
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
"""
    with serving(port) as server:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert child.stdout and child.stdout.readline() == b"loaded\n"
        server.kill()
        server.wait()
        _, said = child.communicate(b"\n", timeout=60)
    assert child.returncode < 0 and b"RPC server" in said


def body(model: str, max_tokens: int) -> dict[str, Any]:
    asked = {"model": model, "prompt_token_ids": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0}
    return {**asked, "ignore_eos": True, "speculation": PLAIN}


@contextmanager
def stream(server: Outside, model: str, max_tokens: int = LONG) -> Iterator[Iterator[dict[str, Any]]]:
    asked = {**body(model, max_tokens), "stream": True}
    url = server.url() + "/v1/completions"
    with httpx.stream("POST", url, json=asked, timeout=120, **LOCAL_HTTP) as response:
        assert response.status_code == 200, response.read()
        lines = (line.removeprefix("data: ") for line in response.iter_lines())
        yield (json.loads(line) for line in lines if line.startswith("{"))


def text_of(chunks: Iterator[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


@pytest.mark.timeout(300)
def test_a_stage_that_is_killed_costs_its_model_alone(toy: Toy, tmp_path: Path) -> None:
    """The stream ends with what to do, that of another model goes on, and the stage may come back."""
    port = free_port()
    local, split = (toy("llama", seed, max_position_embeddings=4096) for seed in (0, 1))
    (tmp_path / "speculon-models.toml").write_text(TABLES.format(split=split, local=local, port=port))
    options = "--runtime llama --threads 1 --max-context 4096 --max-num-seqs 1 --no-repack --memory-gb 4"
    options += " --kv-cache-type f32 --flash-attention off"
    with started(tmp_path, *options.split(), program=REAL, PYTHONPATH=os.environ["PYTHONPATH"]) as server:
        with serving(port) as stage:
            server.ready()
            with stream(server, "local") as chunks:
                alone = text_of(chunks)
            with stream(server, "split", 32) as chunks:
                before = text_of(chunks)
            with stream(server, "split") as broken, stream(server, "local") as untouched:
                first = [next(untouched) for _ in range(3)]
                next(broken)
                stage.kill()
                stage.wait()
                last = list(broken)[-1]
                assert text_of(iter(first)) + text_of(untouched) == alone
        assert last["error"]["type"] == "server_error"
        for told in (str(split), f"127.0.0.1:{port}", "start it there"):
            assert told in last["error"]["message"]
        with serving(port):
            ask = partial(httpx.post, server.url() + "/v1/completions", timeout=PATIENCE, **LOCAL_HTTP)
            # it may pause after a failed load
            while (answered := ask(json=body("split", 32))).status_code == 503:
                time.sleep(1)
            assert answered.json()["choices"][0]["text"] == before
