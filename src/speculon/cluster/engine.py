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

from speculon.cluster.messages import FromReplica, ReplicaLost, ReplicaStatistics, Taken, pool_of
from speculon.cluster.routing import Routing
from speculon.config import EngineConfig
from speculon.core import Load
from speculon.engine.messages import Add, Admitted, Outputs, Ready, Refused
from speculon.engine.output_queue import OutputQueue
from speculon.errors import EngineError, InvalidParameter, NotReady, SpeculonError
from speculon.telemetry import EngineCounters

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


class ReplicatedEngine:
    """The public side of `AsyncEngine`, over replicas.

    Requests without a seed get one, so that another replica can continue them; not those that ask for
    rejection sampling or block verification, whose texts depend on the drafts.
    """

    restarts = 0  # a replica is replaced as a whole

    def __init__(
        self, replicas: Replicas, settings: dict[str, Any], on_stage: Callable[[str], None] | None = None
    ):
        self._replicas, self._on_stage = replicas, on_stage or (lambda name: None)
        self._acceptance = EngineConfig(**settings).speculation.acceptance
        self._open: dict[str, OutputQueue] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # what reads the replica of a request, by its id
        self._sending: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self.replicas: dict[str, ReplicaStatistics] = {}
        self._seen: set[str] = set()  # every replica that has served
        # when, whose and which: a replica that started before may have read the answers from another's folder
        self._deletions: deque[tuple[float, str, str | None]] = deque(maxlen=MOST_DELETIONS)
        self.resumed = 0  # requests that another replica continued
        self.draining = False
        self.error: SpeculonError | None = None
        self.ended, self.settled = asyncio.Event(), asyncio.Event()

    @property
    def routing(self) -> Routing:
        return self._replicas.routing

    @property
    def alive(self) -> bool:
        return self.error is None

    @property
    def facts(self) -> Ready | None:
        """Those of one replica, with the batches of all; None where no replica serves."""
        found = [one.facts for one in self.replicas.values()]
        return replace(found[0], max_num_seqs=sum(one.max_num_seqs for one in found)) if found else None

    @property
    def restarting(self) -> bool:
        return self.alive and not self.replicas

    @property
    def trouble(self) -> str | None:
        if self.error is not None:
            return f"the engine has ended: {self.error}"
        return None if self.replicas else "no replica serves"

    @property
    def load(self) -> Load:
        loads = [one.load for one in self.replicas.values()]
        return Load(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.free_pages for load in loads),
        )

    @property
    def costs(self) -> dict[int, float]:
        return next((one.costs for one in self.replicas.values()), {})

    @property
    def counters(self) -> EngineCounters:
        """Of all replicas that serve, together."""
        total = EngineCounters()
        for one in self.replicas.values():
            total.add(one.counters)
        return total

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def open_sequences(self) -> int:
        return sum(queue.open_sequences for queue in set(self._open.values()))

    async def start(self) -> Ready:
        """Returns once a replica serves."""
        self._on_stage("waiting for a replica")
        self._polling = asyncio.create_task(self._poll())
        while (facts := self.facts) is None:
            await self.settled.wait()
            if self.error is not None:
                raise self.error
        return facts

    async def submit(self, adds: Seq[Add]) -> OutputQueue:
        """Queues all of these requests or none; raises by name what cannot be served."""
        if self.error is not None:
            raise self.error
        if taken := next((add.request_id for add in adds if add.request_id in self._open), None):
            raise InvalidParameter("request_id", taken, "is in use")
        adds = [self._with_seed(add) for add in adds]
        queue = OutputQueue(self, adds, self._acceptance)
        for add in adds:
            self._open[add.request_id] = queue
            task = self._tasks[add.request_id] = asyncio.create_task(self._follow(add, queue))
            task.add_done_callback(partial(self._forget, add.request_id))
        try:
            await queue.admitted()
        except BaseException:
            queue.close()
            raise
        return queue

    def remove(self, request_id: str, *, abort: bool) -> None:
        """Drops the events that are still to come of a request."""
        self._open.pop(request_id, None)
        if abort and (task := self._tasks.get(request_id)):
            task.cancel()

    def abort(self, request_id: str) -> None:
        """Ends a request; its last event comes to its queue."""
        self._abort([request_id])

    def abort_all(self) -> None:
        self._abort([*self._open])

    async def forget_pools(self, tenant: str, pool: str | None) -> int:
        """Deletes earlier answers on every replica; returns how many pools there were, a copy counts once."""
        try:
            return await self._replicas.forget_pools(tenant, pool)
        finally:
            self._deletions.append((monotonic(), tenant, pool))

    async def stop(self) -> None:
        """The replicas stay; running requests are lost."""
        self.fail(EngineError("the engine has been stopped"))
        tasks = [*self._tasks.values(), *self._sending, *([self._polling] if self._polling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.replicas = {}

    def fail(self, error: SpeculonError) -> None:
        if self.error is not None:
            return
        self.error = error
        self.ended.set()
        self.settled.set()
        self.fail_requests(error)

    def fail_requests(self, error: SpeculonError, queues: set[OutputQueue] | None = None) -> None:
        for queue in set(self._open.values()) if queues is None else queues:
            queue.fail(error)

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]

    def _with_seed(self, add: Add) -> Add:
        rule = add.speculation.rule(self._acceptance) if add.speculation else self._acceptance
        if add.params.seed is not None or add.params.greedy or rule in ("rejection", "block"):
            return add
        return replace(add, params=add.params.model_copy(update={"seed": secrets.randbits(63)}))

    def _abort(self, request_ids: list[str]) -> None:
        async def send() -> None:
            with contextlib.suppress(NotReady):  # there is nothing left to end
                await self._replicas.abort(request_ids)

        task = asyncio.ensure_future(send())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _follow(self, add: Add, queue: OutputQueue) -> None:
        """Reads the replica that has the request, and the next one where it is lost."""
        fault, tries = ReplicaLost(), MOST_TRIES
        try:
            while tries := tries - 1:
                reading = Reading(add, queue, self.routing)
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
            raise NotReady(f"no replica has taken this request: {fault}")
        except SpeculonError as error:
            queue.fail(error)
        except Exception as error:
            log.exception("%s: its replica cannot be read", add.request_id)
            queue.fail(EngineError(f"its replica cannot be read: {type(error).__name__}"))

    def _rest(self, add: Add, queue: OutputQueue, fault: ReplicaLost) -> Add:
        """What another replica is to write. Raises `NotReady` where that would be another text."""
        progress = queue.progress(add.request_id)
        if not progress.resumable:
            raise NotReady(f"{fault}; no other replica can continue this request")
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
                log.warning("a replica does not answer; its figures are old")
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
        self.replicas = {one.replica: one for one in found}
        self.routing.serve(self.replicas)
        if found:
            self.settled.set()
        else:
            self.settled.clear()


class Reading:
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
        if self._queue.progress(self._add.request_id).written:
            raise ReplicaLost(f"{self.replica}: the stream has ended early")
        if self.replica is not None:
            self._routing.wrote(self.replica, self._text, pool_of(self._add))

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
