"""What page and API of the administration do, without HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

from speculon.core.config.models import ModelSettings, ModelSettingsFile, needs_new_worker
from speculon.core.config.speculation import AUTO
from speculon.core.errors import ConfigError, InvalidParameter, InvalidRequest, LoadFailed, SpeculonError
from speculon.operations.admin import settings as of_settings
from speculon.operations.admin.lines import LogRing
from speculon.operations.admin.overview import counts_of, engine_of
from speculon.operations.admin.requests import RequestLog
from speculon.operations.admin.schemas import DeviceMemory, Drafter, ModelOverview, ModelView, Overview
from speculon.operations.pool.catalogue import OfModel
from speculon.operations.pool.pooled import PooledModel
from speculon.server.access_log import AccessRecord
from speculon.server.app_state import AppState


class Admin:
    """The administration of one server. All methods belong to the event loop of the server."""

    def __init__(self, state: AppState, version: str = ""):
        self._version = version
        self._state, self._pool = state, state.pool
        self.requests = RequestLog(state.config.shows_texts)
        self.ring = LogRing()
        self._changing = asyncio.Lock()  # of settings, one after the other
        state.observers.append(self)

    def open(self) -> None:
        logging.getLogger("speculon").addHandler(self.ring)

    async def close(self) -> None:
        logging.getLogger("speculon").removeHandler(self.ring)

    def begin(self, record: AccessRecord) -> None:
        self.requests.begin(record)

    def end(self, record: AccessRecord) -> None:
        self.requests.end(record)

    def overview(self) -> Overview:
        tokens, rates = self.requests.tokens_by_model(), self.requests.rates()
        models = [
            ModelOverview(
                name=name,
                state=model.shown_state,
                since=model.since,
                error=None if model.error is None else str(model.error),
                requests_open=model.engine.open_requests,
                tokens=tokens.get(name, 0),
                tokens_per_second=rates.get(name, 0.0),
                held_bytes=model.held,
                engine=engine_of(model.engine),
            )
            for name, model in self._pool.models.items()
        ]
        return Overview(
            time=time(),
            started=self._state.started,
            version=self._version,
            draining=self._pool.draining,
            memory={
                device: DeviceMemory(total=total, free=self._pool.free(device))
                for device, total in self._pool.memory.items()
            },
            totals=counts_of(model.engine.counters for model in self._pool.models.values()),
            models=models,
        )

    async def models(self) -> list[ModelView]:
        """Every model with its settings. Raises `ConfigError` where the file has a fault."""
        return [await self.model(name) for name in self._pool.models]

    async def model(self, name: str) -> ModelView:
        """One model, by any of its names. Raises `UnknownModel`, `ConfigError`."""
        model = self._pool.find(name)
        return self._view(model, await asyncio.to_thread(self._settings_of, model))

    def _view(self, model: PooledModel, found: ModelSettings) -> ModelView:
        served = model.served
        return ModelView(
            name=model.name,
            aliases=list(found.pool.aliases),
            state=model.shown_state,
            default=model is self._pool.default,
            pinned=model.pinned,
            held_bytes=model.held,
            load_seconds=model.load_seconds,
            error=None if model.error is None else str(model.error),
            method=model.config.speculation.method if served is None else served.method,
            drafters=model.drafters,
            max_context=None if served is None else served.max_context,
            settings_file=str(self._file.path),
            locked=self._lock_of(model),
            settings=of_settings.fields_of(found, self._file.methods),
        )

    async def drafters_for(self, name: str, checkpoint: str | None = None) -> list[Drafter]:
        """Drafters of this model's engine, those that fit it beside its folder, and those of its settings and
        of the models' folder, which may not fit. With a checkpoint, that one alone.

        Raises `UnknownModel`.
        """
        model = self._pool.find(name)
        named = self._named_drafters(model) if checkpoint is None else [checkpoint]
        # beside the thread that reads prompts: to compare two tokenizers takes a while
        found = await asyncio.to_thread(self._pool.loader.drafters, model.config, named)
        loaded = {path: method for method, path in model.drafters.items()}
        views = {
            one.path: Drafter(
                name=Path(one.path).name,
                method=loaded.get(one.path, one.method),
                checkpoint=one.path,
                loaded=one.path in loaded,
                refusal=one.refusal,
                warnings=list(one.warnings),
            )
            for one in found
            if checkpoint is None or one.path == checkpoint
        }
        return sorted(views.values(), key=lambda one: (not one.loaded, one.refusal is not None))

    def _named_drafters(self, model: PooledModel) -> list[str]:
        folder, draft = self._state.config.models_dir, model.config.speculation.draft
        here = [str(folder / one if folder else one) for one in self._pool.drafters]
        drafts = draft.values() if isinstance(draft, dict) else [draft]
        texts = [one for one in drafts if isinstance(one, str) and one.partition(":")[0] != AUTO]
        return list(dict.fromkeys([*model.drafters.values(), *texts, *here]))

    async def change(self, name: str, changes: Mapping[str, Any]) -> ModelView:
        """Sets fields of a model; null takes a field out of the file.

        All is checked first. A loaded model that needs it is drained and loaded with the new settings, and
        only then the file is written: settings that fail to load are never in it. Where the load fails, the
        model is loaded with its old settings again.

        Raises `InvalidParameter` for a refused field, `ConfigError` for a conflict or a file that cannot be
        written, `LoadFailed` where the new settings do not load.
        """
        self._pool.check_open()
        model = self._pool.find(name)
        if not changes:
            raise InvalidParameter("changes", {}, "name at least one field")
        if (why := self._lock_of(model)) is not None:
            raise InvalidRequest(why)
        async with self._changing:
            self._pool.check_open()  # it may have waited for another change
            before = await asyncio.to_thread(self._settings_of, model)
            of_settings.check_unlocked(before, changes)
            given = self._given(model)
            after = await asyncio.to_thread(self._file.settings_after, model.name, changes, given)
            self._pool.check_aliases(model, after.pool.aliases)
            await self._apply(model, before, after, changes)
        return await self.model(model.name)

    async def unload(self, name: str) -> ModelView:
        """Raises `InvalidRequest` for the only model, `ConfigError` for a faulty file: nothing is done."""
        model = self._pool.find(name)
        async with self._changing:
            found = await asyncio.to_thread(self._settings_of, model)
            await self._pool.unload(model)
            return self._view(model, found)

    @property
    def _file(self) -> ModelSettingsFile:
        file = self._pool.catalogue.writable
        if file is None:
            raise InvalidRequest("this server was started without a file for the settings of models")
        return file

    def _lock_of(self, model: PooledModel) -> str | None:
        served = self._state.config.served_model_name
        if served is not None and model is self._pool.default:
            return f"served_model_name = {served!r} names this model: a table of the file cannot be its own"
        return None

    def _given(self, model: PooledModel) -> dict[str, Any]:
        catalogue = self._pool.catalogue
        return {**catalogue.settings, "model": catalogue.paths[model.name]}

    def _settings_of(self, model: PooledModel) -> ModelSettings:
        return self._file.settings_of(model.name, self._given(model))

    async def _apply(
        self, model: PooledModel, before: ModelSettings, after: ModelSettings, changes: Mapping[str, Any]
    ) -> None:
        new = OfModel(self._pool.catalogue.with_path(model.name, after.keywords), after.sampling, after.pool)
        old = model.own
        # the first table of a model changes `model`, and the catalogue has its path
        changed = before.changed(after) - {"model"}
        reloads = any(map(needs_new_worker, changed)) or not model.takes(new)
        try:
            await self._pool.replace(model, new, reloads=reloads)
        except SpeculonError as error:
            raise LoadFailed(f"the settings were not changed: {model.name!r} did not load: {error}") from None
        try:
            self._pool.check_open()  # while the server ends, a load may have been left out
            await asyncio.to_thread(self._file.update, model.name, changes)
        except (ConfigError, InvalidParameter):
            await self._pool.replace(model, old, reloads=reloads)
            raise
