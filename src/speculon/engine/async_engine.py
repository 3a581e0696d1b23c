"""The asynchronous front door: an engine in a process of its own, requests as streams of events.

A thread would share the interpreter with templates, JSON and streams: a step of 8 ms was seen to take 13 to
31 ms beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing as mp
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from speculon.core import Event, Load
from speculon.engine.messages import (
    Abort,
    Add,
    Began,
    ForgetPools,
    FromServer,
    FromWorker,
    News,
    PoolsForgotten,
    Pulse,
    Ready,
    Refused,
    Stage,
    Stop,
)
from speculon.errors import EngineError, InvalidParameter, InvalidRequest, SpeculonError
from speculon.telemetry import EngineCounters

STOP_SECONDS = 10.0  # given to the engine's process to end by itself


class Mailbox:
    """The news of some requests, in batches as they come.

    What is not read waits here; it is never more than their texts.
    """

    def __init__(self, engine: AsyncEngine, asked: Seq[Add]):
        self._engine = engine
        self._open = {add.request_id: add.params.n for add in asked}  # texts that have not ended
        self._waiting = set(self._open)  # for admission
        self._events: list[Event] = []
        self._error: SpeculonError | None = None
        self._came = asyncio.Event()

    @property
    def open_texts(self) -> int:
        return sum(self._open.values())

    async def admitted(self) -> None:
        """Returns once the engine has taken every request; raises why it has not."""
        while self._waiting and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def take(self) -> list[Event]:
        """What has come since the last call, at least one event; none once all texts have ended.

        Raises the engine's fault.
        """
        while not self._events and any(self._open.values()) and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def put(self, event: Event) -> None:
        self._open[event.request_id] -= event.finish is not None
        self._events.append(event)
        self._came.set()

    def begin(self, request_id: str) -> None:
        self._waiting.discard(request_id)
        self._came.set()

    def fail(self, error: SpeculonError) -> None:
        self._error = error
        self._came.set()

    def abort(self) -> None:
        """Ends what has not ended by itself; the last news are still to be taken."""
        for request_id in (request_id for request_id, texts in self._open.items() if texts):
            self._engine.abort(request_id)

    def close(self) -> None:
        """Ends what has not ended by itself; its pages are free after the running step."""
        for request_id, texts in self._open.items():
            self._engine.forget(request_id, abort=texts > 0)

    async def _wait(self) -> None:
        self._came.clear()
        await self._came.wait()


class AsyncEngine:
    """One model in a process of its own, for one event loop.

    >>> engine = AsyncEngine({"model": "demo"})
    >>> await engine.start()
    >>> mailbox = await engine.submit([Add("r-1", ids, SamplingParams(max_tokens=16))])
    """

    def __init__(self, settings: dict[str, Any], on_stage: Callable[[str], None] | None = None):
        self._settings, self._on_stage = settings, on_stage or (lambda name: None)
        self._open: dict[str, Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgetting: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count()
        self._ready: asyncio.Future[Ready] | None = None
        self._process: Any = None
        self._pipe: Connection | None = None
        self._sender = ThreadPoolExecutor(1, "speculon-send")  # a full pipe must not hold up the event loop
        self.counters, self.load = EngineCounters(), Load(0, 0, 0)
        self.facts: Ready | None = None
        self.error: SpeculonError | None = None  # why there is no engine any more
        self.gone = asyncio.Event()  # set with `error`

    @property
    def alive(self) -> bool:
        return self.error is None

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def open_texts(self) -> int:
        return sum(mailbox.open_texts for mailbox in set(self._open.values()))

    async def start(self) -> Ready:
        """Loads the model, which takes seconds to minutes; raises what `LLM` would raise."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._process, self._pipe = self._launch()
        Thread(target=self._listen, args=(loop, self._pipe), name="speculon-news", daemon=True).start()
        return await asyncio.shield(self._ready)

    def _launch(self) -> tuple[Any, Connection]:
        """The engine's process, begun, and our end of the pipe to it."""
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_worker, args=(theirs, self._settings), name="speculon-engine", daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    async def submit(self, asked: Seq[Add]) -> Mailbox:
        """Queues all of these requests or none; raises by name what cannot be served.

        Close the mailbox when done with it.
        """
        if self.error is not None:
            raise self.error
        if taken := next((add.request_id for add in asked if add.request_id in self._open), None):
            raise InvalidParameter("request_id", taken, "is in use")
        mailbox = Mailbox(self, asked)
        self._open.update({add.request_id: mailbox for add in asked})
        try:
            for add in asked:
                await self._send(add)
            await mailbox.admitted()
        except BaseException:
            mailbox.close()
            raise
        return mailbox

    def forget(self, request_id: str, *, abort: bool) -> None:
        if self._open.pop(request_id, None) is not None and abort:
            self.abort(request_id)

    async def forget_pools(self, tenant: str, pool: str | None) -> int:
        """Deletes the earlier answers of one pool, or of all of a tenant; returns how many pools there were."""
        if self.error is not None:
            raise self.error
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forgetting[number] = answer
        try:
            await self._send(ForgetPools(number, tenant, pool))
            return await answer
        finally:
            del self._forgetting[number]

    def abort_all(self) -> None:
        """Ends every request, as far as it has come; its mailbox hears so."""
        for request_id in self._open:
            self.abort(request_id)

    async def idle(self) -> None:
        """Returns once no request is open."""
        while self._open and self.alive:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends the process; what runs is lost."""
        process, self._process = self._process, None
        if process is None:
            return
        self.lose(EngineError("the engine has been stopped"))
        if self.facts is None:  # it reads nothing while it loads
            process.kill()
        with contextlib.suppress(SpeculonError, TimeoutError):
            await asyncio.wait_for(self._send(Stop()), STOP_SECONDS)
        await asyncio.to_thread(process.join, STOP_SECONDS)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)
        self._sender.shutdown(wait=False)

    async def _send(self, message: FromServer) -> None:
        assert self._pipe is not None, "start() comes first"
        try:
            await asyncio.get_running_loop().run_in_executor(self._sender, self._pipe.send, message)
        except RecursionError:
            raise InvalidRequest("the request is nested too deeply") from None
        except (OSError, RuntimeError) as error:  # the process is gone, or the server is about to be
            raise self.error or EngineError(f"the engine cannot be reached: {error}") from None

    def abort(self, request_id: str) -> None:
        """Asks for a request's end; its mailbox hears of it."""

        async def send() -> None:
            with contextlib.suppress(SpeculonError):  # there is nothing left to end
                await self._send(Abort(request_id))

        task = asyncio.ensure_future(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen(self, loop: asyncio.AbstractEventLoop, pipe: Connection) -> None:
        """In a thread of its own: reads at once whatever comes, so that the engine never waits."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            try:
                while True:
                    loop.call_soon_threadsafe(self._hear, pipe.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(self.lose, EngineError("the engine's process has ended"))
            except Exception as error:  # what cannot be unpickled
                loop.call_soon_threadsafe(
                    self.lose, EngineError(f"the engine cannot be understood: {error!r}")
                )

    def _hear(self, message: FromWorker) -> None:
        match message:
            case News(events):
                for event in events:
                    if mailbox := self._open.get(event.request_id):
                        mailbox.put(event)
            case Pulse(counters, load):
                self.counters, self.load = counters, load
            case Began(request_id):
                if mailbox := self._open.get(request_id):
                    mailbox.begin(request_id)
            case Refused(request_id, error):
                if not request_id:
                    self.lose(error)
                elif mailbox := self._open.get(request_id):
                    mailbox.fail(error)
            case PoolsForgotten(number, pools):
                if (answer := self._forgetting.get(number)) and not answer.done():
                    answer.set_result(pools)
            case Stage(name):
                self._on_stage(name)
            case Ready():
                self.facts = message
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)

    def lose(self, error: SpeculonError) -> None:
        """There is no engine any more, and why."""
        if self.error is not None:
            return
        self.error = error
        self.gone.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may wait for it any more
        for mailbox in set(self._open.values()):
            mailbox.fail(error)
        for answer in self._forgetting.values():
            if not answer.done():
                answer.set_exception(error)


def run_worker(pipe: Connection, settings: dict[str, Any]) -> None:
    from speculon.engine.worker import main

    main(pipe, settings)
