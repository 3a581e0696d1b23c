"""The server's state behind its routes: the models, the capture, the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import time
from typing import Any, Protocol, TypeVar

from speculon.config import EngineConfig
from speculon.errors import InvalidRequest, NotReady
from speculon.server.access_log import AccessRecord
from speculon.server.answer import ABORT_SECONDS, Answer
from speculon.server.capture import Capture
from speculon.server.catalogue import Catalogue
from speculon.server.loader import Loader
from speculon.server.metrics import Metrics
from speculon.server.middleware import OPEN_PATHS
from speculon.server.pool import ENDS, ModelPool
from speculon.server.pooled import OnStage

T = TypeVar("T")

log = logging.getLogger("speculon.server")


class Observer(Protocol):
    """Follows the answers of a server, from open to close of the server."""

    def open(self) -> None: ...
    def begin(self, record: AccessRecord) -> None: ...
    def end(self, record: AccessRecord) -> None: ...
    async def close(self) -> None: ...


class AppState:
    """The models behind HTTP, and what they have in common. They load while the port is open already."""

    def __init__(self, catalogue: Catalogue, on_stage: OnStage | None = None, loader: Loader | None = None):
        self.catalogue, self.observers = catalogue, list[Observer]()
        self.config = EngineConfig(**catalogue.settings).serve
        self.pool = ModelPool(catalogue, self.config, self.read, loader, on_stage)
        self.capture = Capture.of(self.config)
        self.metrics = Metrics(self.pool.models, self.capture)
        self.started = int(time())
        # templates and long prompts are read beside the event loop
        self._reader = ThreadPoolExecutor(1, "speculon-read")

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        for observer in self.observers:
            observer.open()
        loading = asyncio.create_task(self.pool.start())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await asyncio.gather(*(one.close() for one in self.observers), return_exceptions=True)
            await self.pool.stop()
            self._reader.shutdown(wait=False, cancel_futures=True)
            if self.capture is not None:
                await self.capture.close()

    @property
    def draining(self) -> bool:
        return self.pool.draining

    def check_open(self) -> None:
        """Raises `NotReady` once the server takes no more requests."""
        if self.draining:
            raise NotReady(ENDS)

    def check_ready(self) -> None:
        self.check_open()
        self.pool.check_health()

    def drain(self) -> None:
        """Takes nothing more; requests that run beyond `drain_timeout` end there, with `abort`."""
        self.pool.drain()
        loop, timeout = asyncio.get_running_loop(), self.config.drain_timeout
        fault = NotReady(ENDS)
        for model in self.pool.models.values():
            loop.call_later(timeout, model.engine.abort_all)
            # an engine that hangs sends no last events
            loop.call_later(timeout + ABORT_SECONDS, model.engine.fail_requests, fault)

    async def read(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread beside the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def keep(self, answer: Answer) -> None:
        """Captures a complete answer, where the settings, the client and its key allow it."""
        if self.capture is not None:
            self.capture.take(answer)

    def begin(self, record: AccessRecord) -> None:
        """The engine has admitted the record's answer."""
        for observer in self.observers:
            observer.begin(record)

    def finish(self, record: AccessRecord) -> None:
        """Counts one request. Answers and refusals leave a log line; probes and scrapes do not."""
        record.close()
        self.metrics.observe(record)
        for observer in self.observers:
            observer.end(record)
        if record.answer is None and (record.status < 400 or record.route in OPEN_PATHS):
            return
        level = logging.ERROR if record.status >= 500 else logging.INFO
        log.log(level, record.as_json() if self.config.log_format == "json" else record.as_text())
