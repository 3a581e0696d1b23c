"""One process of the engine as the server sees it: its pipe, and for how long nothing came through it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from typing import Any

from speculon.core.errors import EngineError, SpeculonError
from speculon.engine.messages import FromServer, FromWorker, Statistics, Stop

STOP_SECONDS = 10.0  # given to a process to end by itself


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
                    await self.send(Stop())
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
                loop.call_soon_threadsafe(self._lose, EngineError("the engine's process has ended"))
            except Exception as error:  # not to be unpickled
                fault = EngineError(f"a message of the engine cannot be read: {type(error).__name__}")
                loop.call_soon_threadsafe(self._lose, fault)

    def _deliver(self, message: FromWorker) -> None:
        if self.ended:
            return
        if isinstance(message, Statistics):
            self._read = message.read
            self._working = message.load.running + message.load.waiting > 0
        self._on_message(message)

    def _lose(self, fault: SpeculonError) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(fault)
