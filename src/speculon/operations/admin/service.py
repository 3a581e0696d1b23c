"""What page and API of the administration do, without HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from time import time
from typing import Any

from pydantic import TypeAdapter

from speculon.checkpoints.hub import hub_id
from speculon.core.config.models import (
    HOMES,
    Methods,
    ModelSettings,
    ModelSettingsFile,
    default_value,
    home_of,
    needs_new_worker,
)
from speculon.core.config.speculation import AUTO, USUAL_DRAFTS
from speculon.core.errors import ConfigError, InvalidParameter, InvalidRequest, LoadFailed, SpeculonError
from speculon.operations.admin.figures import Figures, engine_view, sum_counts
from speculon.operations.admin.requests import RequestLog
from speculon.operations.admin.schemas import (
    DeviceMemory,
    DrafterFit,
    FieldView,
    LogLine,
    ModelOverview,
    ModelView,
    Overview,
)
from speculon.server.app_state import AppState
from speculon.server.pool.pooled import PooledModel

PLAIN_JSON: TypeAdapter[Any] = TypeAdapter(Any)
OF_THE_START = ("model", "served_model_name")
# what a remote administrator must not be able to set: it runs code, or writes where it says
UNSAFE = ("trust_remote_code", "allow_pickle", "events", "state")
SOURCES = {"flag": "flag", "environment": "environment", "model's settings": "model", "": "file"}
MOST_LINES = 1000  # of the log, in memory
MOST_CHARACTERS = 2000  # of a line


class LogRing(logging.Handler):
    """Keeps the latest records of the logger `speculon`; their texts are those of the log itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[LogLine] = deque(maxlen=MOST_LINES)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()[:MOST_CHARACTERS]
        except Exception:
            return self.handleError(record)
        self._count += 1
        line = {"time": record.created, "level": record.levelname, "logger": record.name, "text": text}
        self._lines.append(LogLine(number=self._count, **line))

    def latest(self, lines: int) -> list[LogLine]:
        """The oldest first. Raises `InvalidParameter`."""
        if not 1 <= lines <= MOST_LINES:
            raise InvalidParameter("lines", lines, f"must be from 1 to {MOST_LINES}")
        return list(self._lines)[-lines:]

    def since(self, number: int) -> list[LogLine]:
        """The lines after this number, the oldest first."""
        return [line for line in self._lines.copy() if line.number > number]


