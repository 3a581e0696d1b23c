"""Which models a server has, by name, and the settings of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from speculon.config import EngineConfig
from speculon.errors import ConfigError

PLAIN = re.compile(r"[^\w.-]+")  # what a file name should not have


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models by the names that clients use; the first is the default."""

    settings: Mapping[str, Any]  # fields of `EngineConfig` that all models have in common
    paths: Mapping[str, str]  # name -> the value of `model`
    drafters: Mapping[str, str] = field(default_factory=dict)  # name -> method; shown, and not served

    @classmethod
    def of_one(cls, settings: Mapping[str, Any]) -> Self:
        """The model of these settings, under its own name."""
        config = EngineConfig(**settings)
        return cls(settings, {config.serve.served_model_name or config.model: config.model})

    def settings_for(self, name: str) -> dict[str, Any]:
        """The fields of `EngineConfig` of one model. They are made nowhere else."""
        fields = {**self.settings, "model": self.paths[name]}
        events = EngineConfig(**fields).events
        if events is not None and len(self.paths) > 1:  # two processes cannot write one file
            fields["events"] = events.with_stem(f"{events.stem}-{PLAIN.sub('-', name)}")
        return fields

    def check_names(self, names: tuple[str, ...], setting: str) -> None:
        """Raises `ConfigError` for a name in a setting that is no model of this server."""
        for name in names:
            if name not in self.paths:
                raise ConfigError(f"{setting} = {name!r}: this server has {', '.join(map(repr, self.paths))}")
