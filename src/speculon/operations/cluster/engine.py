"""The replicas as one engine: a request goes to one of them, and on to another if that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Protocol

from speculon.core.errors import EngineError, NotReady, SpeculonError
from speculon.core.telemetry import EngineCounters
from speculon.core.types import Load
from speculon.engine.client import EngineClient
from speculon.engine.messages import Add, Admitted, Outputs, Ready, Refused
from speculon.engine.waiting import OutputQueue
from speculon.operations.cluster.messages import FromReplica, ReplicaLost, ReplicaStatistics, Taken, pool_of
from speculon.operations.cluster.routing import Routing

POLL_SECONDS = 0.5  # between two looks at the replicas
# guesses: how often a request is sent before a replica has admitted it, and the pause between
MOST_TRIES, RETRY_SECONDS = 20, 0.25
MOST_DELETIONS, LATE_SECONDS = 4096, 5.0  # kept for replicas that start; by how much statistics may be late

log = logging.getLogger("speculon")


class Replicas(Protocol):
    """How replicas are called. Each call raises `NotReady` where there is none to answer it."""

    @property
    def routing(self) -> Routing: ...

    def generate(self, add: Add) -> AsyncGenerator[FromReplica, None]:
        """The stream of the replica that the routing chooses; `ReplicaLost` where that is gone."""
        ...

    async def statistics(self) -> list[ReplicaStatistics]:
        """Of every replica whose engine serves; `TimeoutError` where one does not answer."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...
    async def forget_pools(self, tenant: str, pool: str | None, only: str | None = None) -> int: ...


