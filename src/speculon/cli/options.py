"""Command-line options made from the fields of the settings. An option that is not given sets nothing."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from typer import Option

from speculon.cli.app import COMMON, section_of, show_all
from speculon.core.config import (
    IN_PYTHON,
    VARIABLE,
    EngineConfig,
    ServeConfig,
    SpeculationConfig,
    Structured,
    Thinking,
    settings_file,
)
from speculon.core.errors import ConfigError, InvalidParameter

NO_FLAG = {"speculation", "serve", *IN_PYTHON}  # tables: their fields have flags
NO_REQUESTS = (
    "generation_config",
    "adapters",
)  # of no effect in a command that sets how it samples
NAMES = {float: "FLOAT", int: "INTEGER", str: "TEXT", SecretStr: "TEXT", Path: "FILE"}
VLLM_NAMES = {
    "model": "draft",
    "suffix_decoding_max_spec_factor": "suffix_max_factor",
    "suffix_decoding_min_token_prob": "suffix_min_probability",
}

Flags = dict[str, Any]  # field -> value on the command line; no entry for options that are not given


def settings_from(
    *models: type[BaseModel], without: tuple[str, ...] = (), only: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option per field of `models`; it receives those that were set, as `flags`.

    `without` names fields that the command sets itself, `only` the ones that it reads where those are few.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
        fields = {
            name: (model, field)
            for model in models
            for name, field in model.model_fields.items()
            if name not in NO_FLAG.union(without) and (not only or name in only)
        }
        reads_file = EngineConfig in models

        @wraps(command)
        def with_flags(**values: Any) -> None:
            values.pop(HELP_ALL.name, None)
            flags = {name: values.pop(name) for name in fields}
            flags = {name: value for name, value in flags.items() if value not in (None, [])}
            with config_file(values.pop(CONFIG.name)) if reads_file else nullcontext():
                command(**values, flags=flags)

        made = [as_parameter(name, field, section_of(model, name)) for name, (model, field) in fields.items()]
        parameters = [*own, *made, *[CONFIG] * reads_file, HELP_ALL]
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_flags

    return decorate


@contextmanager
def config_file(named: Path | None) -> Iterator[None]:
    """Reads settings from this file, or from the usual place, and prints the name of the file on stderr."""
    if named is not None and not named.is_file():
        raise ConfigError(f"--config {named}: no such file")
    before = os.environ.get(VARIABLE)
    if named is not None:
        os.environ[VARIABLE] = str(named)  # the engine's process inherits it
    try:
        if (path := settings_file()) is not None:
            typer.secho(f"settings from {path}", err=True, dim=True)
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        elif named is not None:
            del os.environ[VARIABLE]


def as_parameter(name: str, field: FieldInfo, section: str) -> inspect.Parameter:
    """The option of a field. Its value stays text, which the field itself checks."""
    field_type, extra = without_none(field.annotation), extra_of(field)
    flag = str(extra.get("flag") or "--" + name.replace("_", "-"))
    many, switch = "flag" in extra or get_origin(field_type) is tuple and not extra, field_type is bool
    option = Option(
        f"{flag}/--no-{flag[2:]}" if switch else flag,
        help=help_of(field, many),
        metavar=None if switch else str(extra.get("metavar") or metavar_of(field_type)),
        rich_help_panel=None if section == COMMON else section,
        show_default=False,
    )
    option_type: Any = list[str] if many else bool if switch else str
    return keyword(name, option_type | None, option)


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """How the option differs from others: its `metavar`, or the `flag` of one entry of a table."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def keyword(name: str, option_type: Any, option: Any, default: Any = None) -> inspect.Parameter:
    annotation = Annotated[option_type, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


CONFIG = keyword(
    "config",
    Path | None,
    Option("--config", metavar="FILE", help="settings file (default: speculon.toml in this folder, if any)"),
)
HELP_ALL = keyword(
    "help_all",
    bool,
    Option("--help-all", is_eager=True, callback=show_all, help="list all options and exit"),
    default=False,
)


def without_none(annotation: Any) -> Any:
    """The type itself; the first of several."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    return next(part for part in get_args(annotation) if part is not type(None))


def metavar_of(field_type: Any) -> str:
    if get_origin(field_type) is Literal:
        return "|".join(get_args(field_type))
    if get_origin(field_type) is tuple:
        return NAMES[get_args(field_type)[0]]
    return NAMES.get(field_type, "JSON")


def help_of(field: FieldInfo, many: bool) -> str:
    text = "; ".join([*filter(None, [field.description]), *["may be repeated"] * many])
    if field.is_required():
        return f"{text} (required)"
    default = field.get_default(call_default_factory=True)
    return text if default in (None, (), {}) or "(default: " in text else f"{text} (default: {default})"


def pick(model: type[BaseModel], flags: Flags) -> dict[str, Any]:
    """The fields of one model, with JSON values read."""
    fields = model.model_fields
    return {name: read(name, value, fields[name]) for name, value in flags.items() if name in fields}


def read(name: str, value: Any, field: FieldInfo) -> Any:
    """A number where the text is one, an object where the field is a table; else the text itself."""
    field_type = without_none(field.annotation)
    if flag := extra_of(field).get("flag"):
        return dict(entry(str(flag), text) for text in value)
    if field_type in (int, float):
        try:
            return field_type(value)
        except ValueError:
            return value
    table = get_origin(field_type) is dict or field_type in (Structured, Thinking)
    # a text, or a table
    either = field_type is str and get_origin(field.annotation) is not None
    return read_object(name, value) if table or (either and str(value).startswith("{")) else value


def entry(flag: str, text: str) -> tuple[str, str]:
    """One of a table: NAME=VALUE."""
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise InvalidParameter(flag.removeprefix("--"), text, "must be NAME=FOLDER")
    return name, value


def read_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(name, text, f"must be JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidParameter(name, text, "must be a JSON object")
    return value


def engine_settings(flags: Flags, speculative_config: str | None = None) -> dict[str, Any]:
    """Keywords for `LLM`: engine fields, and tables of the fields that the command line sets."""
    speculation = {**vllm_alias(speculative_config), **pick(SpeculationConfig, flags)}
    tables = {"speculation": speculation, "serve": pick(ServeConfig, flags)}
    return {**pick(EngineConfig, flags), **{name: table for name, table in tables.items() if table}}


def vllm_alias(text: str | None) -> dict[str, Any]:
    """vLLM's `--speculative-config`: its `model` is our `draft`; `[ngram]` as a model is our method."""
    if text is None:
        return {}
    options = read_object("speculative-config", text)
    fields = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
    if fields.get("draft") in ("[ngram]", "ngram"):
        fields = {"method": "ngram", **{name: value for name, value in fields.items() if name != "draft"}}
    return fields
