"""Who waits for which request's events: one table of queues, for threads and for tasks of event loops.

Whoever steps the engine, or reads the process that does, puts events into the table. A task awaits its queue
(`OutputQueue.take`). A thread steps the engine until its queue is ready, or waits while another thread does
(`Stepper.events`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from speculon.core.config import Acceptance, RequestSpeculation, SamplingParams
from speculon.core.errors import EngineError
from speculon.core.images import ImageInput
from speculon.core.types import acceptance_rule
from speculon.decoding.sequence import Event
from speculon.engine.messages import Add

if TYPE_CHECKING:
    from speculon.engine.engine import Engine


class Progress:
    """One request, and what was written of each sample that has not ended."""

    def __init__(self, add: Add, acceptance: Acceptance = "auto"):
        self.add, self.admitted = add, False
        self.written = {sample: [*tokens] for sample, tokens in (add.written or {}).items()}
        if add.written is None:
            self.written = {sample: [] for sample in range(add.params.n)}
        own = add.speculation.rule(acceptance) if add.speculation else acceptance
        rule = acceptance_rule(own, add.params)
        # then its tokens are a function of prompt, parameters and seed
        self._repeats = rule == "matching" and (add.params.greedy or add.params.seed is not None)
        self._begun = False  # whether anything came of it
        self._resumed, self._gained = False, False  # and whether tokens came since

    @property
    def resumable(self) -> bool:
        """Whether another engine would write the rest as the lost one would have.

        Not after a second loss without a token between: such a request may be what ends the engine.
        """
        return (not self._begun or self._repeats and self._has_prompt) and (self._gained or not self._resumed)

    @property
    def _has_prompt(self) -> bool:
        """Whether all log-probabilities of the prompt came, if any are due: the first sample brings them."""
        return self.add.params.prompt_logprobs is None or self.written.get(0) != []

    def note(self, event: Event) -> None:
        self.written[event.sample] += event.tokens
        self._begun = self._gained = True
        if event.finish is not None:
            del self.written[event.sample]

    def rest(self) -> Add:
        """The message that asks for the rest."""
        self._resumed, self._gained = True, False
        if not self._begun:
            return self.add
        params = self.add.params.model_copy(update={"prompt_logprobs": None})
        return replace(self.add, params=params, written=self.written)


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
        self.requests: dict[str, Progress] = {}
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

    def add(self, request: Progress, queue: OutputQueue) -> None:
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


class Call(NamedTuple):
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
    def requests(self, calls: Seq[Call]) -> Iterator[OutputQueue]:
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

    def admit(self, calls: Seq[Call], queue: OutputQueue) -> None:
        with self.turn() as engine:
            for call in calls:
                own = call.prompt, call.params, call.speculation
                request_id = engine.add_request(*own, images=call.images, adapter=call.adapter)
                self._requests.add(Progress(Add(request_id, call.prompt, call.params)), queue)

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
            raise EngineError(f"this engine belongs to process {self._process}: make one in each process")
        if self._owner == threading.get_ident():
            raise EngineError("the engine is called from inside its own step")

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

    def __init__(self, stepper: Stepper, calls: Seq[Call]):
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
