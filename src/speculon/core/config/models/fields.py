"""The fields that a model may have of its own. Each is a field of other settings, but for two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from speculon.core.checked import Checked, invalid_parameter, nearest
from speculon.core.config.engine import TABLES, EngineConfig
from speculon.core.config.sampling import IN_PYTHON, SamplingParams
from speculon.core.config.serve import ServeConfig
from speculon.core.config.speculation import RequestSpeculation, SpeculationConfig
from speculon.core.errors import InvalidParameter

MAX_ALIASES = 64


class PoolSettings(Checked):
    """How a server with several models names this one and keeps it loaded."""

    pinned: bool = Field(False, description="never unload this model to make room for another")
    aliases: tuple[str, ...] = Field(
        (), max_length=MAX_ALIASES, description="other names of this model in the API"
    )

    @field_validator("aliases")
    @classmethod
    def _no_empty_name(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in value):
            raise ValueError("a name has at least one character")
        return value


@dataclass(frozen=True, slots=True)
class Home:
    """The settings that define a field, and their table among the keywords of `EngineConfig`."""

    model: type[BaseModel]
    table: str  # empty: no table

    @property
    def of_engine(self) -> bool:
        """Whether `EngineConfig` has it, by itself or in a table."""
        return not self.table or self.table in TABLES


SAMPLING, POOL = "sampling", "pool"
OF_SERVER = ("served_model_name",)  # the rest of ServeConfig is about the whole server


HOMES: Mapping[str, Home] = MappingProxyType(
    {name: Home(EngineConfig, "") for name in EngineConfig.model_fields if name not in TABLES}
    | {name: Home(SpeculationConfig, "speculation") for name in SpeculationConfig.model_fields}
    | {name: Home(ServeConfig, "serve") for name in OF_SERVER}
    | {name: Home(SamplingParams, SAMPLING) for name in SamplingParams.model_fields if name not in IN_PYTHON}
    | {name: Home(PoolSettings, POOL) for name in PoolSettings.model_fields}
)


def needs_new_worker(field: str) -> bool:
    """Whether a change takes effect only in a new process of the engine; else from the next request on.

    What a request may set of itself is no part of the process. A method whose drafter is not loaded is the
    exception: until a new process has it, requests are plain, with reason `no_drafter`.

    Raises `InvalidParameter` for an unknown field.
    """
    home = home_of(field)
    if home.model is SpeculationConfig:
        return field not in RequestSpeculation.model_fields
    return home.model is EngineConfig


def home_of(field: str, value: Any = None) -> Home:
    """Raises `InvalidParameter` for a field that no model has."""
    if field in HOMES:
        return HOMES[field]
    if field in (*TABLES, SAMPLING):
        raise InvalidParameter(field, value, "unknown field: its fields are written without a table")
    if field in ServeConfig.model_fields:
        raise InvalidParameter(field, value, "unknown field: it belongs to [serve] of speculon.toml")
    raise InvalidParameter(field, value, f"unknown field{nearest(field, HOMES)}")


def default_value(field: str) -> Any:
    return HOMES[field].model.model_fields[field].get_default(call_default_factory=True)


def check_field(field: str, value: Any) -> None:
    """Raises `InvalidParameter` for an unknown field, or a value that is wrong whatever the others are."""
    model = home_of(field, value).model
    error = faults(model, {field: value})
    if error is not None and any(fault["loc"] for fault in error.errors(include_url=False)):
        raise invalid_parameter(error, model)


def conflict(model: type[BaseModel], values: Mapping[str, Any]) -> str | None:
    """What is wrong with these values together, where each is right by itself; None: nothing."""
    error = faults(model, values)
    if error is None:
        return None
    refusal = invalid_parameter(error, model)
    return str(refusal) if refusal.name in model.model_fields else refusal.limit


def faults(model: type[BaseModel], values: Mapping[str, Any]) -> ValidationError | None:
    """Validates as the constructor does, without the environment and the settings file."""
    try:
        model.__pydantic_validator__.validate_python(dict(values), self_instance=model.__new__(model))
    except ValidationError as error:
        return error
    return None
