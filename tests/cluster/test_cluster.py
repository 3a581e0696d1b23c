"""Two replicas of the demo on one machine: the official client, and processes that end or hang."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import httpx2 as httpx
import openai
import pytest

from tests.cluster.conftest import Cluster, children, ready, replica_processes, until
from tests.cluster.load import Case, client, stream, whole
from tests.server.outside import LOCAL_HTTP


@pytest.fixture(scope="module", autouse=True)
def two_replicas(cluster: Cluster) -> None:
    cluster.deploy(replicas=2, state=None)
    until(ready(cluster.url), 300)
    cluster.wait_for(2)


def test_the_official_client_streams_and_chats(cluster: Cluster, mixed: list[Case]) -> None:
    with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["demo"]
        case = mixed[0]
        chunks = list(api.completions.create(model="demo", prompt=case.prompt, stream=True, **case.options))
        assert "".join(chunk.choices[0].text for chunk in chunks) == case.text
        messages = [{"role": "user", "content": "Write a function."}]
        reply = api.chat.completions.create(
            model="demo",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=12,
            temperature=0,
        )
        parts = api.chat.completions.create(
            model="demo",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == reply.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="this server serves 'demo'"):
            api.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            api.completions.create(model="demo", prompt="x", max_tokens=10**6)


def test_mixed_requests_equal_their_solo_runs(cluster: Cluster, mixed: list[Case]) -> None:
    async def run() -> list[str]:
        limit = asyncio.Semaphore(32)

        async def one(number: int, case: Case) -> str:
            async with limit:
                return await (stream if number % 3 else whole)(api, case)

        async with client(cluster.url) as api:
            return await asyncio.gather(*(one(i, case) for i, case in enumerate(mixed)))

    texts = asyncio.run(run())
    assert texts == [case.text for case in mixed]
    until(lambda: all(cluster.metric("speculon_engine_requests_total").values()), 60)


def test_a_client_that_leaves_ends_its_request(cluster: Cluster, long: list[Case]) -> None:
    def open_requests() -> float:
        return sum(cluster.metric("speculon_requests_open").values())

    body = {"prompt": long[0].prompt, "stream": True, "max_tokens": 2000, "ignore_eos": True}
    url = cluster.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=30, **LOCAL_HTTP) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            next(lines)
        until(lambda: open_requests() == 1, 60)
    until(lambda: open_requests() == 0, 60)


SHORT_DRAFTS = {"speculation": {"num_speculative_tokens": 3}}  # or a known text ends within a second


def disturbed(
    cluster: Cluster, long: list[Case], victim: Callable[[], int], fault: signal.Signals
) -> tuple[list[str], int]:
    """The texts of 16 streams, 12 of which are in the middle when a process gets a signal; how many moved."""
    before = sum(cluster.metric("speculon_requests_moved_total").values())
    chunks: list[list[str]] = [[] for _ in long]

    async def run() -> list[str]:
        async with client(cluster.url) as api:
            tasks = [
                asyncio.create_task(stream(api, case, part, **(SHORT_DRAFTS if number % 8 else {})))
                for number, (case, part) in enumerate(zip(long, chunks, strict=True))
            ]

            def in_the_middle() -> int:
                return sum(
                    len(part) >= 3 and not task.done() for part, task in zip(chunks, tasks, strict=True)
                )

            while in_the_middle() < 12:
                ended = [task.result() for task in tasks if task.done()]
                assert len(ended) <= 4, "the others started too late"
                await asyncio.sleep(0.01)
            os.kill(victim(), fault)
            return await asyncio.gather(*tasks)

    texts = asyncio.run(run())
    return texts, int(sum(cluster.metric("speculon_requests_moved_total").values()) - before)


def running(cluster: Cluster) -> int:
    return [*cluster.engines().values()].count("RUNNING")


def a_replica() -> int:
    return replica_processes()[0]


def its_engine() -> int:
    return children(a_replica())[0]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param(its_engine, signal.SIGKILL, id="engine ends"),
        pytest.param(a_replica, signal.SIGKILL, id="replica ends"),
        pytest.param(its_engine, signal.SIGSTOP, id="engine hangs"),
        pytest.param(a_replica, signal.SIGSTOP, id="replica hangs", marks=pytest.mark.long),
    ],
)
def test_streams_survive(
    cluster: Cluster, long: list[Case], victim: Callable[[], int], number: signal.Signals
) -> None:
    old = set(replica_processes())
    texts, moved = disturbed(cluster, long, victim, number)
    assert texts == [case.text for case in long], "nothing is lost, nothing is doubled"
    assert 0 < moved < len(long), "some were on the other replica"
    seconds = until(lambda: running(cluster) == 2 and set(replica_processes()) - old, 300)
    until(lambda: len(cluster.metric("speculon_engine_restarts_total")) == 2, 60)
    print(f"the replica is back after {seconds:.1f} s; {moved} streams moved")


def test_metrics_of_all_replicas_are_in_one_scrape(cluster: Cluster, mixed: list[Case]) -> None:
    page = httpx.get(cluster.url + "/metrics", **LOCAL_HTTP).text
    lines = [line for line in page.splitlines() if line.startswith("speculon_kv_pages{")]
    assert len(lines) == 2 and len({line.partition('replica="')[2][:8] for line in lines}) == 2
    routed = cluster.metric("speculon_routed_requests_total")
    assert sum(routed.values()) > len(mixed) and routed["prefix",] > 0