class Admin:
    """The administration of one server. All methods belong to the event loop of the server."""

    def __init__(self, state: AppState, version: str = ""):
        self.state, self._version, self._pool = state, version, state.pool
        self.requests = RequestLog(state.config.shows_texts)
        self.ring = LogRing()
        self._changing = asyncio.Lock()  # of settings, one after the other
        self.figures = Figures(self.overview)
        state.admin = self

    def open(self) -> None:
        logging.getLogger("speculon").addHandler(self.ring)

    def close(self) -> None:
        logging.getLogger("speculon").removeHandler(self.ring)

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
                engine=engine_view(model.engine),
            )
            for name, model in self._pool.models.items()
        ]
        return Overview(
            time=time(),
            started=self.state.started,
            version=self._version,
            draining=self._pool.draining,
            memory={
                device: DeviceMemory(total=total, free=self._pool.free(device))
                for device, total in self._pool.memory.items()
            },
            totals=sum_counts(model.engine.counters for model in self._pool.models.values()),
            models=models,
        )

    async def models(self) -> list[ModelView]:
        """Every model with its settings. Raises `ConfigError` where the file has a fault."""
        return [await self.model(name) for name in self._pool.models]

    async def model(self, name: str) -> ModelView:
        """One model, by any of its names. Raises `UnknownModel`, `ConfigError`."""
        model = self._pool.find(name)
        return self._view(model, await asyncio.to_thread(self._settings_of, model))

    def _view(self, model: PooledModel, settings: ModelSettings) -> ModelView:
        served = model.served
        return ModelView(
            name=model.name,
            aliases=list(settings.pool.aliases),
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
            locked=self._lock_reason(model),
            settings=field_views(settings, self._file.methods),
        )

    async def drafters_for(self, name: str, checkpoint: str | None = None) -> list[DrafterFit]:
        """Drafters of this model's engine, those that fit it beside its folder, and those of its settings and
        of the models' folder, which may not fit. With a checkpoint, that one alone.

        Raises `UnknownModel`.
        """
        model = self._pool.find(name)
        named = self._named_drafters(model) if checkpoint is None else [checkpoint]
        # beside the thread that reads prompts: to compare two tokenizers takes a while
        fits = await asyncio.to_thread(self._pool.loader.drafters, model.config, named)
        loaded = {path: method for method, path in model.drafters.items()}
        views = {
            fit.path: DrafterFit(
                name=hub_id(fit.path) or Path(fit.path).name,
                method=loaded.get(fit.path, fit.method),
                checkpoint=fit.path,
                loaded=fit.path in loaded,
                refusal=fit.refusal,
                warnings=list(fit.warnings),
            )
            for fit in fits
            if checkpoint is None or fit.path == checkpoint
        }
        return sorted(views.values(), key=lambda drafter: (not drafter.loaded, drafter.refusal is not None))

    def _named_drafters(self, model: PooledModel) -> list[str]:
        folder, draft = self.state.config.models_dir, model.config.speculation.draft
        here = [str(folder / name if folder else name) for name in self._pool.drafters]
        drafts = draft.values() if isinstance(draft, dict) else [draft]
        texts = [name for name in drafts if isinstance(name, str) and name.partition(":")[0] != AUTO]
        return list(dict.fromkeys([*model.drafters.values(), *texts, *here]))

    async def change(self, name: str, changes: Mapping[str, Any]) -> ModelView:
        """Sets fields of a model; null takes a field out of the file.

        All is checked first. A loaded model that needs it is drained and loaded with the new settings, and
        only then the file is written: settings that fail to load are never in it. Where the load fails, the
        model is loaded with its old settings again.

        Raises `InvalidParameter` for a refused field, `ConfigError` for a conflict that was there before and
        for a file that cannot be written, `LoadFailed` where the new settings do not load.
        """
        self._pool.check_open()
        model = self._pool.find(name)
        if not changes:
            raise InvalidParameter("changes", {}, "must have at least one field")
        if (why := self._lock_reason(model)) is not None:
            raise InvalidRequest(why)
        async with self._changing:
            self._pool.check_open()  # it may have waited for another change
            before = await asyncio.to_thread(self._settings_of, model)
            for field, value in changes.items():
                home_of(field, value)
                if (why := lock_reason(before, field)) is not None:
                    raise InvalidParameter(field, value, why)
            given = self._pool.catalogue.given(model.name)
            after = await asyncio.to_thread(self._file.settings_after, model.name, changes, given)
            self._pool.check_aliases(model, after.pool.aliases)
            await self._apply(model, before, after, changes, given)
        return await self.model(model.name)

    async def unload(self, name: str) -> ModelView:
        """Raises `InvalidRequest` for the only model, `ConfigError` for a faulty file: nothing is done."""
        model = self._pool.find(name)
        async with self._changing:
            settings = await asyncio.to_thread(self._settings_of, model)
            await self._pool.unload(model)
            return self._view(model, settings)

    @property
    def _file(self) -> ModelSettingsFile:
        file = self._pool.catalogue.writable
        if file is None:
            raise InvalidRequest("this server was started without a file for the settings of models")
        return file

    def _lock_reason(self, model: PooledModel) -> str | None:
        served = self.state.config.served_model_name
        if served is not None and model is self._pool.default:
            return (
                f"served_model_name = {served!r} names this model, so it can have no table in the file of "
                "models"
            )
        return None

    def _settings_of(self, model: PooledModel) -> ModelSettings:
        return self._file.settings_of(model.name, self._pool.catalogue.given(model.name))

    async def _apply(
        self,
        model: PooledModel,
        before: ModelSettings,
        after: ModelSettings,
        changes: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> None:
        old, new = model.own, self._pool.catalogue.adapted(model.name, after)
        # the first table of a model changes `model`, and the catalogue has its path
        changed = before.changed(after) - {"model"}
        reloads = any(map(needs_new_worker, changed)) or not model.takes(new)
        try:
            await self._pool.replace(model, new, reloads=reloads)
        except SpeculonError as error:
            raise LoadFailed(f"the settings were not changed: {model.name!r} did not load: {error}") from None
        try:
            self._pool.check_open()  # while the server ends, a load may have been left out
            await asyncio.to_thread(self._file.update, model.name, changes, given)
        except (ConfigError, InvalidParameter):
            await self._pool.replace(model, old, reloads=reloads)
            raise


def field_views(settings: ModelSettings, methods: Methods) -> list[FieldView]:
    choices = {"method": sorted(methods.known), "policy": list(USUAL_DRAFTS)}
    return [field_view(settings, name, choices.get(name)) for name in HOMES]


def field_view(settings: ModelSettings, name: str, choices: list[str] | None) -> FieldView:
    home, setting = HOMES[name], settings.fields.get(name)
    source = "default" if setting is None else SOURCES.get(setting.source, "default")
    return FieldView(
        name=name,
        group=home.table if home.table in ("speculation", "sampling", "pool") else "engine",
        value=as_json(settings.value(name)),
        default=as_json(default_value(name)),
        description=home.model.model_fields[name].description or "",
        value_schema=value_schema(name) | ({"enum": choices} if choices else {}),
        source=source,
        origin=settings.origin(name),
        locked=lock_reason(settings, name),
        new_worker=needs_new_worker(name),
    )


def lock_reason(settings: ModelSettings, name: str) -> str | None:
    """Why a field cannot be changed here; None: it can."""
    if name in OF_THE_START:
        return "set where the server is started"
    if name in UNSAFE:
        return "only in the file or by a flag: it can run code of a checkpoint, or write files"
    setting = settings.fields.get(name)
    if setting is not None and setting.source == "flag":
        return f"set by a flag, which goes before the file: --{name.replace('_', '-')}"
    if setting is not None and setting.source == "environment":
        return "set by the environment, which goes before the file"
    return None


@cache
def value_schema(name: str) -> dict[str, Any]:
    schema = HOMES[name].model.model_json_schema()
    field = dict(schema["properties"].get(name, {}))
    if "$ref" in json.dumps(field):
        field["$defs"] = schema.get("$defs", {})
    return field


def as_json(value: Any) -> Any:
    return PLAIN_JSON.dump_python(value, mode="json", fallback=str)
