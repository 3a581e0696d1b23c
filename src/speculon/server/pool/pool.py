"""The models of one server: loaded when they are used, within one account of memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from speculon.core.config import EngineConfig
from speculon.core.config.models import ModelSettings
from speculon.core.errors import (
    ConfigError,
    EngineError,
    InvalidParameter,
    InvalidRequest,
    LoadFailed,
    NoRoom,
    NotReady,
    SpeculonError,
    UnknownModel,
    shorten,
)
from speculon.server.answer import ABORT_SECONDS
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.loader import GB, ModelLoader
from speculon.server.pool.pooled import OnStage, PooledModel

RESERVE = 0.1  # guess: share of free memory that is left to the server itself and to other programs
ENDS = "the server is about to end"

log = logging.getLogger("speculon.server")


class ModelPool:
    """Models by name; the first is the default.

    A server with one model loads it at once, ends with its engine, and lets it measure free memory itself.
    """

    def __init__(
        self, catalogue: Catalogue, loader: ModelLoader | None = None, on_stage: OnStage | None = None
    ):
        self.catalogue, self.loader = catalogue, loader or ModelLoader()
        self.config = EngineConfig(**catalogue.settings).serve
        for name in self.config.pin:
            if name not in catalogue.paths:
                known = ", ".join(map(repr, catalogue.paths))
                raise ConfigError(f"pin = {name!r}: must be a model of this server: {known}")
        self.drafters, self.single = dict(catalogue.drafters), len(catalogue.paths) == 1
        self.models = {
            name: PooledModel(
                name,
                catalogue.settings_of(name),
                self.loader,
                on_stage,
                pinned=name in self.config.pin,
                alone=self.single,
            )
            for name in catalogue.paths
        }
        self._names = catalogue.names()
        self.default = next(iter(self.models.values()))
        self.memory: dict[str, int] = {}  # device -> bytes for all models there; with its first model
        self.draining = False
        self.started = asyncio.Event()  # the default model was loaded once
        self._placing = asyncio.Lock()  # one model at a time is given its share
        self._loading: dict[str, asyncio.Task[None]] = {}

    def free(self, device: str) -> int:
        """Bytes of a device that no model holds."""
        return self.memory[device] - sum(model.held for model in self._on(device))

    def _on(self, device: str) -> list[PooledModel]:
        return [model for model in self.models.values() if model.device == device]

    @property
    def open_requests(self) -> int:
        return sum(model.engine.open_requests for model in self.models.values())

    def find(self, name: str | None) -> PooledModel:
        """The model of a request. Raises `UnknownModel`, with the names that are known."""
        if name is None:
            return self.default
        if name in self._names:
            return self.models[self._names[name]]
        if adapter := self.adapter_of(name):
            return self.models[self._names[name.removesuffix(f":{adapter}")]]
        names = ", ".join(map(repr, self.served_names))
        what = f"is a drafter of method {self.drafters[name]}, not a model; " if name in self.drafters else ""
        raise UnknownModel(f"model = {shorten(name)}: {what}this server serves {names}")

    @property
    def served_names(self) -> list[str]:
        """The names of the models, each followed by the names of its adapters."""
        return [served for name, model in self.models.items() for served in (name, *model.adapter_names)]

    def adapter_of(self, name: str | None) -> str:
        """The adapter in a request's name, `model:adapter`; empty for a model itself, and unknown names."""
        if name is None or name in self._names:
            return ""
        base, _, adapter = name.rpartition(":")
        known = self._names.get(base)
        return adapter if known is not None and adapter in self.models[known].config.adapters else ""

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[PooledModel]:
        """The model of a request, loaded, and not ended before the request is submitted."""
        model = self.find(name)
        await model.steady.wait()
        if self.single:
            self.check_health()
        await self.load(model)
        with model.in_use():
            yield model

    async def load(self, model: PooledModel) -> None:
        """Returns once the model can be used. Many may wait for one load; each gets its fault."""
        model.waiting += 1
        try:
            while model.state != "loaded" or not model.engine.alive or model.engine.restarting:
                if self.draining or (self.single and model.lost.is_set()):
                    raise NotReady(ENDS)
                if model.state == "loaded" and model.engine.restarting:
                    await model.engine.settled.wait()
                elif model.state == "loaded":  # its end was not noticed yet
                    await model.fail(model.engine.error or NotReady(ENDS))
                elif model.state == "draining":
                    await self._next_change(model)
                else:
                    model.check_pause()
                    await self._one_load(model)
            _ = model.model  # raises where the engine hangs
        finally:
            model.waiting -= 1

    async def progress(self, model: PooledModel) -> AsyncIterator[dict[str, Any]]:
        """Loads the model; yields its states and the stages of loading. Raises the fault of the load."""
        with model.watched() as changes:
            loading = asyncio.ensure_future(self.load(model))
            loading.add_done_callback(lambda _: changes.put_nowait(None))
            try:
                while (change := await changes.get()) is not None:
                    if change["state"] == "loading":
                        yield change
                await loading
            finally:
                loading.cancel()
        yield {"model": model.name, "state": model.state, "seconds": round(model.load_seconds, 3)}

    async def unload(self, model: PooledModel) -> None:
        """Ends a model after its running requests, which have `drain_timeout` seconds."""
        if self.single:
            raise InvalidRequest(f"{model.name!r} is the only model of this server, so it cannot be unloaded")
        if task := self._loading.get(model.name):
            await asyncio.wait({task})
        if model.state == "loaded":
            await model.drain(self.config.drain_timeout)
            await self._end(model, "on request")
        while model.state == "draining":
            await self._next_change(model)

    async def replace(self, model: PooledModel, own: ModelSettings, *, reloads: bool) -> None:
        """Gives a model other settings. A loaded one is drained and loaded anew where that needs it.

        Requests that come meanwhile wait for its end. Where the load fails the old settings are loaded again,
        and the fault is raised.
        """
        if task := self._loading.get(model.name):
            await asyncio.wait({task})
        if not reloads or model.state not in ("loaded", "failed"):
            return self._adopt(model, own)
        old, was_loaded = model.own, model.state == "loaded"
        model.steady.clear()
        try:
            if was_loaded:
                await model.drain(self.config.drain_timeout)
                self._adopt(model, own)
                await self._end(model, "for other settings")
            else:
                self._adopt(model, own)
                model.forgive()
            await self.load(model)
        except SpeculonError:
            self._adopt(model, old)
            model.forgive()
            if was_loaded and not self.draining:
                try:  # the old settings loaded before; if they fail now, the model is lost
                    await self.load(model)
                finally:
                    if model.state == "failed":
                        model.lost.set()
            raise
        finally:
            model.steady.set()

    def check_aliases(self, model: PooledModel, aliases: tuple[str, ...]) -> None:
        """Raises `InvalidParameter` for a name of another model."""
        for alias in aliases:
            if self._names.get(alias, model.name) != model.name:
                raise InvalidParameter("aliases", alias, f"is already a name of {self._names[alias]!r}")

    def _adopt(self, model: PooledModel, own: ModelSettings) -> None:
        for alias in model.own.pool.aliases:
            if alias != model.name:
                self._names.pop(alias, None)
        model.adopt(own)
        self._names |= dict.fromkeys(own.pool.aliases, model.name)

    def check_health(self) -> None:
        """Raises `NotReady` unless the default model serves, or can be loaded when it is used."""
        model = self.default
        if self.single:
            _ = model.model
        elif model.state == "failed":
            model.check_pause()
        elif model.state == "loaded" and model.engine.trouble is not None:
            raise NotReady(model.engine.trouble)
        elif model.state in ("unloaded", "loading") and not model.loads:
            raise NotReady(str(model.error or "the model is being loaded"))

    async def start(self) -> None:
        """Loads the default model; its fault is the server's where there is no other."""
        try:
            await self.load(self.default)
            self.started.set()
        except NoRoom as error:
            log.error("%s", error)
        except SpeculonError as error:
            log.debug("%s", error)  # noted as a failure of the model, or the server is about to end

    def check_open(self) -> None:
        """Raises `NotReady` once the server takes no more requests."""
        if self.draining:
            raise NotReady(ENDS)

    def drain(self) -> None:
        """Takes nothing more; requests that run beyond `drain_timeout` end there, with `abort`."""
        self._close()
        self.end_requests(self.config.drain_timeout)

    def end_requests(self, seconds: float = 0.0) -> None:
        """Ends all requests that still run after these seconds, with `abort`."""
        loop = asyncio.get_running_loop()
        for model in self.models.values():
            loop.call_later(seconds, model.engine.abort_all)
            # an engine that hangs sends no last events
            loop.call_later(seconds + ABORT_SECONDS, model.engine.fail_requests, NotReady(ENDS))

    def _close(self) -> None:
        """No model is loaded any more; requests that wait for a load are refused."""
        self.draining = True
        for task in self._loading.values():
            task.cancel()
        for model in self.models.values():
            model.engine.draining = True

    async def stop(self) -> None:
        """Ends every process."""
        self._close()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        await asyncio.gather(*(model.end() for model in self.models.values()))

    async def ended(self) -> None:
        """Returns when a server with one model has lost it for good."""
        if not self.single:
            await asyncio.Event().wait()
        await self.default.lost.wait()

    async def _one_load(self, model: PooledModel) -> None:
        task = self._loading.get(model.name)
        if task is None:
            task = self._loading[model.name] = asyncio.create_task(self._load(model))
            task.add_done_callback(partial(self._forget, model.name))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by the end of the server
                raise NotReady(ENDS) from None
            raise
        except NotReady:
            raise
        except SpeculonError as error:
            raise LoadFailed(model.failure) from error

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # read once, or asyncio reports it as never retrieved

    async def _load(self, model: PooledModel) -> None:
        model.share = 0
        model.enter("loading")
        try:
            own = await asyncio.to_thread(self.catalogue.healed, model.name, model.own)
            if own is not model.own:
                self._adopt(model, own)
            await model.load(await self._place(model))
        except SpeculonError as error:
            if isinstance(error, NoRoom) and not self.single:  # no fault of the model
                model.error = error
                model.enter("unloaded")
            else:
                await model.fail(error)
            raise
        except Exception as error:
            log.exception("%s: the model could not be loaded", model.name)
            await model.fail(EngineError(f"{type(error).__name__}: {error}"))
            raise (model.error or error) from None
        if not self.single:
            log.info(
                "%s is loaded, after %.1f s%s", model.name, model.load_seconds, self._numbers(model.device)
            )

    async def _place(self, model: PooledModel) -> dict[str, Any]:
        """Gives a model its share of its device's memory; returns its settings with that limit."""
        if self.single and self.config.memory_gb is None:
            return model.own.keywords
        async with self._placing:
            device = model.device = await asyncio.to_thread(self.loader.device, model.config)
            if device not in self.memory:
                self.memory[device] = await self._limit(model)
            share = await asyncio.to_thread(self.loader.share, model.own.keywords, self.memory[device])
            await self._make_room(model, share.bytes)
            model.share = share.bytes
        return share.settings

    async def _limit(self, model: PooledModel) -> int:
        """Bytes for all models of a device, when its first one comes."""
        if self.config.memory_gb is not None:
            return int(self.config.memory_gb * GB)
        free = await asyncio.to_thread(self.loader.free_memory, model.config)
        return int(free * (1 - RESERVE))

    async def _make_room(self, model: PooledModel, needed: int) -> None:
        """Ends models without requests, the least recently used first; none where that raises `NoRoom`."""
        device = model.device
        idle = [other for other in self._on(device) if other.idle and not other.pinned]
        if needed <= self.free(device) + sum(other.held for other in idle):
            for other in sorted(idle, key=lambda other: other.used_at):
                if needed > self.free(device) and other.idle:  # a request may have come meanwhile
                    other.evictions += 1
                    other.enter("draining")  # at once: a request that is ready would take it
                    await asyncio.shield(self._end(other, f"for {model.name}"))
            if needed <= self.free(device):
                return
        raise NoRoom(self._refusal(model, needed))

    async def _end(self, model: PooledModel, why: str) -> None:
        await model.end()
        log.info("%s is unloaded, %s%s", model.name, why, self._numbers(model.device))

    def _refusal(self, model: PooledModel, needed: int) -> str:
        held = [
            f"{other.name} {gigabytes(other.held)} ({'pinned' if other.pinned else other.state})"
            for other in self._on(model.device)
            if other.held
        ]
        free, whole = gigabytes(self.free(model.device)), gigabytes(self.memory[model.device])
        room = f"{free} of {whole} GB are free on {model.device}"
        return f"{model.name} needs {gigabytes(needed)} GB, {room}; held by {', '.join(held) or 'nobody'}"

    def _numbers(self, device: str) -> str:
        return f"; {gigabytes(self.free(device))} GB are free on {device}" if device in self.memory else ""

    async def _next_change(self, model: PooledModel) -> None:
        with model.watched() as changes:
            await changes.get()


def gigabytes(size: int) -> str:
    return f"{size / GB:.2f}"
