"""Command-line options made from the settings' own fields: an option is described once, and unset means
unset.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from speculon.config import EngineConfig, SamplingParams, SpeculationConfig, Structured
from speculon.errors import InvalidParameter, SpeculonError
from speculon.config.serve import ServeConfig
from speculon.train.settings import DraftSettings, HeadSettings, TrainSettings

PANELS: dict[type[BaseModel], str] = {
    SamplingParams: "Sampling",
    SpeculationConfig: "Speculation",
    ServeConfig: "Server",
    EngineConfig: "Engine (also from SPECULON_* and speculon.toml)",
    TrainSettings: "Training",
    HeadSettings: "Head",
    DraftSettings: "Draft",
}
NO_FLAG = {"speculation", "serve"}  # made of flags of their own
NAMES = {float: "FLOAT", int: "INTEGER", str: "TEXT", SecretStr: "TEXT", Path: "FILE"}
VLLM_NAMES = {
    "model": "draft",
    "suffix_decoding_max_spec_factor": "suffix_max_factor",
    "suffix_decoding_min_token_prob": "suffix_min_probability",
}

Given = dict[str, Any]  # field -> what the command line says; no entry for what it does not say


def settings_from(
    *models: type[BaseModel], without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option per field of `models`; it receives those that were set, as `given`.

    `without` names fields that the command decides itself.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        hidden = NO_FLAG.union(without)
        fields = {
            name: (model, field)
            for model in models
            for name, field in model.model_fields.items()
            if name not in hidden
        }

        @wraps(command)
        def with_given(**values: Any) -> None:
            given = {name: values.pop(name) for name in fields}
            command(**values, given={name: value for name, value in given.items() if value not in (None, [])})

        made = [as_parameter(name, field, PANELS[model]) for name, (model, field) in fields.items()]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *made)]
        with_given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_given.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_given

    return decorate


def as_parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    kind, flag = without_none(field.annotation), "--" + name.replace("_", "-")
    # the field itself checks the value
    kept: Any = list[str] if get_origin(kind) is tuple else bool if kind is bool else str
    spelling = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    metavar = None if kind is bool else metavar_of(kind)
    option = typer.Option(
        spelling, help=help_of(field), metavar=metavar, rich_help_panel=panel, show_default=False
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kept | None, option]
    )


def without_none(annotation: Any) -> Any:
    """The type itself; the first of several."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    return next(part for part in get_args(annotation) if part is not type(None))


def metavar_of(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is tuple:
        return NAMES[get_args(kind)[0]]
    return NAMES.get(kind, "JSON")


def help_of(field: FieldInfo) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    shown = (
        f"(default: {default})"
        if default is not None and default != () and default != {}
        else "(required)" * field.is_required()
    )
    many = "may be repeated" if get_origin(without_none(field.annotation)) is tuple else ""
    return " ".join(
        part for part in (field.description and field.description + ";" * bool(many), many, shown) if part
    )


def pick(model: type[BaseModel], given: Given) -> dict[str, Any]:
    """The fields of one model, with JSON values read."""
    return {
        name: read(name, value, model.model_fields[name])
        for name, value in given.items()
        if name in model.model_fields
    }


def read(name: str, value: Any, field: FieldInfo) -> Any:
    """A number where the text is one, an object where the field is a table; anything else is the field's to
    judge.
    """
    kind = without_none(field.annotation)
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            return value
    table = (
        get_origin(kind) is dict
        or kind is Structured
        or (kind is str and get_origin(field.annotation) is not None and str(value).startswith("{"))
    )
    return read_object(name, value) if table else value


def read_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(name, text, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidParameter(name, text, "must be a JSON object")
    return value


def engine_settings(given: Given, speculative_config: str | None = None) -> dict[str, Any]:
    """Keywords for `LLM`: engine fields, and `speculation` as far as the command line says anything about it."""
    speculation = {**vllm_alias(speculative_config), **pick(SpeculationConfig, given)}
    tables = {"speculation": speculation, "serve": pick(ServeConfig, given)}
    return {**pick(EngineConfig, given), **{name: table for name, table in tables.items() if table}}


def vllm_alias(text: str | None) -> dict[str, Any]:
    """vLLM's `--speculative-config`: its `model` is our `draft`; `[ngram]` as a model is our method."""
    if text is None:
        return {}
    asked = {
        VLLM_NAMES.get(name, name): value for name, value in read_object("speculative-config", text).items()
    }
    if asked.get("draft") in ("[ngram]", "ngram"):
        asked = {"method": "ngram", **{name: value for name, value in asked.items() if name != "draft"}}
    return asked


def as_json_error(error: SpeculonError) -> Mapping[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}
