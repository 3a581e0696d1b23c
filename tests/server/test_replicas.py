"""Replicas as one engine, without Ray: real workers and pipes over scripted engines, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import pytest

from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import InvalidParameter, NotReady
from speculon.core.images import ImageInput
from speculon.engine.messages import Add, Admitted
from speculon.operations.cluster.engine import ReplicatedEngine
from speculon.operations.cluster.messages import FromReplica, ReplicaLost, ReplicaStatistics, pool_of
from speculon.operations.cluster.replica import Replica
from speculon.operations.cluster.routing import Routing
from tests.server.inside import ThreadEngine, cut
from tests.server.scripted import LETTERS, REFUSE

SETTINGS: dict[str, Any] = {"model": "demo"}
TOKENS = 60
TEXT = (LETTERS * 3)[:TOKENS]


class Local:
    """`Replicas` of this process."""

    def __init__(self, count: int = 2, step_seconds: float = 0.004, **settings: Any):
        self.routing = Routing(rng=Random(0))
        self.step_seconds, self._settings = step_seconds, {**SETTINGS, **settings}
        self.replicas = {name: self.new(name) for name in "abcdef"[:count]}
        self.sent: list[Add] = []
        self.forgotten: list[tuple[str, str | None]] = []

    def new(self, name: str) -> Replica:
        return Replica(
            name, self._settings, lambda settings: ThreadEngine(settings, step_seconds=self.step_seconds)
        )

    async def start(self, name: str | None = None) -> None:
        if name is not None:
            self.replicas[name] = self.new(name)
        for replica in [self.replicas[name]] if name else self.replicas.values():
            await replica.start()

    async def stop(self) -> None:
        for replica in self.replicas.values():
            await replica.stop()

    async def generate(self, add: Add) -> AsyncGenerator[FromReplica, None]:
        load = {name: replica.engine.open_requests for name, replica in self.replicas.items()}
        name = self.routing.choose(add.prompt, pool_of(add), load, 32) if load else None
        if name is None:
            raise ReplicaLost("there is no replica")
        self.sent.append(add)
        async with aclosing(self.replicas[name].generate(add)) as stream:
            async for message in stream:
                if name not in self.replicas:  # removed by a test: its process is gone
                    raise ReplicaLost("a replica is gone")
                yield message

    async def statistics(self) -> list[ReplicaStatistics]:
        return [found for replica in self.replicas.values() if (found := replica.statistics())]

    async def abort(self, request_ids: list[str]) -> None:
        for replica in self.replicas.values():
            replica.abort(request_ids)

    async def forget_pools(self, tenant: str, pool: str | None, only: str | None = None) -> int:
        counts = [await one.forget_pools(tenant, pool, only) for one in self.replicas.values()]
        self.forgotten += [(name, pool) for name in self.replicas if only in (None, name)]
        return max(counts)


def run(test: Callable[[ReplicatedEngine, Local], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        local = Local(**options)
        await local.start()
        engine = ReplicatedEngine(local, SETTINGS)
        try:
            await engine.start()
            await test(engine, local)
        finally:
            await engine.stop()
            await local.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def add(number: int = 0, speculation: dict[str, Any] | None = None, **params: Any) -> Add:
    fields = {"temperature": 0.0, "max_tokens": TOKENS, **params}
    prompt = [number, *range(40)]
    return Add(f"r-{number}", prompt, SamplingParams(**fields), RequestSpeculation(**(speculation or {})))


async def text(engine: ReplicatedEngine, request: Add, begun: set[str] | None = None) -> bytes:
    """What it generates; once there is some, its id is in `begun`."""
    queue = await engine.submit([request])
    try:
        found: list[int] = []
        while events := await queue.take():
            found += [token for event in events for token in event.tokens if event.sample == 0]
            if found and begun is not None:
                begun.add(request.request_id)
        return bytes(found)
    finally:
        queue.close()


async def begun(engine: ReplicatedEngine, request: Add) -> asyncio.Task[bytes]:
    """`text`, of which there is some."""
    known = set[str]()
    writing = asyncio.create_task(text(engine, request, known))
    await until(lambda: known)
    return writing


async def until(true: Callable[[], Any]) -> None:
    """Waits until it is so, at most as long as the test may take."""
    while not true():
        await asyncio.sleep(0.01)


def test_requests_spread_and_every_replica_counts() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        assert await asyncio.gather(*(text(engine, add(i)) for i in range(8))) == [TEXT] * 8
        await until(lambda: engine.counters.requests == 8)
        assert all(engine.replicas[name].counters.requests for name in "ab")
        assert engine.facts is not None and engine.facts.max_num_seqs == 64, "the batches of both"
        assert engine.open_requests == engine.open_sequences == 0 and engine.trouble is None

    run(test)


@pytest.mark.parametrize("how", ["engine", "replica"])
def test_streams_survive_what_serves_them(how: str) -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        begun = set[str]()
        requests = [add(i, seed=i, temperature=i % 2) for i in range(16)]
        writing = [asyncio.create_task(text(engine, request, begun)) for request in requests]
        await until(lambda: len(begun) == 16)
        assert not any(task.done() for task in writing)
        if how == "engine":
            cut(local.replicas["a"].engine)
        else:
            await local.replicas.pop("a").engine.stop()
        assert await asyncio.gather(*writing) == [TEXT] * 16
        assert 0 < engine.resumed < 16
        assert all(request.written is not None for request in local.sent[16:])
        assert len(local.sent) == 16 + engine.resumed

    run(test, step_seconds=0.02)


def test_a_planted_replica_that_begins_again_is_found() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        generate = local.generate
        local.generate = lambda request: generate(replace(request, written=None))  # type: ignore[method-assign]
        writing = await begun(engine, add())
        cut(next(one for one in local.replicas.values() if one.engine.open_requests).engine)
        assert await writing != TEXT

    run(test)


def test_requests_without_a_seed_get_one() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        asked: list[dict[str, Any]] = [{}, {"acceptance": "rejection"}, {"acceptance": "block"}]
        for i, speculation in enumerate(asked):
            await text(engine, add(i, speculation, temperature=1.0))
        await text(engine, add(3, seed=7, temperature=1.0))
        await text(engine, add(4))
        seeds = [request.params.seed for request in local.sent]
        assert seeds[0] is not None and seeds[1:] == [None, None, 7, None]

    run(test)


def test_images_go_along_with_their_request() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        image = ImageInput((1, 2), "0" * 64, {"pixel_values": np.zeros((1, 3, 4, 4), np.float32)})
        writing = await begun(engine, replace(add(), images=(image,)))
        cut(next(one for one in local.replicas.values() if one.engine.open_requests).engine)
        assert await writing == TEXT
        assert [len(sent.images) for sent in local.sent] == [1, 1]

    run(test)


def test_what_cannot_be_continued_ends_with_the_reason() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        writing = await begun(engine, add(0, {"acceptance": "rejection"}, temperature=1.0))
        cut(next(one for one in local.replicas.values() if one.engine.open_requests).engine)
        with pytest.raises(NotReady, match="no other replica can continue this request"):
            await writing

    run(test)


def test_refusals_pass_through_and_are_not_tried_elsewhere() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        with pytest.raises(InvalidParameter, match="prompt"):
            await engine.submit([replace(add(), prompt=list(REFUSE + b"me"))])
        assert len(local.sent) == 1 and engine.open_requests == 0
        with pytest.raises(InvalidParameter, match="is in use"):
            queue = await engine.submit([add()])
            await engine.submit([add()])
        queue.close()

    run(test)


def test_a_request_that_ends_every_engine_is_given_up() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        generate = local.generate

        async def deadly(request: Add) -> AsyncGenerator[FromReplica, None]:
            async with aclosing(generate(request)) as stream:
                async for message in stream:
                    yield message
                    if isinstance(message, Admitted):
                        raise ReplicaLost("planted")

        local.generate = deadly  # type: ignore[method-assign]
        with pytest.raises(NotReady, match="planted"):
            await text(engine, add())
        assert len(local.sent) == 2, "not the third"

    run(test, count=4)


def test_closed_and_aborted_requests_end_on_their_replica() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        def held() -> int:
            return sum(replica.engine.open_requests for replica in local.replicas.values())

        queue = await engine.submit([add(0), add(1)])
        await queue.take()
        assert held() == 2
        queue.close()
        await until(lambda: held() == 0)
        assert engine.open_requests == 0
        queue = await engine.submit([add(2)])
        queue.abort()
        events = []
        while new := await queue.take():
            events += new
        assert events[-1].finish is not None and events[-1].finish.reason == "abort"
        queue.close()

    run(test)


def test_without_a_replica_requests_wait_and_new_ones_are_told() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        writing = await begun(engine, add())
        cut(local.replicas.pop("a").engine)
        await until(lambda: engine.trouble == "no replica serves")
        assert engine.restarting and not engine.settled.is_set()
        await local.start("b")
        assert await writing == TEXT
        await engine.settled.wait()
        assert engine.trouble is None

    run(test, count=1)


def test_an_unhealthy_replica_says_so() -> None:
    async def main() -> None:
        local = Local(count=1)
        await local.start()
        replica = local.replicas["a"]
        replica.check_health()
        assert replica.statistics() is not None
        cut(replica.engine)
        await until(lambda: replica.statistics() is None)
        with pytest.raises(NotReady, match="has ended"):
            replica.check_health()
        await local.stop()

    asyncio.run(main())


@pytest.mark.parametrize("age", [pytest.param(None, id="its own"), pytest.param(-9.0, id="planted")])
def test_a_pool_deleted_while_a_replica_starts_is_deleted_there(age: float | None) -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        starting = local.new("b")  # it has read what "a" had kept
        await engine.forget_pools("", "me")
        if age is not None:
            starting._began = monotonic() - age
        await starting.start()
        local.replicas["b"] = starting
        await until(lambda: "b" in engine.replicas)
        await asyncio.sleep(0.6)
        again = [("b", "me")] if age is None else []
        assert local.forgotten == [("a", "me"), *again], "once, and not where it was deleted already"

    run(test, count=1)


def test_a_health_check_moves_the_requests_of_an_engine_that_hangs() -> None:
    async def test(engine: ReplicatedEngine, local: Local) -> None:
        writing = asyncio.create_task(text(engine, add()))
        await until(lambda: local.replicas["a"].engine.hung)
        local.step_seconds = 0.004
        await local.start("b")
        await asyncio.sleep(0.3)
        assert not writing.done() and local.sent[-1].written is None, "without the check it stays so"
        with pytest.raises(NotReady, match="has not answered"):
            local.replicas["a"].check_health()
        assert await writing == TEXT and len(local.sent) == 2

    run(test, count=1, step_seconds=2.5, serve={"engine_timeout": 1})
