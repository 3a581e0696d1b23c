"""One engine for callers in any number of threads and event loops of its process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.config import RequestSpeculation, SamplingParams
from speculon.errors import EngineError
from speculon.sequence import Event

if TYPE_CHECKING:
    from speculon.engine.engine import Engine


class Call(NamedTuple):
    """What is asked for one prompt."""

    prompt: list[int]
    params: SamplingParams
    speculation: RequestSpeculation | Mapping[str, Any] | None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of this block: half a step would leave the engine broken."""
    before = signal.getsignal(signal.SIGINT)
    # not Python's to hold, or not ours
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = False

    def hold(*_: object) -> None:
        nonlocal caught
        caught = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)


class SharedEngine:
    """Lets one thread at a time use the engine.

    Whoever waits for events steps it for everybody, unless another thread does already. Requests are added
    and ended between two steps, so those of several threads form one batch.
    """

    def __init__(self, engine: Engine):
        self._engine, self._process = engine, os.getpid()
        self._freed = threading.Condition()
        self._owner: int | None = None  # the thread that uses the engine
        self._closed = False
        self._dropped: deque[str] = deque()  # requests to abort before the owner is done
        self._calling = 0  # threads that wait with a short call, which goes before the next step
        self._groups: dict[str, RequestGroup] = {}  # of each open request

    @property
    def owned(self) -> bool:
        """Whether this thread uses the engine, so that it must not wait for it."""
        return self._owner == threading.get_ident()

    @contextmanager
    def turn(self, *, closed_too: bool = False) -> Iterator[Engine]:
        """The engine, between two steps. Raises `EngineError` once it is closed, unless `closed_too`."""
        self._check_caller()
        with uninterrupted():
            with self._freed:
                self._calling += 1
                try:
                    self._freed.wait_for(lambda: self._owner is None)
                finally:
                    self._calling -= 1
                if self._closed and not closed_too:
                    self._freed.notify_all()  # those that let this thread go first
                    raise EngineError("this engine is closed")
                self._owner = threading.get_ident()
            try:
                yield self._engine
            finally:
                self._free()

    def drop(self, request_id: str) -> None:
        """Ends a request once the step of this thread is over: garbage is collected in the middle of it."""
        del self._groups[request_id]
        self._dropped.append(request_id)

    def step_until(self, done: Callable[[], bool]) -> None:
        """Steps the engine, or waits while another thread does, until `done`. Raises what a step raises."""
        while not done():
            self._step_or_wait()

    def add(self, call: Call, group: RequestGroup, engine: Engine) -> str:
        """Admits one request, in a `turn`; its events go to `group`."""
        request_id = engine.add_request(*call)
        self._groups[request_id] = group
        return request_id

    def end(self, request_id: str, engine: Engine) -> list[Event]:
        """Ends one request, in a `turn`; returns its last events."""
        del self._groups[request_id]
        return engine.abort(request_id)

    def replay(self) -> None:
        """All replays of the monitor, each forward of them only while nobody's request runs."""
        more = True
        while more:
            self.step_until(lambda: not self._engine.has_work)
            with self.turn() as engine:
                if not engine.has_work and engine.has_replays:
                    engine.replay()
                more = engine.has_work or engine.has_replays

    def check_when_idle(self) -> None:
        """Raises AssertionError unless every page is accounted for; does nothing while requests run."""
        if not self._groups:
            with self.turn(closed_too=True) as engine:
                if not engine.has_work:
                    engine.check_integrity()

    def close(self) -> None:
        """Ends the open requests, with `abort`, and closes the engine. May be called twice."""
        with self.turn(closed_too=True) as engine:
            if self._closed:
                return
            self._closed = True
            for request_id, group in [*self._groups.items()]:
                for event in self.end(request_id, engine):
                    group.put(event)
            engine.close()

    def _check_caller(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(f"this engine belongs to process {self._process}: make one in each process")
        if self.owned:
            raise EngineError("the engine is called from inside its own step")

    @uninterrupted()
    def _step_or_wait(self) -> None:
        self._check_caller()
        with self._freed:
            if self._owner is not None or self._calling:
                self._freed.wait()
                return
            self._owner = threading.get_ident()
        try:
            for event in self._engine.step():
                if group := self._groups.get(event.request_id):
                    if group.put(event):
                        del self._groups[event.request_id]
        finally:
            self._free()

    def _free(self) -> None:
        try:
            while self._dropped:
                self._engine.abort(self._dropped.popleft())
        finally:
            with self._freed:
                self._owner = None
                self._freed.notify_all()


class RequestGroup:
    """The requests of one call, and their events in order. Close it when done."""

    def __init__(self, shared: SharedEngine):
        self._shared = shared
        self._index: dict[str, int] = {}  # of each request's prompt
        self._open: dict[str, int] = {}  # sequences of each request that have not ended
        self._events: deque[Event] = deque()

    def add(self, calls: Seq[Call]) -> None:
        """Admits all of them; where one is refused, `close` ends those before it."""
        with self._shared.turn() as engine:
            for i, call in enumerate(calls):
                request_id = self._shared.add(call, self, engine)
                self._index[request_id], self._open[request_id] = i, call.params.n

    def put(self, event: Event) -> bool:
        """Whether it was the last one of its request. Called by the thread that steps."""
        self._events.append(event)  # before the request counts as ended, which readers rely on
        self._open[event.request_id] -= event.finish is not None
        ended = not self._open[event.request_id]
        if ended:
            del self._open[event.request_id]
        return ended

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """(index of the prompt, event), until all sequences have ended."""
        while self._wait():
            yield self._next()

    def close(self) -> list[Event]:
        """Ends what has not ended; returns the events that were not read."""
        last: list[Event] = []
        if self._shared.owned:
            for name in [*self._open]:
                self._shared.drop(name)
            self._open.clear()
        elif self._open:
            with self._shared.turn() as engine:
                last = [event for name in [*self._open] for event in self._shared.end(name, engine)]
                self._open.clear()
        unread, self._events = [*self._events, *last], deque()
        return unread

    def _wait(self) -> bool:
        """Steps until there are events; False where none will come."""
        self._shared.step_until(lambda: bool(self._events) or not self._open)
        return bool(self._events)

    def _next(self) -> tuple[int, Event]:
        event = self._events.popleft()
        return self._index[event.request_id], event


class AsyncRequestGroup(RequestGroup):
    """A group for one task of an event loop.

    Its requests are admitted and ended in one thread of the engine's, and stepped in another.
    """

    def __init__(self, shared: SharedEngine, threads: Threads):
        super().__init__(shared)
        self._loop, self._threads = asyncio.get_running_loop(), threads
        self._arrived = asyncio.Event()
        self._fault: BaseException | None = None

    async def __aenter__(self) -> AsyncRequestGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it, also where the task is cancelled meanwhile."""
        await asyncio.shield(self._loop.run_in_executor(self._threads.calls, self.close))

    async def begin(self, calls: Seq[Call]) -> None:
        """Admits all of them, or raises why not; then steps until they have ended."""
        await self._loop.run_in_executor(self._threads.calls, self.add, calls)
        self._threads.steps.submit(self._step)

    def put(self, event: Event) -> bool:
        ended = super().put(event)
        self._wake()
        return ended

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._events or (self._open and self._fault is None):
            if self._events:
                yield self._next()
            else:
                self._arrived.clear()
                if not self._events and self._open and self._fault is None:
                    await self._arrived.wait()
        if self._fault is not None:
            raise self._fault

    def _step(self) -> None:
        try:
            self._shared.step_until(lambda: not self._open)
        except BaseException as error:
            self._fault = error
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._arrived.set)


class Threads:
    """Two threads for the callers of event loops: admission must not wait for the steps."""

    def __init__(self) -> None:
        self.calls = ThreadPoolExecutor(1, "speculon-call")
        self.steps = ThreadPoolExecutor(1, "speculon-step")
