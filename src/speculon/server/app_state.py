"""What all routes share: the models, the capture, the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from speculon.core.errors import InvalidRequest
from speculon.server.access_log import AccessRecord
from speculon.server.answer import Answer
from speculon.server.capture import Capture
from speculon.server.metrics import Metrics
from speculon.server.middleware import OPEN_PATHS

if TYPE_CHECKING:
    from speculon.operations.pool.pool import ModelPool

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

    def __init__(self, pool: ModelPool):
        self.pool, self.config, self.observers = pool, pool.config, list[Observer]()
        self.capture = Capture.of(self.config)
        self.metrics = Metrics(pool.models, self.capture)
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
