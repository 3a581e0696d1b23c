"""32 clients of mixed kinds while the engine is stopped, continued, killed and started again.

`SPECULON_CHAOS_SECONDS=600 pytest tests/soak/test_chaos.py` runs it for ten minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from recipes.serving.server import Server, read_metrics

from tests.server.outside import resident

pytestmark = [
    pytest.mark.soak,
    pytest.mark.alone,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc"),
]

SECONDS = float(os.environ.get("SPECULON_CHAOS_SECONDS", 90))  # at least
CLIENTS, GONE = 32, 0.1
TIMEOUT = 3.0  # the server's engine_timeout
MINUTE = min(60.0, SECONDS / 2)  # or more: each has one round of faults
PATIENCE = 120.0  # seconds for an answer, over a restart of the engine
GROWTH = 1.1  # of memory, from the end of the first round of faults to the end
# How a request may be refused: the engine is lost or loads, or the queue is full.
REFUSALS = {(503, "not_ready"), (429, "queue_full")}

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
CODE = (
    "import os\n\ndef join(first, second):\n",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(",
)
CHAT = [{"role": "user", "content": "Write a Python function named `mean`."}]
KINDS: list[tuple[str, dict[str, Any]]] = [
    *(("completions", {"prompt": prompt, **GREEDY}) for prompt in CODE),
    ("completions", {"prompt": CODE[0], "seed": 7, "temperature": 0.8, "max_tokens": 60, "n": 2}),
    ("completions", {"prompt": CODE[1], **GREEDY, "max_tokens": 150, "stop": ["\n\n\n"]}),
    ("completions", {"prompt": list(CODE), **GREEDY, "logprobs": 2}),
    ("chat/completions", {"messages": CHAT, **GREEDY}),
    ("chat/completions", {"messages": CHAT, **GREEDY, "response_format": {"type": "json_object"}}),
    ("chat/completions", {"messages": CHAT, **GREEDY, "tools": [TOOL], "tool_choice": "required"}),
]
SPECULATION: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "off"},
    {"method": "suffix", "policy": "fixed"},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "ngram", "chained_drafts": True},
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    flags = ("--model", "demo", "--draft", "auto", "--threads", "1", "--num-blocks", "256")
    restarts = ("--restart-engine", "--engine-timeout", str(TIMEOUT), "--max-queue", "64")
    with Server(*flags, *restarts, log=tmp_path / "log") as server:
        yield server


def parts_of(choice: dict[str, Any]) -> list[Any]:
    """What has to be the same: text, tool calls without their random ids, and how it ended."""
    message = choice.get("message") or choice.get("delta") or {}
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [choice.get("text") or message.get("content") or "", calls, choice["finish_reason"]]


def merged(chunks: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """The choices of a stream, as those of a whole answer."""
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, calls, finish = parts_of(choice)
            whole = found.setdefault(choice["index"], ["", [], None])
            whole[0] += text
            for call in calls:
                if "name" in call:
                    whole[1].append(dict(call))
                else:
                    whole[1][-1]["arguments"] += call["arguments"]
            whole[2] = finish or whole[2]
    return found


class Chaos:
    """Clients and faults; `ends` counts how requests ended, `wrong` has what should never be."""

    def __init__(self, server: Server):
        self.server = server
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.memory: list[int] = []
        self.truth: dict[int, dict[int, list[Any]]] = {}
        self.over = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=PATIENCE, limits=limits, trust_env=False
        ) as http:
            for number, (route, body) in enumerate(KINDS):
                body = {**body, "speculation": {"method": "off"}}
                answer = (await http.post(f"/v1/{route}", json=body)).raise_for_status().json()
                self.truth[number] = {choice["index"]: parts_of(choice) for choice in answer["choices"]}
            async with asyncio.TaskGroup() as group:
                for i in range(CLIENTS):
                    group.create_task(self.client(http, i))
                await self.trouble(http)

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        while not self.over:
            which = chance.randrange(len(KINDS))
            route, body = KINDS[which]
            if chosen := chance.choice(SPECULATION):
                body = {**body, "speculation": chosen}
            stay = chance.uniform(0, 0.5) if chance.random() < GONE else PATIENCE
            try:
                async with asyncio.timeout(stay):
                    await self.ask(http, which, route, {**body, "stream": chance.random() < 0.5})
            except TimeoutError:
                self.ends["gone" if stay < PATIENCE else "unanswered"] += 1
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
            await asyncio.sleep(chance.uniform(0, 0.05))

    async def ask(self, http: httpx.AsyncClient, which: int, route: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", f"/v1/{route}", json=body) as response:
            content = (await response.aread()).decode()
        if response.status_code != 200:
            self.refused(response.status_code, json.loads(content))
            await asyncio.sleep(0.5)
        elif not body["stream"]:
            self.compare(
                which, {choice["index"]: parts_of(choice) for choice in json.loads(content)["choices"]}
            )
        else:
            lines = [line.removeprefix("data: ") for line in content.splitlines() if line]
            chunks = [json.loads(line) for line in lines if line != "[DONE]"]
            if "error" in chunks[-1]:
                self.refused(503, chunks[-1])
            else:
                self.compare(which, merged(chunks))

    def refused(self, status: int, body: dict[str, Any]) -> None:
        known = (status, body["error"]["code"]) in REFUSALS and body["error"]["message"]
        self.ends["refused"] += 1
        if not known:
            self.wrong.append((status, body))

    def compare(self, which: int, found: dict[int, list[Any]]) -> None:
        self.ends["answered"] += 1
        if found != self.truth[which]:
            self.wrong.append((KINDS[which], found, self.truth[which]))

    async def trouble(self, http: httpx.AsyncClient) -> None:
        """Each minute: stopped and continued, stopped for good, killed."""
        for _ in range(round(SECONDS / MINUTE)):
            began = time.monotonic()
            self.signal(signal.SIGSTOP, "stopped")
            await asyncio.sleep(TIMEOUT / 2)
            self.signal(signal.SIGCONT, "continued")
            await asyncio.sleep(MINUTE / 10)
            self.signal(signal.SIGSTOP, "stopped for good")
            await self.restarted(http)
            await asyncio.sleep(MINUTE / 10)
            self.signal(signal.SIGKILL, "killed")
            await self.restarted(http)
            await asyncio.sleep(max(0.0, MINUTE - (time.monotonic() - began)))
            self.memory.append(resident(self.server.process.pid))
        self.over = True

    def signal(self, number: signal.Signals, name: str) -> None:
        os.kill(self.server.pids["engine"], number)
        self.faults[name] += 1

    async def restarted(self, http: httpx.AsyncClient) -> None:
        """Once another process serves, as often as one was lost."""
        lost = self.faults["stopped for good"] + self.faults["killed"]
        async with asyncio.timeout(PATIENCE):
            while (
                restarts(await http.get("/metrics")) < lost or (await http.get("/ready")).status_code != 200
            ):
                await asyncio.sleep(0.1)


def restarts(page: httpx.Response) -> float:
    return read_metrics(page.text)["speculon_engine_restarts_total"]


def test_every_request_is_answered_rightly_or_refused_by_name(server: Server) -> None:
    chaos = Chaos(server)
    asyncio.run(chaos.run())
    print(
        f"\n{dict(chaos.ends)}, {dict(chaos.faults)}, resident {[size // 2**20 for size in chaos.memory]} MB"
    )
    assert not chaos.wrong, chaos.wrong[:3]
    # none has to be refused: those in hand are resumed, and others wait for the next engine
    assert min(chaos.ends["answered"], chaos.ends["gone"]) > 10 and not chaos.ends["unanswered"]
    assert server.metrics()["speculon_requests_resumed_total"] > 0
    assert len(chaos.faults) == 4 and min(chaos.faults.values()) >= 2, chaos.faults
    end = time.monotonic() + 30
    while (rest := server.metrics())["speculon_requests_open"] or rest["speculon_kv_pages_held"]:
        assert time.monotonic() < end, rest
        time.sleep(0.2)
    assert chaos.memory[-1] < GROWTH * chaos.memory[0], chaos.memory
