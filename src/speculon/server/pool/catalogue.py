"""Which models a server has, by name, and the settings of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from speculon.checkpoints.locate import name_of
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.config.models import ModelSettings, ModelSettingsFile
from speculon.core.errors import ConfigError

PLAIN = re.compile(r"[^\w.-]+")  # what a file name should not have


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

    def given(self, name: str) -> dict[str, Any]:
        """The keywords of `EngineConfig` that flags set for one model."""
        return {**self.settings, "model": self.paths[name]}

    def settings_of(self, name: str) -> ModelSettings:
        """The settings of one model. They are made nowhere else. Raises `ConfigError`."""
        given, file = self.given(name), self.file
        return self.adapted(name, file.settings_of(name, given) if file else ModelSettings(name, given))

    def healed(self, name: str, own: ModelSettings) -> ModelSettings:
        """The settings of a model that loads now: read anew where one of its drafters is not there any more.

        Raises `ConfigError`.
        """
        file, speculation = self.file or self.writable, own.keywords.get("speculation") or {}
        draft = speculation.draft if isinstance(speculation, SpeculationConfig) else speculation.get("draft")
        if file is None or not file.methods.missing(draft):
            return own
        return self.adapted(name, file.settings_of(name, self.given(name)))

    def adapted(self, name: str, own: ModelSettings) -> ModelSettings:
        """The settings with what differs between models of one server."""
        keywords = {**own.keywords, "model": self.paths[name]}
        if len(self.paths) > 1:
            if own.config.events is not None:  # two processes cannot write one file
                stem = f"{own.config.events.stem}-{self._file_name(name)}"
                keywords["events"] = own.config.events.with_stem(stem)
            if own.config.serve.restart_engine is None:  # the server does not end with one of its engines
                keywords["serve"] = {**keywords.get("serve", {}), "restart_engine": True}
        return own.with_keywords(keywords)

    def names(self) -> dict[str, str]:
        """Every name of each model, its path among them, and the one that it is listed by.

        Raises `ConfigError`.
        """
        names = {name: name for name in self.paths}
        for other, name in (self.file.names() if self.file is not None else {}).items():
            if name in self.paths and names.setdefault(other, name) != name:
                raise ConfigError(f"{other!r} is a name of two models, {names[other]} and {name}; rename one")
        return {path: name for name, path in self.paths.items()} | names

    def _file_name(self, name: str) -> str:
        """Of `a/b` and `a-b`, which have the same plain name, each has its place among the models."""
        plain = [PLAIN.sub("-", path) for path in self.paths]
        at = list(self.paths).index(name)
        return plain[at] if plain.count(plain[at]) == 1 else f"{plain[at]}-{at + 1}"
