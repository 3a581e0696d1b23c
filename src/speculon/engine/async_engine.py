"""The engine in a process of its own, whose outputs come as streams of events.

A thread would share the interpreter with templates, JSON and streams: beside them a step of 8 ms took 13 to
31 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing as mp
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from time import monotonic
from typing import Any

from speculon.core.errors import EngineError, InvalidRequest, NotReady, SpeculonError
from speculon.core.types import Load
from speculon.engine.client import EngineClient
from speculon.engine.messages import (
    Abort,
    Admitted,
    EngineStatistics,
    ForgetPools,
    FromServer,
    FromWorker,
    Outputs,
    PoolsForgotten,
    Ready,
    Refused,
    Shutdown,
    Stage,
)
from speculon.engine.waiting import OutputQueue
from speculon.engine.worker import main as run_worker

MAX_LOST_LOADS = 5  # guess: processes in a row that may be lost while they load
# guesses: how long a process has to serve for the next one to start at once, and the longest pause before it
STEADY_SECONDS, MAX_PAUSE = 30.0, 60.0
NATIVE_FAULT = (
    ", a fault of native code; on runtime llama, --no-repack, --gpu-layers 0 or --runtime torch may avoid it"
)
STOP_SECONDS = 10.0  # given to a process to end by itself

log = logging.getLogger("speculon")


def how_it_ended(code: int | None) -> str:
    """What the exit code of a process tells beyond its end; empty for nothing."""
    if code is None or code >= 0:
        return ""
    name = signal.Signals(-code).name
    native = name in ("SIGILL", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE")
    return f" by {name}" + NATIVE_FAULT * native


class EngineProcess:
    """One process of the engine. It calls back on the event loop of its making, until it has `ended`."""

    def __init__(
        self,
        process: Any,
        pipe: Connection,
        on_message: Callable[[FromWorker], None],
        on_end: Callable[[SpeculonError], None],
    ):
        self._process, self._pipe = process, pipe
        self._on_message, self._on_end = on_message, on_end
        # a full pipe must not block the event loop
        self._sender = ThreadPoolExecutor(1, "speculon-send")
        self._sent = self._received = 0  # messages, as the threads count them
        self._read = 0  # of those sent, by the engine
        self._working = False  # whether the engine had sequences, by its last statistics
        self._received_before = 0  # the last call of `count_silence`
        self.silent = 0.0  # seconds without a message although there is work
        self.ended = False  # or given up: what it still sends counts for nothing
        loop = asyncio.get_running_loop()
        Thread(target=self._receive, args=(loop,), name="speculon-receive", daemon=True).start()

    async def send(self, message: FromServer) -> None:
        """Returns once the message is in the pipe; a closed pipe is an `OSError` or a `RuntimeError`."""
        await asyncio.get_running_loop().run_in_executor(self._sender, self._write, message)

    def count_silence(self, seconds: float) -> None:
        """To be called every so many seconds."""
        # not by a clock, which goes on while the server itself is stopped
        heard, self._received_before = self._received != self._received_before, self._received
        busy = self._working or self._sent > self._read
        self.silent = self.silent + seconds if busy and not heard else 0.0

    async def end(self, *, by_itself: bool) -> None:
        """Asks the process to end, or kills it at once; it has ended when this returns."""
        self.ended = True
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            if by_itself:
                async with asyncio.timeout(STOP_SECONDS):
                    await self.send(Shutdown())
                    await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._sender.shutdown(wait=False)

    def _write(self, message: FromServer) -> None:
        data = ForkingPickler.dumps(message)  # may fail; then nothing is sent
        self._sent += 1
        self._pipe.send_bytes(data)

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: reads every message at once, so that the engine never waits."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            try:
                while True:
                    message = self._pipe.recv()
                    self._received += 1
                    loop.call_soon_threadsafe(self._deliver, message)
            except (EOFError, OSError):
                self._process.join(1.0)
                fault = EngineError(f"the engine's process has ended{how_it_ended(self._process.exitcode)}")
                loop.call_soon_threadsafe(self._lose, fault)
            except Exception as error:  # not to be unpickled
                fault = EngineError(
                    f"a message of the engine's process could not be read: {type(error).__name__}"
                )
                loop.call_soon_threadsafe(self._lose, fault)

    def _deliver(self, message: FromWorker) -> None:
        if self.ended:
            return
        if isinstance(message, EngineStatistics):
            self._read = message.read
            self._working = message.load.running + message.load.waiting > 0
        self._on_message(message)

    def _lose(self, fault: SpeculonError) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(fault)


class AsyncEngine(EngineClient):
    """One model in a process of its own, for one event loop.

    >>> engine = AsyncEngine({"model": "smollm2"})
    >>> await engine.start()
    >>> outputs = await engine.submit([Add("r-1", ids, SamplingParams(max_tokens=16))])

    A process that ends or hangs is replaced, where `serve.restart_engine` says so. The next one continues
    the requests that can be resumed (`OutputQueue.resumable`); the others end with the fault.
    """

    def __init__(self, settings: dict[str, Any], on_stage: Callable[[str], None] | None = None):
        super().__init__(settings, on_stage)
        serve = self._config.serve
        self._timeout, self._restart = serve.engine_timeout, bool(serve.restart_engine)
        self._forgetting: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count()
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._loaded_at = self._lost_at = 0.0
        self._pause = 0.0  # seconds before the next process is started
        self._lost_loads = 0  # processes in a row that were lost while they loaded

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
        if self.error is not None:
            return f"the engine has ended: {self.error}"
        if self.facts is None:
            return "the model is being loaded again" if self.restarting else "the model is being loaded"
        return f"the engine has not answered for {self._silent:.0f} s" if self.hung else None

    async def start(self) -> Ready:
        """Loads the model, which takes seconds to minutes; raises what `LLM` would raise."""
        self._begin()
        self._supervisor = asyncio.create_task(self._supervise())
        return await self._wait_until_served()

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

    async def _begin_requests(self, queue: OutputQueue) -> None:
        for request in queue.requests.values():
            await self._send(request.add)

    def abort(self, request_ids: list[str]) -> None:
        async def send() -> None:
            with contextlib.suppress(SpeculonError):  # there is nothing left to end
                for request_id in request_ids:
                    await self._send(Abort(request_id))

        if request_ids:
            self._run(send())

    def end(self, queue: OutputQueue) -> None:
        self.abort(self._requests.remove(queue))

    async def forget_pools(self, tenant: str, pool: str | None) -> int:
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
            raise InvalidRequest("the request's JSON is nested too deeply") from None
        except (OSError, RuntimeError) as error:  # the process has ended, or the server is about to
            raise self.error or NotReady(f"the engine's process cannot be reached: {error}") from None

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
                log.error("%s; %d requests wait for it", self.trouble, self.open_requests)
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
        if self._lost_loads > MAX_LOST_LOADS:
            return self.fail(fault)
        self._process.ended = True
        self.facts, self.load = None, Load(0, 0, 0)
        self.restarts += 1
        self.settled.clear()
        log.error("%s; it is started again (restart %d of %s)", fault, self.restarts, self._config.model)
        lost = {queue for queue in self._requests.queues if not queue.resumable}
        self.fail_requests(
            NotReady(f"{fault}; it is started again, but this request is lost: send it again"), lost
        )

    async def _resume(self, queues: set[OutputQueue]) -> None:
        """Submits the rest of the requests that the process before has left."""
        with contextlib.suppress(SpeculonError):  # this process is lost, too: the next one is asked
            for queue in queues:
                for add in queue.rest():
                    if self._requests.get(add.request_id) is queue:
                        self.resumed += 1
                        await self._send(add)

    async def _start_again(self, process: EngineProcess) -> None:
        """After a pause, which grows while processes end soon after they have loaded."""
        await process.end(by_itself=False)
        if self._lost_at - self._loaded_at > STEADY_SECONDS:
            self._pause = 0.0
        await asyncio.sleep(self._pause)
        self._pause = min(MAX_PAUSE, 2 * self._pause + 1)
        try:
            if self.alive:
                self._begin()
        except Exception as error:  # of threads, too
            log.exception("the engine's process cannot be started again")
            self.fail(EngineError(f"the engine's process cannot be started again: {type(error).__name__}"))

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Outputs(events):
                self._requests.put(events)
            case EngineStatistics(counters, load, _, costs, capabilities):
                self.costs = costs
                self.counters, self.load = counters, load
                if capabilities is not None and self.facts is not None:
                    self.facts = replace(self.facts, capabilities=capabilities)
            case Admitted(request_id):
                if queue := self._requests.get(request_id):
                    queue.admit(request_id)
            case Refused(request_id, error):
                if not request_id:  # one that cannot load would fail once more
                    self._lose(error) if self.facts is not None else self._fail_load(error)
                elif queue := self._requests.get(request_id):
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
                    self._run(self._resume({queue for queue in self._requests.queues if queue.resumable}))

    def _fail_load(self, fault: SpeculonError) -> None:
        """Requests that wait for another process do not know the load, so their fault names the model."""
        again = NotReady(f"{self._config.model} could not be loaded again: {fault}")
        self.fail(again if self.restarts else fault)

    def fail_requests(self, error: SpeculonError, queues: set[OutputQueue] | None = None) -> None:
        """Whatever waits for a reply ends with it, too."""
        super().fail_requests(error, queues)
        for reply in self._forgetting.values():
            if not reply.done():
                reply.set_exception(error)
