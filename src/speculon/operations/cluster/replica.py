"""A replica: one engine, which takes requests of the ingress and streams its events back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from filelock import FileLock

from speculon.core.config import EngineConfig
from speculon.core.errors import NotReady, SpeculonError
from speculon.engine.async_engine import AsyncEngine
from speculon.engine.messages import Add, Admitted, Outputs, Refused
from speculon.operations.cluster.messages import FromReplica, ReplicaLost, ReplicaStatistics, Taken
from speculon.operations.cluster.state import claim, forget

log = logging.getLogger("speculon")


class Replica:
    """Runs in a process of its own, beside that of its engine."""

    def __init__(
        self, name: str, settings: dict[str, Any], make: Callable[[dict[str, Any]], AsyncEngine] = AsyncEngine
    ):
        self.name, self._began = name, monotonic()
        # a fault of the engine is the end of the replica, and others continue its requests
        settings = {**settings, "serve": {**settings.get("serve", {}), "restart_engine": False}}
        self._lock: FileLock | None = None
        config = EngineConfig(**settings)
        self._folder = config.state  # of all replicas
        if self._folder is not None:
            settings["state"], self._lock = claim(self._folder, config.model)
        if config.events is not None:  # two processes cannot write one file
            settings["events"] = config.events.with_stem(f"{config.events.stem}-{name}")
        self.engine = make(settings)

    async def start(self) -> None:
        """Loads the model; raises what `LLM` would raise."""
        await self.engine.start()

    async def generate(self, add: Add) -> AsyncGenerator[FromReplica, None]:
        """The events of one request; ends the request where the reader leaves."""
        yield Taken(self.name)
        try:
            queue = await self.engine.submit([add])
        except SpeculonError as error:
            yield self._refusal(add, error)
            return
        try:
            yield Admitted(add.request_id)
            while events := await queue.take():
                yield Outputs(events)
        except SpeculonError as error:
            yield self._refusal(add, error)
        finally:
            queue.close()

    def _refusal(self, add: Add, error: SpeculonError) -> Refused:
        lost = not self.engine.alive or isinstance(error, NotReady)
        return Refused(add.request_id, ReplicaLost(f"{self.name}: {error}") if lost else error)

    def abort(self, request_ids: list[str]) -> None:
        """Of these requests those that are here; their last events are still sent."""
        self.engine.abort(request_ids)

    async def forget_pools(self, tenant: str, pool: str | None, only: str | None = None) -> int:
        """Here, and in the folders of replicas that have ended; nothing where `only` another is meant."""
        if only not in (None, self.name):
            return 0
        count = await self.engine.forget_pools(tenant, pool)
        if self._folder is None:
            return count
        return count + await asyncio.to_thread(forget, self._folder, tenant, pool)

    def statistics(self) -> ReplicaStatistics | None:
        """None once the engine has ended."""
        engine = self.engine
        if engine.facts is None or not engine.alive:
            return None
        return ReplicaStatistics(
            self.name,
            engine.facts,
            engine.counters,
            engine.load,
            monotonic() - self._began,
            engine.costs,
            open_requests=engine.open_requests,
        )

    def check_health(self) -> None:
        """Raises for an engine that has ended or hangs; its requests then continue elsewhere."""
        if self.engine.trouble is not None:
            fault = NotReady(self.engine.trouble)
            self.engine.fail(fault)
            raise fault

    async def stop(self) -> None:
        """Ends the engine, which keeps its state."""
        with suppress(SpeculonError):
            await self.engine.stop()
        if self._lock is not None:
            self._lock.release()
