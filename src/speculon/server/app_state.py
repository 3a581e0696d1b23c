"""The server without its routes: the engine it owns, what it allows, what it keeps of every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import time
from typing import Any, TypeVar

from speculon.config import EngineConfig
from speculon.engine.async_engine import AsyncEngine, Mailbox
from speculon.engine.messages import Add, Ready
from speculon.errors import EngineError, InvalidParameter, InvalidRequest, NotReady, QueueFull, SpeculonError
from speculon.server.answer import Answer
from speculon.server.capture import Capture
from speculon.server.middleware import OPEN_PATHS
from speculon.server.request import House, Job
from speculon.server.metrics import Metrics
from speculon.server.access_log import Record
from speculon.text import Tokenizer

T = TypeVar("T")

log = logging.getLogger("speculon.server")


class Server:
    """One model behind HTTP.

    `settings` are the fields of `EngineConfig`; the model loads while the port is open already.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        on_stage: Callable[[str], None] | None = None,
        engine: AsyncEngine | None = None,
        tokenizer: Callable[[], Tokenizer] | None = None,
    ):
        engine_config = EngineConfig(**settings)
        self.config, self._model = engine_config.serve, engine_config.model
        self._trust = engine_config.trust_remote_code
        self._tokenizer = tokenizer or self._load_tokenizer
        self.name = self.config.served_model_name or self._model
        self.engine = engine or AsyncEngine(settings, on_stage)
        self.capture = Capture.of(self.config)
        self.metrics = Metrics(self.engine, self.name, self.capture)
        self.began = int(time())
        self.draining = False
        self.loaded = asyncio.Event()
        self._house: House | None = None
        # templates and long prompts: not on the event loop
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
    def house(self) -> House:
        """What requests are read against; raises `NotReady` while the model is loaded."""
        if self._house is None:
            raise NotReady("the model is being loaded")
        return self._house

    @property
    def facts(self) -> Ready:
        if self.engine.facts is None:
            raise NotReady("the model is being loaded")
        return self.engine.facts

    def check_engine(self) -> None:
        if self.engine.error is not None:
            raise NotReady(f"there is no engine any more: {self.engine.error}")

    def check_ready(self) -> None:
        if self.draining:
            raise NotReady("the server is about to end")
        self.check_engine()
        _ = self.house

    def drain(self) -> None:
        """Takes nothing more; what still runs after `drain_timeout` ends there, with `abort`."""
        self.draining = True
        asyncio.get_running_loop().call_later(self.config.drain_timeout, self.engine.abort_all)

    async def read(self, work: Callable[[], T]) -> T:
        """Runs `work`, which knows no event loop, beside it."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    async def submit(self, job: Job, answer_id: str, tenant: str) -> Mailbox:
        """Queues every prompt of a job, or none; `answer_id` is followed by the prompt's number.

        Whatever a job says of its pool, it is one of the tenant's: nobody drafts from answers to another key.
        """
        most = self.facts.max_num_seqs + self.config.max_queue
        room = most - self.engine.open_texts
        if job.texts > most:
            raise InvalidParameter(
                "n", job.params.n, f"{job.texts} texts in all, and this server holds at most {most}"
            )
        if job.texts > room:
            raise QueueFull(f"{job.texts} texts asked for, {max(0, room)} may still wait: ask again later")
        speculation = job.speculation.model_copy(update={"tenant": tenant})
        asked = [Add(f"{answer_id}-{i}", ids, job.params, speculation) for i, ids in enumerate(job.prompts)]
        return await self.engine.submit(asked)

    def keep(self, answer: Answer, tenant: str) -> None:
        """An answer has been given; its texts are captured where the settings, the client and its key allow
        it.
        """
        if self.capture is not None:
            self.capture.take(answer, tenant)

    def finish(self, record: Record) -> None:
        """One request is over. Texts and refusals leave a line; probes and scrapes do not."""
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
            return self.engine.lose(error)
        except Exception as error:
            log.exception("the model could not be loaded")
            return self.engine.lose(EngineError(f"{type(error).__name__}: {error}"))
        self._house = House(
            self.name, tokenizer, facts.max_context, facts.vocab_size, facts.method, self.config
        )
        self.loaded.set()

    def _load_tokenizer(self) -> Tokenizer:
        from speculon.models.load import load_tokenizer

        return Tokenizer(load_tokenizer(self._model, trust_remote_code=self._trust))
