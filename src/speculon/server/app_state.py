"""What all routes share: the models, the capture, the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from speculon.core.errors import InvalidRequest
from speculon.server.access_log import AccessRecord
from speculon.server.answer import Answer
from speculon.server.capture import Capture
from speculon.server.metrics import Metrics
from speculon.server.middleware import OPEN_PATHS
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest

if TYPE_CHECKING:
    from speculon.server.pool.pool import ModelPool

T = TypeVar("T")

IMAGE_READERS = 2  # threads: each has one decoded image at a time

log = logging.getLogger("speculon.server")


class RequestFollower(Protocol):
    def begin(self, record: AccessRecord) -> None: ...
    def end(self, record: AccessRecord) -> None: ...


class Administration(Protocol):
    """What the administration sees of a server: its requests, its start and its end."""

    @property
    def requests(self) -> RequestFollower: ...
    def open(self) -> None: ...
    def close(self) -> None: ...


class AppState:
    """The models behind HTTP, and what they have in common. They load while the port is open already."""

    def __init__(self, pool: ModelPool):
        self.pool, self.config = pool, pool.config
        self.admin: Administration | None = None  # set where it is on
        self.capture = Capture.of(self.config)
        self.metrics = Metrics(pool.models, self.capture)
        self.started = int(time())
        # templates and long prompts are read beside the event loop
        self._reader = ThreadPoolExecutor(1, "speculon-read")
        # images take longer, and a remote one seconds: texts must not wait for them
        self._image_readers = ThreadPoolExecutor(IMAGE_READERS, "speculon-images")

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        if self.admin is not None:
            self.admin.open()
        loading = asyncio.create_task(self.pool.start())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            if self.admin is not None:
                self.admin.close()
            await self.pool.stop()
            for readers in (self._reader, self._image_readers):
                readers.shutdown(wait=False, cancel_futures=True)
            if self.capture is not None:
                await self.capture.close()

    async def read(self, work: Callable[[], T], images: bool = False) -> T:
        """Runs `work` in a thread beside the event loop; what reads `images` in threads of its own."""
        readers = self._image_readers if images else self._reader
        try:
            return await asyncio.get_running_loop().run_in_executor(readers, work)
        except RecursionError:
            raise InvalidRequest("the body's JSON is nested too deeply") from None

    def keep(self, answer: Answer) -> None:
        """Captures a complete answer, where the settings, the client and its key allow it."""
        if self.capture is not None:
            self.capture.take(answer)

    async def begin(
        self,
        record: AccessRecord,
        tenant: str,
        answer_id: str,
        model: str | None,
        read: Callable[[ServedModel], GenerationRequest],
        make: Callable[..., Answer] = Answer,
        images: bool = False,
    ) -> Answer:
        """Reads a request against its model, which may have to be loaded, and submits it to the engine.

        The record has the answer once the engine has admitted it.
        """
        self.pool.check_open()
        async with self.pool.use(model) as pooled:
            served = pooled.model.under(self.pool.adapter_of(model))
            request = await self.read(partial(read, served), images)
            pooled.check_room(request)  # no other request comes in between: `submit` takes its place at once
            answer = make(answer_id, request, served, tenant)
            await answer.submit(pooled.engine)
        record.answer = answer
        if self.admin is not None:
            self.admin.requests.begin(record)
        return answer

    def finish(self, record: AccessRecord) -> None:
        """Counts one request. Answers and refusals leave a log line; probes and scrapes do not."""
        record.close()
        self.metrics.observe(record)
        if self.admin is not None:
            self.admin.requests.end(record)
        if record.answer is None and (record.status < 400 or record.route in OPEN_PATHS):
            return
        level = logging.ERROR if record.status >= 500 else logging.INFO
        log.log(level, record.as_json() if self.config.log_format == "json" else record.as_text())
