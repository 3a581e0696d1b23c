"""The server's state behind its routes: the engine, the model, the capture, the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import time
from typing import Any, TypeVar

from speculon.config import EngineConfig
from speculon.engine.async_engine import AsyncEngine
from speculon.engine.messages import Ready
from speculon.errors import EngineError, InvalidParameter, InvalidRequest, NotReady, QueueFull, SpeculonError
from speculon.server.access_log import AccessRecord
from speculon.server.answer import ABORT_SECONDS, Answer
from speculon.server.capture import Capture
from speculon.server.metrics import Metrics
from speculon.server.middleware import OPEN_PATHS
from speculon.server.model import ServedModel
from speculon.server.request import GenerationRequest
from speculon.text import Tokenizer

T = TypeVar("T")

log = logging.getLogger("speculon.server")


class AppState:
    """One model behind HTTP.

    `settings` are the fields of `EngineConfig`. The model loads while the port is open already.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        on_stage: Callable[[str], None] | None = None,
        engine: AsyncEngine | None = None,
        tokenizer: Callable[[], Tokenizer] | None = None,
    ):
        engine_config = EngineConfig(**settings)
        self.config, self._path = engine_config.serve, engine_config.model
        self._trust_remote_code = engine_config.trust_remote_code
        self._tokenizer = tokenizer or self._load_tokenizer
        self.name = self.config.served_model_name or engine_config.model
        self.engine = engine or AsyncEngine(settings, on_stage)
        self.capture = Capture.of(self.config)
        self.metrics = Metrics(self.engine, self.name, self.capture)
        self.started = int(time())
        self.draining = False
        self.loaded = asyncio.Event()
        self._model: ServedModel | None = None
        # templates and long prompts are read beside the event loop
        self._reader = ThreadPoolExecutor(1, "speculon-read")

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            self.draining = True
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self.engine.stop()
            self._reader.shutdown(wait=False, cancel_futures=True)
            if self.capture is not None:
                await self.capture.close()

    @property
    def model(self) -> ServedModel:
        """Raises `NotReady` while the model is loaded."""
        if self._model is None:
            raise NotReady("the model is being loaded")
        return self._model

    @property
    def facts(self) -> Ready:
        if self.engine.facts is None:
            raise NotReady(self.engine.trouble)
        return self.engine.facts

    def check_health(self) -> None:
        """Raises `NotReady` while the engine cannot serve: it loads, hangs, or has ended."""
        if self.engine.trouble is not None:
            raise NotReady(self.engine.trouble)
        _ = self.model

    def check_ready(self) -> None:
        if self.draining:
            raise NotReady("the server is about to end")
        self.check_health()

    def drain(self) -> None:
        """Takes nothing more; requests that run beyond `drain_timeout` end there, with `abort`."""
        self.draining = self.engine.draining = True
        loop, timeout = asyncio.get_running_loop(), self.config.drain_timeout
        loop.call_later(timeout, self.engine.abort_all)
        # an engine that hangs sends no last events
        fault = NotReady("the server is about to end")
        loop.call_later(timeout + ABORT_SECONDS, self.engine.fail_requests, fault)

    async def read(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread beside the event loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def check_room(self, request: GenerationRequest) -> None:
        """Raises where its sequences do not fit into the queue."""
        most = self.facts.max_num_seqs + self.config.max_queue
        room = most - self.engine.open_sequences
        if request.sequences > most:
            limit = f"{request.sequences} sequences in all, and this server holds at most {most}"
            raise InvalidParameter("n", request.params.n, limit)
        if request.sequences > room:
            raise QueueFull(f"{request.sequences} sequences requested, the queue has room for {max(0, room)}")

    async def submit(self, answer: Answer) -> None:
        """Submits every prompt of an answer to the engine, or none; there was room for it."""
        answer.begin(await self.engine.submit(answer.adds()), self.config.request_timeout)

    def keep(self, answer: Answer) -> None:
        """Captures a complete answer, where the settings, the client and its key allow it."""
        if self.capture is not None:
            self.capture.take(answer)

    def finish(self, record: AccessRecord) -> None:
        """Counts one request. Answers and refusals leave a log line; probes and scrapes do not."""
        record.close()
        self.metrics.observe(record)
        if record.answer is None and (record.status < 400 or record.route in OPEN_PATHS):
            return
        level = logging.ERROR if record.status >= 500 else logging.INFO
        log.log(level, record.as_json() if self.config.log_format == "json" else record.as_text())

    async def _load(self) -> None:
        try:
            facts = await self.engine.start()
            tokenizer = await self.read(self._tokenizer)
        except SpeculonError as error:
            return self.engine.fail(error)
        except Exception as error:
            log.exception("the model could not be loaded")
            return self.engine.fail(EngineError(f"{type(error).__name__}: {error}"))
        self._model = ServedModel(
            self.name, tokenizer, facts.max_context, facts.vocab_size, facts.method, self.config
        )
        self.loaded.set()

    def _load_tokenizer(self) -> Tokenizer:
        from speculon.models.tokenizer import load_tokenizer

        return Tokenizer(load_tokenizer(self._path, trust_remote_code=self._trust_remote_code))
