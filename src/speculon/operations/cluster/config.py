"""The settings of a cluster: how many replicas, what each takes, and the settings of their engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from speculon.core.checked import Checked
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, InvalidParameter

# what belongs to one process with its models
REFUSED = {"admin": "the dashboard", "models_dir": "several models", "models_file": "settings of models"}
REFUSED |= {"memory_gb": "an account of memory"}


class ClusterConfig(Checked):
    """How many replicas there are, and what each takes of a machine."""

    replicas: int = Field(2, ge=1, le=1024, description="engines")
    max_replicas: int | None = Field(
        None, ge=1, le=1024, description="most engines: as many as the load asks for; None: always `replicas`"
    )
    target_requests: float = Field(16, gt=0, description="open requests per engine that autoscaling aims at")
    cpus: float = Field(1.0, ge=0, description="logical CPUs of each engine, as Ray counts them")
    gpus: float = Field(0.0, ge=0, description="GPUs of each engine")
    ingresses: int = Field(
        1, ge=1, le=64, description="processes that take HTTP requests; each routes by what it has seen"
    )

    @model_validator(mode="after")
    def _in_order(self) -> ClusterConfig:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InvalidParameter(
                "max_replicas", self.max_replicas, f"must be at least replicas, {self.replicas}"
            )
        return self


def read(given: Mapping[str, Any]) -> tuple[ClusterConfig, dict[str, Any]]:
    """(the cluster's settings, those of its engines with everything resolved), from one flat mapping.

    A name with a dot is a field of a table: `speculation.method=suffix`. The settings file and the
    environment are read here, and nowhere else: other machines may have others. Raises `ConfigError`.
    """
    own = {name: value for name, value in given.items() if name in ClusterConfig.model_fields}
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name not in own:
            table, dot, field = name.partition(".")
            if dot:
                settings.setdefault(table, {})[field] = value
            else:
                settings[name] = value
    config = EngineConfig(**settings)
    for name, what in REFUSED.items():
        if getattr(config.serve, name) not in (None, False):
            raise ConfigError(f"{name}: not supported with replicas, which serve one model without {what}")
    try:
        cluster = ClusterConfig(**own)
    except InvalidParameter as error:
        raise ConfigError(str(error)) from None
    if config.serve.capture is not None and cluster.ingresses > 1:
        raise ConfigError(
            f"ingresses = {cluster.ingresses}: must be 1 with capture, which one process writes"
        )
    return cluster, config.model_dump()


def of_engine(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only the ingress needs, keys among it."""
    return {**settings, "serve": {"engine_timeout": settings["serve"]["engine_timeout"]}}
