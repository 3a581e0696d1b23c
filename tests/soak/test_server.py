"""The real server under 32 clients who differ in everything: each is answered, refused or gone; nothing
leaks, nothing grows.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recipes.serving.server import Refused, Server, chunks

from speculon import LLM
from speculon.measure.bench.workloads import Size, build
from tests.server.outside import resident

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

CLIENTS = 32
SECONDS = (30, 90, 150)  # after which memory is read; a minute of traffic before them is not watched
SHAPES = range(
    1,
    300,
    # rows of a step: oneDNN keeps what it compiles for the last 1024 shapes of a product, of which each has
    # four
)
PAGES = 768  # so few that all are touched in the first minute: only then is growth a leak
GONE = 0.1  # of the clients' requests, left in the middle
SPOILED = 0.05
GROWTH = 1.05  # of memory between the first and the last of them


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", threads=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model", "demo", "--threads", "1", "--num-blocks", str(PAGES))
    with Server(*flags, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def random_body(chance: random.Random, prompts: list[list[int]]) -> dict[str, Any]:
    """A completion that differs from the others in length, method, K, sampling and what it wants to know."""
    prompt = chance.choice(prompts)[: chance.choice([1, 10, 60, 250])]
    body: dict[str, Any] = {
        "prompt": [*prompt, *chance.sample(range(100, 1000), chance.randrange(8))],
        "max_tokens": chance.choice([1, 5, 20, 60, 120]),
        "temperature": chance.choice([0, 0, 0.7, 1.0]),
        "stream_options": {"include_usage": True},
        "speculation": {
            "method": chance.choice(["off", "ngram", "draft_model", "auto"]),
            "num_speculative_tokens": chance.choice([0, 1, 2, 4, 8, 16]),
            "policy": chance.choice(["fixed", "goodput"]),
            "stats": True,
        },
    }
    some: dict[str, Any] = {
        "stop": chance.choice(["\n\n", ["return", "):"], "self."]),
        "logprobs": chance.randrange(5),
        "echo": True,
        "n": chance.choice([2, 3]),
        "seed": chance.randrange(1000),
        "top_p": chance.uniform(0.3, 1),
        "top_k": chance.randrange(1, 50),
        "frequency_penalty": chance.uniform(-0.5, 1),
        "ignore_eos": True,
    }
    return body | {name: value for name, value in some.items() if chance.random() < 0.2}


def spoiled(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    wrong = [
        {"prompt": [1] * 3000},
        {"temperature": -1},
        {"speculation": {"method": "nonsense"}},
        {"max_tokens": 5000},
    ]
    return body | chance.choice(wrong)


async def warm(port: int, chance: random.Random) -> None:
    """Steps of many sizes, so that what is kept for each is there before memory is looked at."""
    for rows in SHAPES:
        prompt = [chance.randrange(100, 4000) for _ in range(rows)]
        async for _ in chunks(
            port, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "speculation": {"method": "off"}}
        ):
            pass


class Traffic:
    """Clients that ask, one request after the other; `ends` counts how theirs ended."""

    def __init__(self, port: int, prompts: list[list[int]]):
        self.port, self.prompts = port, prompts
        self.ends: Counter[str] = Counter()
        self.chance = random.Random(0)

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self.client(until))

    async def client(self, until: float) -> None:
        chance = random.Random(self.chance.random())
        while time.monotonic() < until:
            body = random_body(chance, self.prompts)
            if chance.random() < SPOILED:
                await self.refused(spoiled(body, chance))
            else:
                await self.answered(
                    body, leaves_after=chance.randrange(5) if chance.random() < GONE else None
                )

    async def refused(self, body: dict[str, Any]) -> None:
        with pytest.raises(Refused) as refusal:
            async for _ in chunks(self.port, "/v1/completions", body):
                pass
        assert refusal.value.status == 400, refusal.value
        self.ends["refused"] += 1

    async def answered(self, body: dict[str, Any], leaves_after: int | None) -> None:
        finished: Counter[str] = Counter()
        last: dict[str, Any] = {}
        heard = 0
        async with aclosing(chunks(self.port, "/v1/completions", body)) as stream:
            async for content in stream:
                heard += 1
                if heard == leaves_after:
                    self.ends["gone"] += 1
                    return
                last = json.loads(content)
                assert "error" not in last, last
                finished.update(one["finish_reason"] for one in last["choices"] if one["finish_reason"])
        assert finished.total() == body.get("n", 1) and set(finished) <= {"stop", "length"}, finished
        assert 0 <= last["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)
        self.ends.update(finished)


async def at_rest(server: Server, checks: float) -> dict[str, float]:
    """The metrics once nobody is served and the pool has been checked more than `checks` times."""
    for _ in range(300):
        await asyncio.sleep(0.1)
        found = server.metrics()
        if not found["speculon_requests_open"] and found["speculon_integrity_checks_total"] > checks:
            return found
    raise AssertionError(f"no rest: {found}")


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_traffic_for_minutes(server: Server, llm: LLM) -> None:
    prompts = [case.prompt for case in build("code", llm.tokenizer, Size(16, 128, 2048))]
    pids = server.pids
    memory: list[dict[str, int]] = []

    async def watch() -> None:
        for pause in (after - before for before, after in pairwise((0, *SECONDS))):
            await asyncio.sleep(pause)
            memory.append({name: resident(pid) for name, pid in pids.items()})

    async def soak() -> dict[str, float]:
        await warm(server.port, random.Random(0))
        await traffic.run(seconds=60)  # the shapes of drafting, too
        traffic.ends.clear()
        checks = server.metrics()["speculon_integrity_checks_total"]
        watching = asyncio.create_task(watch())
        await traffic.run(seconds=SECONDS[-1])
        await watching
        return await at_rest(server, checks)

    traffic = Traffic(server.port, prompts)
    rest = asyncio.run(soak())
    print(f"\n{dict(traffic.ends)}, resident {memory}")
    assert min(traffic.ends[how] for how in ("stop", "length", "gone", "refused")) > 10, traffic.ends
    assert (
        rest["speculon_kv_pages_held"]
        == rest["speculon_sequences_running"]
        == rest["speculon_sequences_waiting"]
        == 0
    )
    faults = {name: value for name, value in rest.items() if 'status="5' in name and "completions" in name}
    assert not any(faults.values()), faults
    assert rest['speculon_requests_total{finish="abort"}'] > 10
    assert rest["speculon_accepted_tokens_total"] > 100 and rest["speculon_prompt_tokens_cached_total"] > 100
    for name, first in memory[0].items():
        assert memory[-1][name] < GROWTH * first, (name, memory)
    assert "Traceback" not in server.log.read_text()
