"""The file with the settings of each model: read whole, written whole or not at all."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic_settings import EnvSettingsSource, SettingsError

from speculon.core.config.engine import TABLES, EngineConfig, refuse_unknown_variables
from speculon.core.config.file import line_of, place, settings_file, syntax_error
from speculon.core.config.models.fields import (
    HOMES,
    POOL,
    SAMPLING,
    PoolSettings,
    check_field,
    conflict,
    home_of,
)
from speculon.core.config.models.merge import (
    Methods,
    ModelSettings,
    Source,
    absences,
    default_of,
    keywords_of,
    merge,
    of_table,
)
from speculon.core.config.models.written import edited, plain, read_exactly, replace, writing
from speculon.core.config.serve import ServeConfig
from speculon.core.errors import ConfigError, InvalidParameter

log = logging.getLogger("speculon.settings")

FILE = "speculon-models.toml"
TOP = "models"
ATTEMPTS = 5  # to write, while a program that takes no lock changes the file

Tables = dict[str, dict[str, Any]]  # name -> fields


def models_file(serve: ServeConfig) -> Path:
    """The file that the settings name, else the usual one beside `speculon.toml`; it may not exist yet."""
    beside = settings_file()
    return serve.models_file or (Path() if beside is None else beside.parent) / FILE


class ModelSettingsFile:
    """The settings of all models in one file. Each call reads the file anew.

    Writers of several processes wait for each other. A program that takes no lock, such as an editor, is
    noticed unless it writes within the microseconds between the last look and the replacement.
    """

    def __init__(self, path: Path, methods: Methods):
        self.path, self.methods = path, methods
        self._warned = set[str]()

    def names(self) -> dict[str, str]:
        """Every name that the file gives to a model, with that of its table. Raises `ConfigError`."""
        return names_in(self.tables())

    def tables(self) -> Tables:
        """The fields of each model as they are written. Raises `ConfigError` with the line of a fault."""
        return self._read(self._text())

    def settings_of(self, name: str, given: Mapping[str, Any] | None = None) -> ModelSettings:
        """The settings of a model, by any of its names; one without a table has those of all models.

        `given` are the keywords of `EngineConfig` that flags set, and a table `sampling`. A model with a
        table has its path there, or else its name is the path: flags and environment do not change it.

        Raises `ConfigError` for a wrong value, and for a conflict with a flag or the environment.
        """
        found = self._merged(self._text(), name, given or {})
        for warning in found.warnings:
            if warning not in self._warned:
                log.warning("%s: %s", found.name, warning)
        self._warned.update(found.warnings)
        return found

    def settings_after(
        self, name: str, changes: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> ModelSettings:
        """The settings that a model has once `update` has made these changes; nothing is written.

        Raises `InvalidParameter` for a field that is refused, `ConfigError` for a conflict with a flag.
        """
        found = self._merged(self._changed(self._text(), name, self._checked(changes)), name, given or {})
        for field, value in changes.items():
            if field in found.left_out:
                raise InvalidParameter(field, value, found.left_out[field])
        return found

    def update(self, name: str, changes: Mapping[str, Any]) -> None:
        """Sets fields of one model; None takes a field away. All of it is written, or nothing.

        Raises `InvalidParameter` for a change that is refused, `ConfigError` for a file that cannot be
        written.
        """
        if not name.strip():
            raise InvalidParameter("name", name, "a name has at least one character")
        fields = self._checked(changes)
        self._write(lambda text: self._changed(text, name, fields))

    def remove(self, name: str) -> None:
        """Takes a model's table away. Raises `InvalidParameter` where there is none."""

        def without(text: str) -> str:
            tables = self._read(text)
            if tables.pop(name, None) is None:
                raise InvalidParameter("name", name, f"{self.path} has no settings of that model")
            return self._edited(text, name, tables)

        self._write(without)

    def _merged(self, text: str, name: str, given: Mapping[str, Any]) -> ModelSettings:
        tables = self._read(text)
        name = names_in(tables).get(name, name)
        settings, left_out = merge(self._sources(text, name, tables.get(name), given), self.methods)
        keywords = keywords_of(given, settings)
        return ModelSettings(
            name=name,
            config=EngineConfig(**keywords),
            keywords=keywords,
            sampling=of_table(settings, SAMPLING),
            pool=PoolSettings(**of_table(settings, POOL)),
            left_out=left_out,
            settings=settings,
        )

    def _changed(self, text: str, name: str, fields: Mapping[str, Any]) -> str:
        """The text with these fields of a model. Raises `InvalidParameter` for a conflict."""
        tables = self._read(text)
        table = {**tables.get(name, {}), **fields}
        tables[name] = {field: value for field, value in table.items() if value is not None}
        refuse_conflicts(tables[name], fields)
        names_in(tables)
        return self._edited(text, name, tables)

    def _sources(
        self, text: str, name: str, table: Mapping[str, Any] | None, given: Mapping[str, Any]
    ) -> list[Source]:
        refuse_unknown_variables()
        flags, environment = flat(given), flat(environment_values())
        own: dict[str, Any] = {}
        if table is not None:
            own = {"model": name, **table}
            for others in (flags, environment):
                others.pop("model", None)
        beside = settings_file()
        sources = [
            Source("flag", flags),
            Source("environment", environment),
            Source("model's settings", own, True, lambda field: self._place(text, [TOP, name, field])),
            Source("", flat(read_toml(beside)), True, lambda field: place(keys_of(field), beside)),
        ]
        for source in sources:
            for field, value in source.values.items():
                try:
                    check_field(field, value)
                except InvalidParameter as error:
                    where = source.line_of(field)
                    raise ConfigError(f"{where}: {error}" if where else str(error)) from None
        return sources

    def _text(self) -> str:
        try:
            return read_exactly(self.path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _read(self, text: str) -> Tables:
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise syntax_error(error, self.path) from None
        for key in tables.keys() - {TOP}:
            raise self._fault(text, [key], f'{key}: unknown; settings are in tables [{TOP}."NAME"]')
        found = tables.get(TOP, {})
        if not isinstance(found, dict):
            raise self._fault(text, [TOP], f'{TOP}: settings are in tables [{TOP}."NAME"]')
        for name, table in found.items():
            if not isinstance(table, dict):
                raise self._fault(text, [TOP, name], f'{name}: settings are in a table [{TOP}."{name}"]')
            for field, value in table.items():
                try:
                    self._check(field, value)
                except InvalidParameter as error:
                    raise self._fault(text, [TOP, name, field], f"{TOP}.{name}.{error}") from None
        try:
            names_in(found)
        except InvalidParameter as error:
            raise self._fault(text, [TOP, str(error.value)], str(error)) from None
        return found

    def _place(self, text: str, keys: list[str]) -> str | None:
        line = line_of(text, keys)
        return f"{self.path}, line {line}" if line else None

    def _fault(self, text: str, keys: list[str], message: str) -> ConfigError:
        return ConfigError(f"{self._place(text, keys) or self.path}: {message}")

    def _check(self, field: str, value: Any) -> None:
        """Raises `InvalidParameter` for what is wrong whatever the other fields are."""
        check_field(field, value)
        if field == "method" and value not in self.methods.known:
            raise InvalidParameter(field, value, f"known are {', '.join(sorted(self.methods.known))}")

    def _checked(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """New values, as TOML has them: right by themselves, and a drafter is there."""
        fields = {field: plain(field, value) for field, value in changes.items()}
        for field, value in fields.items():
            if value is None:
                home_of(field)
                continue
            self._check(field, value)
            if field == "draft" and (reasons := absences(value, self.methods)):
                raise InvalidParameter(field, value, "; ".join(reasons.values()))
        return fields

    def _write(self, changed: Callable[[str], str]) -> None:
        """Changes the text that the file has now. A refused change leaves the file as it is."""
        try:
            with writing(self.path) as path:
                for _ in range(ATTEMPTS):
                    text = self._text()
                    if replace(path, text, changed(text)):
                        return
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror or error}") from None
        raise ConfigError(f"{self.path}: another program keeps changing it; nothing was written")

    def _edited(self, text: str, name: str, tables: Tables) -> str:
        """The text with this model's new table; all else in it stays as it is."""
        found = edited(text, TOP, name, tables.get(name))
        if tomllib.loads(found).get(TOP, {}) != tables:
            raise ConfigError(f"{self.path}: [{TOP}.{name}] is written in a form that cannot be edited")
        return found


def names_in(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every name of a model -> the name of its table. Raises `InvalidParameter` for one of two models."""
    found = {name: name for name in tables}
    for name, table in tables.items():
        served = table.get("served_model_name")
        for other in (*table.get("aliases", ()), *(() if served is None else (served,))):
            if found.setdefault(other, name) != name:
                raise InvalidParameter("name", other, f"of two models, {found[other]} and {name}")
    return found


def refuse_conflicts(table: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Raises `InvalidParameter` where a changed field contradicts another one of the model."""
    for field, value in changed.items():
        model = HOMES[field].model
        values = {name: one for name, one in table.items() if HOMES[name] == HOMES[field]}
        reason = conflict(model, values)
        if reason and conflict(model, {**values, field: default_of(field)}) != reason:
            raise InvalidParameter(field, value, reason)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model among keywords of `EngineConfig`, without their tables."""
    tables = {"", SAMPLING, *TABLES}
    found = {table: values if not table else values.get(table) or {} for table in tables}
    return {
        name: found[home.table][name]
        for name, home in HOMES.items()
        if home.table in tables and name in found[home.table]
    }


def keys_of(field: str) -> list[str]:
    """Of a field in `speculon.toml`."""
    return [key for key in (HOMES[field].table, field) if key]


def environment_values() -> dict[str, Any]:
    try:
        return EnvSettingsSource(EngineConfig)()
    except SettingsError as error:
        raise ConfigError(f"{error}: {error.__cause__}") from None


def read_toml(path: Path | None) -> dict[str, Any]:
    try:
        return {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise syntax_error(error) from None