class ReplicatedEngine(EngineClient):
    """Replicas on several machines, as one engine.

    Requests without a seed get one, so that another replica can continue them; not those that ask for
    rejection sampling or block verification, whose texts depend on the drafts.
    """

    def __init__(
        self, replicas: Replicas, settings: dict[str, Any], on_stage: Callable[[str], None] | None = None
    ):
        super().__init__(settings, on_stage)
        self._replicas = replicas
        self._following: dict[str, asyncio.Task[None]] = {}  # what reads the replica of a request, by its id
        self.replicas: dict[str, ReplicaStatistics] = {}
        self._seen: set[str] = set()  # every replica that has served
        # when, whose and which: a replica that started before may have read the answers from another's folder
        self._deletions: deque[tuple[float, str, str | None]] = deque(maxlen=MOST_DELETIONS)

    @property
    def routing(self) -> Routing:
        return self._replicas.routing

    @property
    def restarting(self) -> bool:
        return self.alive and not self.replicas

    @property
    def trouble(self) -> str | None:
        if self.error is not None:
            return f"the engine has ended: {self.error}"
        return None if self.replicas else "no replica serves"

    async def start(self) -> Ready:
        """Returns once a replica serves."""
        self._on_stage("waiting for a replica")
        self._run(self._poll())
        return await self._wait_until_served()

    async def submit(self, adds: Seq[Add]) -> OutputQueue:
        return await super().submit([self._with_seed(add) for add in adds])

    async def _begin_requests(self, queue: OutputQueue) -> None:
        for request_id, request in queue.requests.items():
            task = self._following[request_id] = asyncio.create_task(self._follow(request.add, queue))
            task.add_done_callback(partial(self._forget, request_id))

    def end(self, queue: OutputQueue) -> None:
        for request_id in self._requests.remove(queue):
            if task := self._following.get(request_id):
                task.cancel()

    def abort(self, request_ids: list[str]) -> None:
        async def send() -> None:
            with contextlib.suppress(NotReady):  # there is nothing left to end
                await self._replicas.abort(request_ids)

        if request_ids:
            self._run(send())

    async def forget_pools(self, tenant: str, pool: str | None) -> int:
        """Deletes earlier answers on every replica; returns how many pools there were, a copy counts once."""
        try:
            return await self._replicas.forget_pools(tenant, pool)
        finally:
            self._deletions.append((monotonic(), tenant, pool))

    async def stop(self) -> None:
        """The replicas stay; running requests are lost."""
        self.fail(EngineError("the engine has been stopped"))
        tasks = [*self._following.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._note([])

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._following.get(request_id) is task:
            del self._following[request_id]

    def _with_seed(self, add: Add) -> Add:
        acceptance = self._config.speculation.acceptance
        rule = add.speculation.rule(acceptance) if add.speculation else acceptance
        if add.params.seed is not None or add.params.greedy or rule in ("rejection", "block"):
            return add
        return replace(add, params=add.params.model_copy(update={"seed": secrets.randbits(63)}))

    async def _follow(self, add: Add, queue: OutputQueue) -> None:
        """Reads the replica that has the request, and the next one where it is lost."""
        fault, tries = ReplicaLost(), MOST_TRIES
        try:
            while tries > 0:
                tries -= 1
                reading = ReplicaStream(add, queue, self.routing)
                try:
                    return await reading.run(self._replicas.generate(add))
                except ReplicaLost as lost:
                    fault = lost
                    if reading.replica is not None:
                        self.routing.lost(reading.replica)
                if reading.admitted:
                    add, tries = self._rest(add, queue, fault), MOST_TRIES
                else:
                    await asyncio.sleep(RETRY_SECONDS)
            raise NotReady(f"no replica accepted this request: {fault}")
        except SpeculonError as error:
            queue.fail(error)
        except Exception as error:
            log.exception("%s: its replica cannot be read", add.request_id)
            queue.fail(EngineError(f"the answer of its replica cannot be read: {type(error).__name__}"))

    def _rest(self, add: Add, queue: OutputQueue, fault: ReplicaLost) -> Add:
        """What another replica is to write. Raises `NotReady` where that would be another text."""
        progress = queue.requests[add.request_id]
        if not progress.resumable:
            raise NotReady(f"{fault}, and no other replica can continue this request: send it again")
        log.warning("%s; %s continues elsewhere", fault, add.request_id)
        self.resumed += 1
        queue.resumed += 1
        return progress.rest()

    async def _poll(self) -> None:
        while self.alive:
            try:
                found = await self._replicas.statistics()
                await self._repeat_deletions(found)
                self._note(found)
            except TimeoutError:
                log.warning("a replica does not answer, so its figures are out of date")
            except SpeculonError:
                self._note([])
            await asyncio.sleep(POLL_SECONDS)

    async def _repeat_deletions(self, found: list[ReplicaStatistics]) -> None:
        """On replicas that started before them, and serve since."""
        for one in found:
            if one.replica not in self._seen:
                started = monotonic() - one.age - LATE_SECONDS
                for at, tenant, pool in [*self._deletions]:
                    if at >= started:
                        await self._replicas.forget_pools(tenant, pool, one.replica)
                self._seen.add(one.replica)

    def _note(self, found: list[ReplicaStatistics]) -> None:
        """The numbers are those of all replicas that serve, together; facts and costs those of one."""
        self.replicas = {one.replica: one for one in found}
        self.routing.serve(self.replicas)
        self.counters = EngineCounters()
        for one in found:
            self.counters.add(one.counters)
        loads = [one.load for one in found]
        self.load = Load(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.free_pages for load in loads),
        )
        if found:
            sequences = sum(one.facts.max_num_seqs for one in found)
            self.facts, self.costs = replace(found[0].facts, max_num_seqs=sequences), found[0].costs
            self.settled.set()
        else:
            self.facts, self.costs = None, {}
            if self.alive:
                self.settled.clear()


class ReplicaStream:
    """One request at one replica."""

    def __init__(self, add: Add, queue: OutputQueue, routing: Routing):
        self._add, self._queue, self._routing = add, queue, routing
        self._text = add.prompt + (add.written or {}).get(0, [])  # of the first sample
        self.replica: str | None = None
        self.admitted = False

    async def run(self, stream: AsyncGenerator[FromReplica, None]) -> None:
        """Returns when the request has ended; raises why it has not."""
        async with contextlib.aclosing(stream):
            async for message in stream:
                self._handle(message)
        if self._queue.requests[self._add.request_id].written:
            raise ReplicaLost(f"{self.replica}: the stream of answers ended early")
        if self.replica is not None:
            self._routing.wrote(self.replica, self._text, pool_of(self._add), self._add.adapter)

    def _handle(self, message: FromReplica) -> None:
        match message:
            case Taken(replica):
                self.replica = replica
            case Admitted(request_id):
                self.admitted = True
                self._queue.admit(request_id)
            case Outputs(events):
                for event in events:
                    self._queue.put(event)
                    if event.sample == 0:
                        self._text += event.tokens
            case Refused(_, error):
                raise error
