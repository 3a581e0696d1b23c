"""One engine for the threads and tasks of a process: whoever waits for events steps it for everybody."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import EngineError
from speculon.core.images import ImageInput
from speculon.decoding.sequence import Event
from speculon.engine.messages import Add
from speculon.engine.progress import RequestProgress
from speculon.engine.waiting import OutputQueue, RequestTable

if TYPE_CHECKING:
    from speculon.engine.engine import Engine


class PromptCall(NamedTuple):
    """What is asked for one prompt."""

    prompt: list[int]
    params: SamplingParams
    speculation: RequestSpeculation | Mapping[str, Any] | None
    images: tuple[ImageInput, ...] = ()
    adapter: str = ""


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


class Stepper:
    """Lets one thread at a time use an engine, and steps it for all that wait for events.

    Whoever waits steps it for everybody, unless another thread does already. Requests are added and ended
    between two steps, so those of several threads form one batch.
    """

    def __init__(self, engine: Engine):
        self._engine, self._process = engine, os.getpid()
        self._freed = threading.Condition()
        self._owner: int | None = None  # the thread that uses the engine
        self._closed = False
        self._dropped: deque[str] = deque()  # requests to abort before the owner is done
        self._calling = 0  # threads that wait with a short call, which goes before the next step
        self._requests = RequestTable()
        # for tasks of event loops: admission must not wait for the steps
        self.calls = ThreadPoolExecutor(1, "speculon-call")
        self.steps = ThreadPoolExecutor(1, "speculon-step")

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

    @contextmanager
    def requests(self, calls: Seq[PromptCall]) -> Iterator[OutputQueue]:
        """Admits all of these requests or none, for one thread; ends them with the block."""
        queue = OutputQueue(self)
        try:
            self.admit(calls, queue)
            yield queue
        finally:
            queue.close()

    def events(self, queue: OutputQueue) -> Iterator[Event]:
        """Steps the engine for a thread until its queue's sequences have ended. Raises what a step raises."""
        self._step_until(lambda: queue.ready)
        while queue.unread:
            yield queue.unread.popleft()
            self._step_until(lambda: queue.ready)

    def abort(self, request_ids: list[str]) -> None:
        if self._owner == threading.get_ident():  # garbage is collected in the middle of a step
            self._dropped += request_ids
        elif request_ids:
            with self.turn() as engine:
                for request_id in request_ids:
                    self._requests.put(engine.abort(request_id))

    def end(self, queue: OutputQueue) -> None:
        try:
            self.abort(queue.open)
        finally:  # an interrupt that waited is raised by the abort
            self._requests.remove(queue)

    def check_when_idle(self) -> None:
        """Raises AssertionError unless every page is accounted for; does nothing while requests run."""
        if not len(self._requests):
            with self.turn(closed_too=True) as engine:
                if not engine.has_work:
                    engine.check_integrity()

    def close(self) -> None:
        """Ends the open requests, with `abort`, and closes the engine. May be called twice."""
        with self.turn(closed_too=True) as engine:
            if self._closed:
                return
            self._closed = True
            for queue in self._requests.queues:
                for request_id in queue.open:
                    self._requests.put(engine.abort(request_id))
            engine.close()

    def admit(self, calls: Seq[PromptCall], queue: OutputQueue) -> None:
        with self.turn() as engine:
            for call in calls:
                own = call.prompt, call.params, call.speculation
                request_id = engine.add_request(*own, images=call.images, adapter=call.adapter)
                self._requests.add(RequestProgress(Add(request_id, call.prompt, call.params)), queue)

    def step_for(self, queue: OutputQueue) -> None:
        try:
            self._step_until(lambda: queue.ended)
        except BaseException as error:
            queue.fail(error)

    def _step_until(self, done: Callable[[], bool]) -> None:
        """Steps the engine, or waits while another thread does, until `done`. Raises what a step raises."""
        while not done():
            self._step_or_wait()

    @uninterrupted()
    def _step_or_wait(self) -> None:
        self._check_caller()
        with self._freed:
            if self._owner is not None or self._calling:
                self._freed.wait()
                return
            self._owner = threading.get_ident()
        try:
            self._requests.put(self._engine.step())
        finally:
            self._free()

    def _check_caller(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(
                f"this engine belongs to process {self._process}, and this is another one: make an engine "
                "in each process"
            )
        if self._owner == threading.get_ident():
            raise EngineError(
                "the engine was called from inside its own step, for example by a logits processor"
            )

    def _free(self) -> None:
        try:
            while self._dropped:
                self._engine.abort(self._dropped.popleft())
        finally:
            with self._freed:
                self._owner = None
                self._freed.notify_all()


class TaskRequests:
    """`Stepper.requests` for one task: a thread steps the engine until they have ended.

    No generator: a loop that ends closes those that were left in any order, one inside another too.
    """

    def __init__(self, stepper: Stepper, calls: Seq[PromptCall]):
        self._stepper, self._calls = stepper, calls

    async def __aenter__(self) -> OutputQueue:
        loop, stepper = asyncio.get_running_loop(), self._stepper
        self._queue = OutputQueue(stepper, loop)
        try:
            await loop.run_in_executor(stepper.calls, stepper.admit, self._calls, self._queue)
            stepper.steps.submit(stepper.step_for, self._queue)
        except BaseException:
            await self.__aexit__()
            raise
        return self._queue

    async def __aexit__(self, *error: object) -> None:
        # also where the task is cancelled meanwhile
        closing = asyncio.get_running_loop().run_in_executor(self._stepper.calls, self._queue.close)
        await asyncio.shield(closing)
