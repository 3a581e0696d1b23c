"""Which models a server has, by name, and the settings of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.config.models import ModelSettingsFile, PoolSettings
from speculon.core.config.models.merge import absences
from speculon.core.errors import ConfigError
from speculon.loading.locate import name_of

PLAIN = re.compile(r"[^\w.-]+")  # what a file name should not have


@dataclass(frozen=True, slots=True)
class OfModel:
    """What is set for one model."""

    settings: dict[str, Any]  # fields of `EngineConfig`
    sampling: dict[str, Any] = field(default_factory=dict)  # of requests that set none
    pool: PoolSettings = field(default_factory=PoolSettings)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models by the names that clients use; the first is the default."""

    settings: Mapping[str, Any]  # fields of `EngineConfig` that flags set for all models
    paths: Mapping[str, str]  # name -> the value of `model`
    drafters: Mapping[str, str] = field(default_factory=dict)  # name -> method; shown, and not served
    file: ModelSettingsFile | None = None  # with the settings of each model
    writable: ModelSettingsFile | None = None  # where the administration writes them; it may not exist yet

    @classmethod
    def of_one(cls, settings: Mapping[str, Any]) -> Self:
        """The model of these settings, under the name that they give it, else its own."""
        config = EngineConfig(**settings)
        return cls(settings, {config.serve.served_model_name or name_of(config.model): config.model})

    def of_model(self, name: str) -> OfModel:
        """The settings of one model. They are made nowhere else. Raises `ConfigError`."""
        if self.file is None:
            return OfModel(self.with_path(name, self.settings))
        return self._read(self.file, name)

    def healed(self, name: str, own: OfModel) -> OfModel:
        """The settings of a model that loads now: read anew where one of its drafters is not there any more.

        Raises `ConfigError`.
        """
        file, speculation = self.file or self.writable, own.settings.get("speculation") or {}
        draft = speculation.draft if isinstance(speculation, SpeculationConfig) else speculation.get("draft")
        return self._read(file, name) if file is not None and absences(draft, file.methods) else own

    def _read(self, file: ModelSettingsFile, name: str) -> OfModel:
        found = file.settings_of(name, {**self.settings, "model": self.paths[name]})
        return OfModel(self.with_path(name, found.keywords), found.sampling, found.pool)

    def names(self) -> dict[str, str]:
        """Every name of each model, its path among them, and the one that it is listed by.

        Raises `ConfigError`.
        """
        found = {name: name for name in self.paths}
        for other, name in (self.file.names() if self.file is not None else {}).items():
            if name in self.paths and found.setdefault(other, name) != name:
                raise ConfigError(f"{other!r} is a name of two models: {found[other]} and {name}")
        return {path: name for name, path in self.paths.items()} | found

    def with_path(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a model with what differs between models of one server."""
        fields = {**settings, "model": self.paths[name]}
        config = EngineConfig(**fields)
        if len(self.paths) == 1:
            return fields
        if config.events is not None:  # two processes cannot write one file
            stem = f"{config.events.stem}-{self._file_name(name)}"
            fields["events"] = config.events.with_stem(stem)
        if config.serve.restart_engine is None:  # the server does not end with one of its engines
            fields["serve"] = {**fields.get("serve", {}), "restart_engine": True}
        return fields

    def _file_name(self, name: str) -> str:
        """Of `a/b` and `a-b`, which have the same plain name, each has its place among the models."""
        plain = [PLAIN.sub("-", one) for one in self.paths]
        at = list(self.paths).index(name)
        return plain[at] if plain.count(plain[at]) == 1 else f"{plain[at]}-{at + 1}"
