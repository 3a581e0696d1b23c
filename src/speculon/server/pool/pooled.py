"""One model of the pool: its state, and its engine in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import monotonic, perf_counter, time
from typing import Any, Literal

from speculon.core.config import EngineConfig
from speculon.core.config.models import ModelSettings
from speculon.core.config.speculation import OFF
from speculon.core.errors import InvalidParameter, LoadFailed, NotReady, QueueFull, SpeculonError
from speculon.engine.async_engine import MAX_PAUSE, STEADY_SECONDS
from speculon.engine.messages import Ready
from speculon.server.answer import ABORT_SECONDS
from speculon.server.model import ServedModel, defaults_differ
from speculon.server.pool.loader import ModelLoader
from speculon.server.request import GenerationRequest

LoadState = Literal["unloaded", "loading", "loaded", "draining", "failed"]
OnStage = Callable[[str, str], None]  # what is loaded, and how far it is

IN_MEMORY: tuple[LoadState, ...] = ("loading", "loaded", "draining")

log = logging.getLogger("speculon.server")


class PooledModel:
    """One model of the pool. A process runs while it is loaded."""

    def __init__(
        self,
        name: str,
        own: ModelSettings,
        loader: ModelLoader,
        on_stage: OnStage | None = None,
        pinned: bool = False,
        alone: bool = False,
    ):
        self.served: ServedModel | None = None
        self._checkpoint_sampling: dict[str, Any] = {}  # defaults of requests that the checkpoint brings
        self.name, self._pin = name, pinned  # pinned whatever its own settings are
        self.adopt(own)
        self._loader, self._on_stage = loader, on_stage
        self._alone = alone  # the only model: its failure is the end of the server
        self.engine = loader.engine(own.keywords, self._note_stage)
        # settings of that engine while it was not started, which it can be once; what it was started with
        self._unstarted: dict[str, Any] | None = own.keywords
        self._started_with = self.config.speculation
        # cleared while it is loaded with other settings: a failure then is not the end of the server
        self.steady = asyncio.Event()
        self.steady.set()
        self._ending = False  # whether a process that failed may still hold its share
        self.state: LoadState = "unloaded"
        self.since, self.stage = time(), ""  # of the state; how far a load is
        self.error: SpeculonError | None = None  # why it failed last
        self.drafters: dict[str, str] = {}  # checkpoints by method, as the engine found them
        self.device, self.share = "", 0  # where it has how many bytes of the server's memory
        self.users = self.waiting = 0  # requests that are read or submitted; that wait for a load
        self.used_at = monotonic()
        self.loads = self.failures = self.evictions = 0
        self.load_seconds = 0.0
        self.lost = asyncio.Event()  # set with the first failure
        self._loaded_at = 0.0
        self._pause = self._retry_at = 0.0  # after a failure
        self._watchers: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def adapter_names(self) -> list[str]:
        """Under which its adapters are listed and requested."""
        return [f"{self.name}:{adapter}" for adapter in self.config.adapters]

    def adopt(self, own: ModelSettings) -> None:
        """Takes these settings. Those that belong to the process take effect with the next load."""
        self.own, self.config = own, own.config
        self.pinned = self._pin or own.pool.pinned
        if self.served is not None:
            self.served = self._with_defaults(self.served)

    def takes(self, own: ModelSettings) -> bool:
        """Whether its process can serve these settings, where they differ from its own in nothing but the
        defaults of requests.
        """
        if self.engine.facts is None:
            return False
        method = own.config.speculation.method
        capability = self.engine.facts.capabilities.get(f"methods.{method}")
        has = capability is not None and capability.status != "off"
        return method in (OFF, self._started_with.method) or has

    def _with_defaults(self, served: ServedModel) -> ServedModel:
        now = self.config.speculation
        changed = now if defaults_differ(self._started_with, now) else None
        defaults = dict(self._checkpoint_sampling)
        max_new_tokens = defaults.pop("max_tokens", None)
        return replace(
            served,
            sampling={**defaults, **self.own.sampling},
            max_new_tokens=max_new_tokens,
            speculation=changed,
        )

    def forgive(self) -> None:
        """It may be loaded at once, although a load has failed."""
        self._pause = self._retry_at = 0.0

    @property
    def facts(self) -> Ready:
        """Raises `NotReady` while the engine cannot tell."""
        if self.engine.facts is None:
            raise NotReady(self.engine.trouble)
        return self.engine.facts

    @property
    def model(self) -> ServedModel:
        """Raises `NotReady` while the engine cannot serve: it loads, hangs, or has ended."""
        if self.engine.trouble is not None:
            raise NotReady(self.engine.trouble)
        if self.served is None:
            raise NotReady("the model is being loaded")
        return self.served

    @property
    def shown_state(self) -> LoadState:
        """`loading`, too, while its process is started again."""
        return "loading" if self.state == "loaded" and self.engine.restarting else self.state

    @property
    def held(self) -> int:
        """Bytes of its share, while its process may hold them."""
        return self.share if self.state in IN_MEMORY or self._ending else 0

    @property
    def drained(self) -> bool:
        return not self.users and not self.engine.open_requests

    @property
    def idle(self) -> bool:
        """Whether it can be ended without harm to a request."""
        return self.state == "loaded" and self.drained and not self.waiting

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """It is not ended meanwhile."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self.used_at = monotonic()

    @contextmanager
    def watched(self) -> Iterator[asyncio.Queue[dict[str, Any] | None]]:
        """A queue of what changes: states, and the stages of loading."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield queue
        finally:
            self._watchers.discard(queue)

    def check_pause(self) -> None:
        """Raises `LoadFailed` in the pause after a failure."""
        if self.state == "failed" and (left := self._retry_at - monotonic()) > 0:
            raise LoadFailed(f"{self.failure}; the next attempt is possible in {left:.0f} s")

    @property
    def failure(self) -> str:
        return f"model {self.name!r} could not be loaded: {type(self.error).__name__}: {self.error}"

    async def load(self, settings: dict[str, Any]) -> None:
        """Loads it with these settings, which limit its memory. Raises what engine or tokenizer raises."""
        began = perf_counter()
        if settings != self._unstarted:
            self.engine = self._loader.engine(settings, self._note_stage)
        self._unstarted, self._started_with = None, EngineConfig(**settings).speculation
        facts = await self.engine.start()
        tokenizer = await asyncio.to_thread(self._loader.tokenizer, self.config)
        self._checkpoint_sampling = await asyncio.to_thread(self._loader.sampling, self.config)
        if not tokenizer.has_chat_template:
            log.warning("%s has no chat template, so it serves completions and refuses chats", self.name)
        config = self.config.serve
        served = ServedModel(self.name, tokenizer, facts.max_context, facts.vocab_size, facts.method, config)
        served = replace(served, images=self._loader.images(self.config))
        if (row := facts.capabilities.get("images")) and row.status == "on":
            await asyncio.to_thread(served.images.load)  # the first request with an image would wait for it
        self.served = self._with_defaults(served)
        self.drafters = facts.drafters
        self.loads, self.load_seconds = self.loads + 1, perf_counter() - began
        self._loaded_at = self.used_at = monotonic()
        self.error = None
        self.enter("loaded")
        self._watching = asyncio.create_task(self._notice_end())

    async def fail(self, error: SpeculonError) -> None:
        """The load has failed, or the engine has ended, for this reason; a pause follows."""
        self.engine.fail(error)
        if self.state == "loaded" and monotonic() - self._loaded_at > STEADY_SECONDS:
            self._pause = 0.0
        self._retry_at = monotonic() + self._pause
        self._pause = min(MAX_PAUSE, 2 * self._pause + 1)
        self.error, self.served, self.failures = error, None, self.failures + 1
        self.enter("failed")
        if self.steady.is_set():
            self.lost.set()
        if not self._alone or not self.steady.is_set():
            log.error("%s: %s: %s", self.name, type(error).__name__, error)
            self._ending = True
            await self.engine.stop()
            self._ending = False

    async def end(self) -> None:
        """Ends its process; what runs in it is lost."""
        self.enter("draining")
        await self.engine.stop()
        self.served = None
        self.enter("unloaded")

    async def drain(self, seconds: float) -> None:
        """Running requests have so many seconds; no other comes."""
        self.enter("draining")
        self.engine.draining = True
        if not await self._drains(seconds):
            self.engine.abort_all()
            await self._drains(ABORT_SECONDS)

    async def _drains(self, seconds: float) -> bool:
        """Whether its last request ends within so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.drained:
                    await asyncio.sleep(0.02)
        return self.drained

    def enter(self, state: LoadState) -> None:
        self.state, self.since, self.stage = state, time(), ""
        self._tell({"model": self.name, "state": state})

    def check_room(self, request: GenerationRequest) -> None:
        """Raises where its sequences do not fit into the queue."""
        most = self.facts.max_num_seqs + self.config.serve.max_queue
        room = most - self.engine.open_sequences
        if request.sequences > most:
            limit = (
                f"the request has {request.sequences} sequences in all, and this server holds at most {most}"
            )
            raise InvalidParameter("n", request.params.n, limit)
        if request.sequences > room:
            raise QueueFull(
                f"{request.sequences} sequences requested, but the queue has room for {max(0, room)}; try "
                "again later"
            )

    async def _notice_end(self) -> None:
        engine = self.engine
        await engine.ended.wait()
        if self.engine is engine and self.state == "loaded" and engine.error is not None:
            await self.fail(engine.error)

    def _note_stage(self, stage: str) -> None:
        self.stage = stage
        if self._on_stage is not None:
            self._on_stage(self.config.model, stage)
        self._tell({"model": self.name, "state": "loading", "stage": stage})

    def _tell(self, change: dict[str, Any]) -> None:
        for queue in self._watchers:
            queue.put_nowait(change)
