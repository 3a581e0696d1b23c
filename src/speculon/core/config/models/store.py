"""The file with the settings of each model: read whole, written whole or not at all."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from speculon.core.config.engine import TABLES, EngineConfig, readable, refuse_unknown_variables
from speculon.core.config.file import line_of, place, settings_file, syntax_error
from speculon.core.config.models.fields import HOMES, SAMPLING, check_field, conflict, default_value, home_of
from speculon.core.config.models.merge import Methods, ModelSettings, Source, absences
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
        settings = self._merged(self._text(), name, given or {})
        for warning in settings.warnings:
            if warning not in self._warned:
                log.warning("%s: %s", settings.name, warning)
        self._warned.update(settings.warnings)
        return settings

    def settings_after(
        self, name: str, changes: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> ModelSettings:
        """The settings that a model has once `update` has made these changes; nothing is written.

        Raises `InvalidParameter` for a field that is refused, `ConfigError` for a conflict with a flag.
        """
        text = self._changed(self._text(), name, self._checked(changes))
        settings = self._merged(text, name, given or {})
        for field, value in changes.items():
            if field in settings.left_out:
                raise InvalidParameter(field, value, settings.left_out[field])
        return settings

    def update(self, name: str, changes: Mapping[str, Any]) -> None:
        """Sets fields of one model; None takes a field away. All of it is written, or nothing.

        Raises `InvalidParameter` for a change that is refused, `ConfigError` for a file that cannot be
        written.
        """
        if not name.strip():
            raise InvalidParameter("name", name, "a name has at least one character")
        fields = self._checked(changes)
        try:
            with writing(self.path) as path:
                for _ in range(ATTEMPTS):
                    text = self._text()
                    if replace(path, text, self._changed(text, name, fields)):
                        return
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror or error}") from None
        raise ConfigError(f"{self.path}: another program keeps changing it; nothing was written")

    def _merged(self, text: str, name: str, given: Mapping[str, Any]) -> ModelSettings:
        tables = self._read(text)
        name = names_in(tables).get(name, name)
        return ModelSettings(name, given, self._sources(text, name, tables.get(name), given), self.methods)

    def _changed(self, text: str, name: str, fields: Mapping[str, Any]) -> str:
        """The text with these fields of a model; all else in it stays. Raises `InvalidParameter`."""
        tables = self._read(text)
        table = {**tables.get(name, {}), **fields}
        tables[name] = {field: value for field, value in table.items() if value is not None}
        refuse_conflicts(tables[name], fields)
        names_in(tables)
        changed = edited(text, TOP, name, tables[name])
        if tomllib.loads(changed).get(TOP, {}) != tables:
            raise ConfigError(f"{self.path}: [{TOP}.{name}] is written in a form that cannot be edited")
        return changed

    def _sources(
        self, text: str, name: str, table: Mapping[str, Any] | None, given: Mapping[str, Any]
    ) -> list[Source]:
        refuse_unknown_variables()
        beside = settings_file()
        with readable():
            environment_values = EnvSettingsSource(EngineConfig)()
            file_values = TomlConfigSettingsSource(EngineConfig, beside)()
        flags, environment = Source("flag", flat(given)), Source("environment", flat(environment_values))
        others = Source("", flat(file_values), True, lambda field: place(keys_of(field), beside))
        for source in (flags, environment, others):
            for field, value in source.values.items():
                try:
                    check_field(field, value)
                except InvalidParameter as error:
                    where = source.line_of(field)
                    raise ConfigError(f"{where}: {error}" if where else str(error)) from None
        if table is None:
            return [flags, environment, others]
        for source in (flags, environment):
            source.values.pop("model", None)
        own = {"model": name, **table}
        lines = partial(self._line, text, TOP, name)
        return [flags, environment, Source("model's settings", own, True, lines), others]

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
        models: Tables = tables.get(TOP, {})
        if not isinstance(models, dict):
            raise self._fault(text, [TOP], f'{TOP}: settings are in tables [{TOP}."NAME"]')
        for name, table in models.items():
            if not isinstance(table, dict):
                raise self._fault(text, [TOP, name], f'{name}: settings are in a table [{TOP}."{name}"]')
            for field, value in table.items():
                try:
                    self._check(field, value)
                except InvalidParameter as error:
                    raise self._fault(text, [TOP, name, field], f"{TOP}.{name}.{error}") from None
        try:
            names_in(models)
        except InvalidParameter as error:
            raise self._fault(text, [TOP, str(error.value)], str(error)) from None
        return models

    def _line(self, text: str, *keys: str) -> str | None:
        line = line_of(text, keys)
        return f"{self.path}, line {line}" if line else None

    def _fault(self, text: str, keys: list[str], message: str) -> ConfigError:
        return ConfigError(f"{self._line(text, *keys) or self.path}: {message}")

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


def names_in(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every name of a model -> the name of its table. Raises `InvalidParameter` for one of two models."""
    names = {name: name for name in tables}
    for name, table in tables.items():
        served = table.get("served_model_name")
        for other in (*table.get("aliases", ()), *(() if served is None else (served,))):
            if names.setdefault(other, name) != name:
                raise InvalidParameter("name", other, f"of two models, {names[other]} and {name}")
    return names


def refuse_conflicts(table: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Raises `InvalidParameter` where a changed field contradicts another one of the model."""
    for field, value in changed.items():
        model = HOMES[field].model
        values = {name: other for name, other in table.items() if HOMES[name] == HOMES[field]}
        reason = conflict(model, values)
        if reason and conflict(model, {**values, field: default_value(field)}) != reason:
            raise InvalidParameter(field, value, reason)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model among keywords of `EngineConfig`, without their tables."""
    tables = {"": values, **{table: values.get(table) or {} for table in (SAMPLING, *TABLES)}}
    return {
        name: tables[home.table][name] for name, home in HOMES.items() if name in tables.get(home.table, ())
    }


def keys_of(field: str) -> list[str]:
    """Of a field in `speculon.toml`."""
    return [key for key in (HOMES[field].table, field) if key]
