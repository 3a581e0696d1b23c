"""The asynchronous engine: an engine in a process of its own, whose outputs come as streams of events.

A thread would share the interpreter with templates, JSON and streams: beside them a step of 8 ms took 13 to
31 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing as mp
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from speculon.config import EngineConfig
from speculon.core import Load
from speculon.engine.messages import (
    Abort,
    Add,
    Admitted,
    ForgetPools,
    FromServer,
    FromWorker,
    Outputs,
    PoolsForgotten,
    Ready,
    Refused,
    Stage,
    Statistics,
)
from speculon.engine.output_queue import OutputQueue
from speculon.engine.process import EngineProcess
from speculon.errors import EngineError, InvalidParameter, InvalidRequest, NotReady, SpeculonError
from speculon.telemetry import EngineCounters

MOST_LOST_LOADS = 5  # guess: processes in a row that may be lost while they load
# guesses: how long a process has to serve for the next one to start at once, and the longest pause before it
STEADY_SECONDS, MOST_PAUSE = 30.0, 60.0

log = logging.getLogger("speculon")


class AsyncEngine:
    """One model in a process of its own, for one event loop.

    >>> engine = AsyncEngine({"model": "smollm2"})
    >>> await engine.start()
    >>> outputs = await engine.submit([Add("r-1", ids, SamplingParams(max_tokens=16))])

    A process that ends or hangs is replaced, where `serve.restart_engine` says so. The next one continues
    the requests that can be resumed (`OutputQueue.resumable`); the others end with the fault.
    """

    def __init__(self, settings: dict[str, Any], on_stage: Callable[[str], None] | None = None):
        self._settings, self._on_stage = settings, on_stage or (lambda name: None)
        config = EngineConfig(**settings)
        self._model, self._acceptance = config.model, config.speculation.acceptance
        self._timeout, self._restart = config.serve.engine_timeout, bool(config.serve.restart_engine)
        self._open: dict[str, OutputQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgetting: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count()
        self._ready: asyncio.Future[Ready] | None = None
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._loaded_at = self._lost_at = 0.0
        self._pause = 0.0  # seconds before the next process is started
        self._lost_loads = 0  # processes in a row that were lost while they loaded
        self.counters, self.load = EngineCounters(), Load(0, 0, 0)
        self.costs: dict[int, float] = {}  # sequences -> ms of a plain step
        self.facts: Ready | None = None  # None while a process loads
        self.restarts = self.resumed = 0  # processes after the first; requests that one of them resumed
        self.draining = False  # set where no other process is to be started
        self.error: SpeculonError | None = None  # why the engine has ended
        self.ended = asyncio.Event()  # set with `error`
        self.settled = asyncio.Event()  # set where no process is started again

    @property
    def alive(self) -> bool:
        return self.error is None

    @property
    def restarting(self) -> bool:
        return self.alive and self.restarts > 0 and self.facts is None

    @property
    def hung(self) -> bool:
        """Whether the process has work, and nothing came from it for `serve.engine_timeout` seconds."""
        return self._silent >= self._timeout

    @property
    def _silent(self) -> float:
        return self._process.silent if self._process is not None else 0.0

    @property
    def trouble(self) -> str | None:
        """Why no request can be served now; None where it can."""
        if self.error is not None:
            return f"the engine has ended: {self.error}"
        if self.facts is None:
            return "the model is being loaded again" if self.restarting else "the model is being loaded"
        return f"the engine has not answered for {self._silent:.0f} s" if self.hung else None

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def open_sequences(self) -> int:
        return sum(queue.open_sequences for queue in set(self._open.values()))

    async def start(self) -> Ready:
        """Loads the model, which takes seconds to minutes; raises what `LLM` would raise."""
        self._ready = asyncio.get_running_loop().create_future()
        self._begin()
        self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._ready)

    def _begin(self) -> None:
        self._process = EngineProcess(*self._launch(), self._handle, self._lose)

    def _launch(self) -> tuple[Any, Connection]:
        """The engine's process, started, and our end of the pipe to it."""
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_worker, args=(theirs, self._settings), name="speculon-engine", daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    async def submit(self, adds: Seq[Add]) -> OutputQueue:
        """Queues all of these requests or none; raises by name what cannot be served.

        Close the queue when done with it.
        """
        if self.error is not None:
            raise self.error
        if taken := next((add.request_id for add in adds if add.request_id in self._open), None):
            raise InvalidParameter("request_id", taken, "is in use")
        queue = OutputQueue(self, adds, self._acceptance)
        self._open.update({add.request_id: queue for add in adds})
        try:
            for add in adds:
                await self._send(add)
            await queue.admitted()
        except BaseException:
            queue.close()
            raise
        return queue

    def remove(self, request_id: str, *, abort: bool) -> None:
        """Drops the events that are still to come of a request."""
        if self._open.pop(request_id, None) is not None and abort:
            self.abort(request_id)

    async def forget_pools(self, tenant: str, pool: str | None) -> int:
        """Deletes the earlier answers of one pool, or of all of a tenant; returns how many pools."""
        if self.error is not None:
            raise self.error
        number = next(self._numbers)
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forgetting[number] = reply
        try:
            await self._send(ForgetPools(number, tenant, pool))
            return await reply
        finally:
            del self._forgetting[number]

    def abort(self, request_id: str) -> None:
        """Sends the abort of a request; its last event comes to its queue."""

        async def send() -> None:
            with contextlib.suppress(SpeculonError):  # there is nothing left to end
                await self._send(Abort(request_id))

        self._run(send())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort_all(self) -> None:
        """Aborts every request; its last event comes to its queue."""
        for request_id in self._open:
            self.abort(request_id)

    async def idle(self) -> None:
        """Returns once no request is open."""
        while self._open and self.alive:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends the process; running requests are lost."""
        reads = self.facts is not None and not self.hung  # nothing while it loads
        process, self._process = self._process, None
        if process is None:
            return
        if self._supervisor is not None:
            self._supervisor.cancel()
        self.fail(EngineError("the engine has been stopped"))
        await process.end(by_itself=reads)
        self.facts, self.load = None, Load(0, 0, 0)

    async def _send(self, message: FromServer) -> None:
        if self.facts is None or self._process is None:  # what it cannot read yet is no sign of a hung engine
            raise self.error or NotReady(self.trouble)
        try:
            await self._process.send(message)
        except RecursionError:
            raise InvalidRequest("the request is nested too deeply") from None
        except (OSError, RuntimeError) as error:  # the process has ended, or the server is about to
            raise self.error or NotReady(f"the engine cannot be reached: {error}") from None

    async def _supervise(self) -> None:
        """Sees a process that hangs, and starts another after one that was lost."""
        interval = min(1.0, self._timeout / 10)
        while self.alive and self._process is not None:
            if self._process.ended:
                await self._start_again(self._process)
            else:
                self._check_silence(self._process, interval)
            await asyncio.sleep(interval)

    def _check_silence(self, process: EngineProcess, seconds: float) -> None:
        was_hung, silent = self.hung, self._silent
        process.count_silence(seconds)
        if self.hung and not was_hung:
            if self._restart:
                self._lose(NotReady(self.trouble))
            else:
                log.error("%s; %d requests are open", self.trouble, self.open_requests)
        elif was_hung and not self.hung:
            log.warning("the engine answers again, after %.0f s", silent)

    def _lose(self, fault: SpeculonError) -> None:
        """The process has ended or hangs: another is started where that is allowed, else this is the end."""
        # while it loads for the first time, the settings are wrong
        first = self.facts is None and not self.restarts
        if not self._restart or self.draining or first or self._process is None:
            return self.fail(fault)
        self._lost_at = monotonic()
        if self.facts is None:  # while it was loaded again
            self._loaded_at, self._lost_loads = self._lost_at, self._lost_loads + 1
        if self._lost_loads > MOST_LOST_LOADS:
            return self.fail(fault)
        self._process.ended = True
        self.facts, self.load = None, Load(0, 0, 0)
        self.restarts += 1
        self.settled.clear()
        log.error("%s; it is started again (restart %d of %s)", fault, self.restarts, self._model)
        lost = {queue for queue in self._open.values() if not queue.resumable}
        self.fail_requests(NotReady(f"{fault}; it is started again, and this request is lost"), lost)

    async def _resume(self, queues: set[OutputQueue]) -> None:
        """Submits the rest of the requests that the process before has left."""
        with contextlib.suppress(SpeculonError):  # this process is lost, too: the next one is asked
            for queue in queues:
                for add in queue.rest():
                    if self._open.get(add.request_id) is queue:
                        self.resumed += 1
                        await self._send(add)

    async def _start_again(self, process: EngineProcess) -> None:
        """After a pause, which grows while processes end soon after they have loaded."""
        await process.end(by_itself=False)
        if self._lost_at - self._loaded_at > STEADY_SECONDS:
            self._pause = 0.0
        await asyncio.sleep(self._pause)
        self._pause = min(MOST_PAUSE, 2 * self._pause + 1)
        try:
            if self.alive:
                self._begin()
        except Exception as error:  # of threads, too
            log.exception("the engine's process cannot be started again")
            self.fail(EngineError(f"the engine's process cannot be started again: {type(error).__name__}"))

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Outputs(events):
                for event in events:
                    if queue := self._open.get(event.request_id):
                        queue.put(event)
            case Statistics(counters, load, _, costs):
                self.costs = costs
                self.counters, self.load = counters, load
            case Admitted(request_id):
                if queue := self._open.get(request_id):
                    queue.admit(request_id)
            case Refused(request_id, error):
                if not request_id:  # one that cannot load would fail once more
                    self.fail(error) if self.facts is None else self._lose(error)
                elif queue := self._open.get(request_id):
                    queue.fail(error)
            case PoolsForgotten(number, pools):
                if (reply := self._forgetting.get(number)) and not reply.done():
                    reply.set_result(pools)
            case Stage(name):
                self._on_stage(name)
            case Ready():
                self.facts, self._loaded_at, self._lost_loads = message, monotonic(), 0
                self.settled.set()
                if self.restarts:
                    log.warning("the engine serves again, after %.1f s", self._loaded_at - self._lost_at)
                    self._run(self._resume({queue for queue in self._open.values() if queue.resumable}))
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)

    def fail(self, error: SpeculonError) -> None:
        """The engine has ended, for this reason; so has every open request."""
        if self.error is not None:
            return
        self.error = error
        self.ended.set()
        self.settled.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # read once, or asyncio reports it as never retrieved
        self.fail_requests(error)

    def fail_requests(self, error: SpeculonError, queues: set[OutputQueue] | None = None) -> None:
        """These (None: all that are open) end with this error, and whatever waits for a reply."""
        for queue in set(self._open.values()) if queues is None else queues:
            queue.fail(error)
        for reply in self._forgetting.values():
            if not reply.done():
                reply.set_exception(error)


def run_worker(pipe: Connection, settings: dict[str, Any]) -> None:
    """The engine's process. What it imports here takes seconds, so the server does not import it."""
    from speculon.engine.build import build_engine
    from speculon.engine.worker import main

    main(pipe, settings, build_engine)
