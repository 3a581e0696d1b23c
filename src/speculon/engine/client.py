"""An engine as the server calls it: one process (`AsyncEngine`), or replicas on several machines."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from typing import Any

from speculon.core.config import IN_PYTHON, EngineConfig, SamplingParams
from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.core.telemetry import EngineCounters
from speculon.core.types import Load
from speculon.engine.messages import Add, Ready
from speculon.engine.progress import RequestProgress
from speculon.engine.waiting import OutputQueue, RequestTable


class EngineClient(ABC):
    """What both have in common: open requests, and the end. For one event loop."""

    def __init__(self, settings: dict[str, Any], on_stage: Callable[[str], None] | None = None):
        self._settings, self._on_stage = settings, on_stage or (lambda name: None)
        self._config = EngineConfig(**settings)
        self._requests = RequestTable()
        self._tasks: set[asyncio.Task[None]] = set()
        self.facts: Ready | None = None  # None while nothing serves
        self.counters, self.load = EngineCounters(), Load(0, 0, 0)
        self.costs: dict[int, float] = {}  # sequences -> ms of a plain step
        self.restarts = self.resumed = 0  # processes after the first; requests that another engine resumed
        self.draining = False  # set where no other process is to be started
        self.error: SpeculonError | None = None  # why the engine has ended
        self.ended = asyncio.Event()  # set with `error`
        self.settled = asyncio.Event()  # set where it serves, or will never serve again

    @property
    def alive(self) -> bool:
        return self.error is None

    @property
    @abstractmethod
    def restarting(self) -> bool:
        """Whether nothing serves now, and something will again."""

    @property
    @abstractmethod
    def trouble(self) -> str | None:
        """Why no request can be served now; None where it can."""

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    @property
    def open_sequences(self) -> int:
        return sum(queue.open_sequences for queue in self._requests.queues)

    @abstractmethod
    async def start(self) -> Ready:
        """Returns once it serves; raises why it never will."""

    async def submit(self, adds: Seq[Add]) -> OutputQueue:
        """Queues all of these requests or none, until the queue is closed; raises what cannot be served."""
        if self.error is not None:
            raise self.error
        for add in adds:
            refuse_functions(add.params)
        if taken := next((add.request_id for add in adds if self._requests.get(add.request_id)), None):
            raise InvalidParameter("request_id", taken, "is in use by another open request")
        queue = OutputQueue(self)
        for add in adds:
            self._requests.add(RequestProgress(add, self._config.speculation.acceptance), queue)
        try:
            await self._begin_requests(queue)
            await queue.admitted()
        except BaseException:
            queue.close()
            raise
        return queue

    @abstractmethod
    async def _begin_requests(self, queue: OutputQueue) -> None: ...

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None:
        """Sends the abort of these requests; their last events come to their queues."""

    @abstractmethod
    def end(self, queue: OutputQueue) -> None:
        """Drops the events that are still to come, and ends the open requests."""

    def abort_all(self) -> None:
        self.abort(self._requests.names)

    @abstractmethod
    async def forget_pools(self, tenant: str, pool: str | None) -> int:
        """Deletes the earlier answers of one pool, or of all of a tenant; returns how many pools."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends it, or lets go of it; running requests are lost."""

    def fail(self, error: SpeculonError) -> None:
        """The engine has ended, for this reason; so has every open request."""
        if self.error is not None:
            return
        self.error = error
        self.ended.set()
        self.settled.set()
        self.fail_requests(error)

    def fail_requests(self, error: SpeculonError, queues: set[OutputQueue] | None = None) -> None:
        """These (None: all that are open) end with this error."""
        for queue in self._requests.queues if queues is None else queues:
            queue.fail(error)

    async def _wait_until_served(self) -> Ready:
        while self.facts is None:
            await self.settled.wait()
            if self.error is not None:
                raise self.error
        return self.facts

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def refuse_functions(params: SamplingParams) -> None:
    """Raises by name for what cannot be sent to another process."""
    for name in IN_PYTHON:
        if (value := getattr(params, name)) is not None:
            limit = (
                "must be None: a function cannot be sent to the engine's process; use it with LLM in Python"
            )
            raise InvalidParameter(name, value, limit).about(f"parameters.{name}")
