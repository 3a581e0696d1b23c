"""Who waits for which request's events: one table of queues, for threads and for tasks of event loops.

Whoever steps the engine, or reads the process that does, puts events into the table. A task awaits its queue
(`OutputQueue.take`). A thread steps the engine until its queue is ready, or waits while another thread does
(`Stepper.events` in `engine/stepper.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from speculon.decoding.sequence import Event
from speculon.engine.messages import Add
from speculon.engine.progress import RequestProgress


class Host(Protocol):
    """What serves the requests of a queue: a `Stepper`, or an `EngineClient`."""

    def abort(self, request_ids: list[str]) -> None:
        """Ends these requests; their last events come to their queues."""

    def end(self, queue: OutputQueue) -> None:
        """Ends the open requests of a queue, and lets go of it."""


class OutputQueue:
    """The events of some requests, in batches as they come, for one thread or task.

    Events that nobody takes wait here; there are never more than the requests' tokens. With a `loop`, that of
    the task, other threads put events.
    """

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop | None = None):
        self.requests: dict[str, RequestProgress] = {}
        self.resumed = 0  # how often another engine continued it
        self._host, self._loop = host, loop
        self.unread: deque[Event] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def open(self) -> list[str]:
        """The requests that have not ended."""
        return [request_id for request_id, request in self.requests.items() if request.written]

    @property
    def open_sequences(self) -> int:
        return sum(len(request.written) for request in self.requests.values())

    @property
    def ended(self) -> bool:
        return not any(request.written for request in self.requests.values())

    @property
    def ready(self) -> bool:
        """Whether `take` need not wait."""
        return bool(self.unread) or self._error is not None or self.ended

    @property
    def resumable(self) -> bool:
        """Whether another engine can continue all of its requests; not after a fault."""
        return self._error is None and all(self.requests[name].resumable for name in self.open)

    async def admitted(self) -> None:
        """Returns once the engine has admitted every request; raises why it has not.

        A fault after that is raised by `take`, also if it is here already.
        """
        while not all(request.admitted for request in self.requests.values()):
            if self._error is not None:
                raise self._error
            await self._wait()

    async def take(self) -> list[Event]:
        """The events since the last call, at least one; none once all sequences have ended.

        Raises the engine's fault, after the events before it.
        """
        while not self.ready:
            await self._wait()
        if self._error is not None and not self.unread:
            raise self._error
        # not all at once: another thread may put meanwhile
        return [self.unread.popleft() for _ in range(len(self.unread))]

    def put(self, event: Event) -> None:
        request = self.requests[event.request_id]
        if event.sample not in request.written:  # of an aborted request of the same name
            return
        self.unread.append(event)  # before the sample counts as ended, which readers rely on
        request.note(event)
        self._wake()

    def admit(self, request_id: str) -> None:
        self.requests[request_id].admitted = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    def rest(self) -> list[Add]:
        """The messages that submit what is left of it to another engine."""
        self.resumed += 1
        return [self.requests[request_id].rest() for request_id in self.open]

    def abort(self) -> None:
        """Ends the open requests; their last events are still to be taken."""
        self._host.abort(self.open)

    def close(self) -> None:
        """Ends the open requests; their pages are free after the running step. May be called twice."""
        self._host.end(self)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._loop is None:
            self._changed.set()
        else:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._changed.set)


class RequestTable:
    """Request id -> the queue of its events, from its submission until the queue is closed."""

    def __init__(self) -> None:
        self._queues: dict[str, OutputQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def names(self) -> list[str]:
        return [*self._queues]

    @property
    def queues(self) -> set[OutputQueue]:
        return set(self._queues.values())

    def get(self, request_id: str) -> OutputQueue | None:
        return self._queues.get(request_id)

    def add(self, request: RequestProgress, queue: OutputQueue) -> None:
        request_id = request.add.request_id
        self._queues[request_id] = queue
        queue.requests[request_id] = request

    def put(self, events: Iterable[Event]) -> None:
        """Gives each event to its queue; those of closed queues are dropped."""
        for event in events:
            if queue := self._queues.get(event.request_id):
                queue.put(event)

    def remove(self, queue: OutputQueue) -> list[str]:
        """Returns its open requests, the first time."""
        gone = [name for name in queue.requests if self._queues.get(name) is queue]
        for name in gone:
            del self._queues[name]
        return [name for name in queue.open if name in gone]
