"""Settings of each model, in one file that people and the server write.

Precedence: request > flag > environment > the model's settings > `speculon.toml` > default.
"""

from __future__ import annotations

import logging
import os
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import to_jsonable_python
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from speculon.core.checked import Checked, invalid_parameter, nearest
from speculon.core.config.engine import TABLES, EngineConfig, readable, refuse_unknown_variables
from speculon.core.config.file import line_of, place, settings_file, syntax_error
from speculon.core.config.sampling import IN_PYTHON, SamplingParams
from speculon.core.config.serve import ServeConfig
from speculon.core.config.speculation import AUTO, OFF, RequestSpeculation, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter, ModelNotFound, shorten

log = logging.getLogger("speculon.settings")

FILE = "speculon-models.toml"
TOP = "models"  # the table of the file that has a table for each model
MAX_ALIASES = 64
LOCK_SECONDS = 10.0  # a write takes milliseconds, and the lock of a process that ends is released
SAMPLING, POOL = "sampling", "pool"
SEARCH = "auto:"  # before the folder in which drafters are searched for

TomlTables = dict[str, dict[str, Any]]  # name -> fields


# the fields that a model may have of its own


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
            raise ValueError("each name must have at least one character")
        return value


class Home(NamedTuple):
    """The settings that define a field, and their table among the keywords of `EngineConfig`."""

    model: type[BaseModel]
    table: str  # empty: no table


HOMES: Mapping[str, Home] = MappingProxyType(
    {name: Home(EngineConfig, "") for name in EngineConfig.model_fields if name not in TABLES}
    | {name: Home(SpeculationConfig, "speculation") for name in SpeculationConfig.model_fields}
    | {"served_model_name": Home(ServeConfig, "serve")}  # the rest of it is about the whole server
    | {name: Home(SamplingParams, SAMPLING) for name in SamplingParams.model_fields if name not in IN_PYTHON}
    | {name: Home(PoolSettings, POOL) for name in PoolSettings.model_fields}
)


def home_of(field: str, value: Any = None) -> Home:
    """Raises `InvalidParameter` for a field that no model has."""
    if field in HOMES:
        return HOMES[field]
    if field in (*TABLES, SAMPLING):
        raise InvalidParameter(
            field, value, "unknown field: write the fields of this table beside the others, without the table"
        )
    if field in ServeConfig.model_fields:
        raise InvalidParameter(
            field,
            value,
            "unknown field: it is about the whole server and belongs to [serve] of speculon.toml",
        )
    raise InvalidParameter(field, value, f"unknown field{nearest(field, HOMES)}")


def needs_new_worker(field: str) -> bool:
    """Whether a change takes effect only in a new process of the engine; else from the next request on.

    What a request may set itself is no part of the process. A method whose drafter is not loaded is the
    exception: requests are plain, with reason `no_drafter`, until a new process has it.

    Raises `InvalidParameter` for an unknown field.
    """
    model = home_of(field).model
    if model is SpeculationConfig:
        return field not in RequestSpeculation.model_fields
    return model is EngineConfig


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


# the settings of one model, from all sources


@dataclass(frozen=True, slots=True)
class Methods:
    """What settings must know of the drafting methods; `speculation.proposers.registry.methods` has it."""

    known: frozenset[str]
    with_draft: frozenset[str]  # methods that need a `draft`
    without_draft: frozenset[str]  # methods that read none
    refuse_missing: Callable[[str], None]  # raises `ModelNotFound` for a path that is not there
    usual_drafters: Callable[[str], Mapping[str, str]] = lambda model: {}  # of a model by name, by method

    def missing(self, draft: Any) -> dict[str, str]:
        """Why drafters are not there, by method; the method of a single one is empty."""
        reasons = {}
        for method, path in draft.items() if isinstance(draft, Mapping) else [("", draft)]:
            if isinstance(path, str) and path != AUTO:
                try:
                    self.refuse_missing(path.removeprefix(SEARCH))
                except ModelNotFound as error:
                    reasons[method] = str(error)
        return reasons


FLAG, ENVIRONMENT, OWN, OTHERS, DEFAULT = "flag", "environment", "model's settings", "", "default"
RANKS = (FLAG, ENVIRONMENT, OWN, OTHERS, DEFAULT)  # the first source that sets a field is used


class Setting(NamedTuple):
    """A field's value, and where it comes from."""

    field: str
    value: Any
    source: str
    line: str | None = None  # "FILE, line N"

    @property
    def origin(self) -> str:
        return ": ".join(filter(None, (self.source, self.line)))

    @property
    def rank(self) -> int:
        """0 for what comes before all others."""
        return RANKS.index(self.source)

    @property
    def persisted(self) -> bool:
        """Whether it is from a file: a conflict in it must not keep the model from being served."""
        return self.source in (OWN, OTHERS)

    def __str__(self) -> str:
        return f"{self.field} = {shorten(self.value)} ({self.origin})"


class ModelSettings:
    """The settings of one model, merged from all sources, with the origin of each value.

    `keywords` are the keywords of `EngineConfig`. If values from files contradict each other, they are left
    out, and `left_out` says why. Raises `ConfigError` if a flag or the environment takes part in the
    contradiction.
    """

    def __init__(
        self,
        name: str,
        given: Mapping[str, Any],
        settings: Iterable[Setting] = (),
        methods: Methods | None = None,
    ):
        self.name = name
        self.left_out: dict[str, str] = {}  # field -> a message with its place and the reason
        self.fields: dict[str, Setting] = {}  # by field, where a source sets it
        for setting in sorted(settings, key=lambda setting: setting.rank):
            self.fields.setdefault(setting.field, setting)
        if methods is not None:
            missing = self._check_drafters(methods)
            self._check_method(methods, missing)
            self._check_effect(methods)
        self._check_tables()
        self.keywords = self._keywords(given)
        self.config = EngineConfig(**self.keywords)
        self.sampling = self._table(SAMPLING)  # defaults of requests: what a source sets, and no more
        self.pool = PoolSettings(**self._table(POOL))

    def with_keywords(self, keywords: dict[str, Any]) -> Self:
        """A copy with other keywords of `EngineConfig`."""
        other = copy(self)
        other.keywords, other.config = keywords, EngineConfig(**keywords)
        return other

    def origin(self, field: str) -> str:
        """Where the value came from: `flag`, `environment`, a file with its line, or `default`.

        Raises `InvalidParameter` for an unknown field.
        """
        home_of(field)
        return self.fields[field].origin if field in self.fields else DEFAULT

    def value(self, field: str) -> Any:
        return self.fields[field].value if field in self.fields else default_value(field)

    def changed(self, new: ModelSettings) -> frozenset[str]:
        """The fields whose value differs in `new`; `needs_new_worker` says which of them need a new load."""
        fields = {*self.fields, *new.fields}
        return frozenset(field for field in fields if self.value(field) != new.value(field))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.left_out.values()))

    def _table(self, table: str) -> dict[str, Any]:
        return {name: setting.value for name, setting in self.fields.items() if HOMES[name].table == table}

    def _keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        keywords = {name: dict(part) if isinstance(part, Mapping) else part for name, part in given.items()}
        keywords.pop(SAMPLING, None)
        keywords |= self._table("")
        for table in TABLES:
            if own := self._table(table):
                keywords[table] = keywords.get(table, {}) | own
        return keywords

    def _check_drafters(self, methods: Methods) -> str:
        """Leaves out drafters whose path is not there, and returns why; a flag's is refused at its load."""
        setting = self.fields.get("draft")
        reasons = methods.missing(setting.value) if setting and setting.persisted else {}
        if setting is None or not reasons:
            return ""
        missing = "; ".join(reasons.values())
        self._refuse([setting], missing)
        if isinstance(setting.value, Mapping) and len(reasons) < len(setting.value):
            rest = {method: path for method, path in setting.value.items() if method not in reasons}
            self.fields["draft"] = setting._replace(value=rest)
            self.left_out["draft"] += f"; what is left is {rest}"
        return missing

    def _check_method(self, methods: Methods, missing: str) -> None:
        """A method that needs a drafter and has none becomes `auto`, which uses what there is."""
        method, draft = self.fields.get("method"), self.value("draft")
        if method is None or method.value not in methods.with_draft:
            return
        if draft is None:
            draft = methods.usual_drafters(self.value("model")) or None
        if draft is None or (isinstance(draft, Mapping) and method.value not in draft):
            reason = f"it needs a drafter, and draft = {shorten(draft)} ({self.origin('draft')})"
            self._refuse([method], f"{reason}; {missing}" if missing else reason)

    def _check_effect(self, methods: Methods) -> None:
        """A drafter or K that was set for a method which a source behind it excludes.

        Set by the same source they are for requests that choose another method.
        """
        method = self.fields.get("method")
        if method is None:
            return
        excluded = {
            "num_speculative_tokens": method.value == OFF and bool(self.value("num_speculative_tokens")),
            "draft": method.value in methods.without_draft and self.value("draft") is not None,
        }
        for setting in [self.fields[field] for field in excluded if field in self.fields]:
            if excluded[setting.field] and setting.rank < method.rank:
                self._refuse([setting], f"it has no effect with {method}; set method in the same place")

    def _check_tables(self) -> None:
        """Values of one table that contradict each other, by the checks of that table."""
        for home in dict.fromkeys(HOMES.values()):
            while reason := conflict(home.model, self._table(home.table)):
                self._refuse(self._involved(home, reason), reason)

    def _involved(self, home: Home, reason: str) -> list[Setting]:
        """The settings without which the table is right, or wrong in another way."""
        values = self._table(home.table)
        without = {field: {name: values[name] for name in values if name != field} for field in values}
        return [self.fields[field] for field in values if conflict(home.model, without[field]) != reason]

    def _refuse(self, settings: Sequence[Setting], reason: str) -> None:
        """What files alone say wrongly is left out. The default takes its place, not the value of a source
        behind: that is for other models.
        """
        together = ", ".join(map(str, settings))
        if not settings or not all(setting.persisted for setting in settings):
            raise ConfigError(f"{together}: {reason}" if settings else reason)
        for field in [setting.field for setting in settings]:
            self.left_out[field] = f"{together} left out: {reason}"
            self.fields[field] = Setting(field, default_value(field), DEFAULT)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model among keywords of `EngineConfig`, without their tables."""
    tables = {"": values, **{table: values.get(table) or {} for table in (SAMPLING, *TABLES)}}
    return {
        name: tables[home.table][name] for name, home in HOMES.items() if name in tables.get(home.table, ())
    }


# the file


def models_file(serve: ServeConfig) -> Path:
    """The file that the settings name, else the usual one beside `speculon.toml`; it may not exist yet."""
    beside = settings_file()
    return serve.models_file or (Path() if beside is None else beside.parent) / FILE


class ModelSettingsFile:
    """Reads and changes the file with the settings of each model (`speculon-models.toml`).

    Each call reads the file again. Processes that write it wait for each other. A change by a program that
    does not take the lock, such as an editor, is noticed and never overwritten, unless it falls into the
    microseconds between the last check and the replacement of the file.
    """

    def __init__(self, path: Path, methods: Methods):
        self.path, self.methods = path, methods
        self._warned = set[str]()

    def names(self) -> dict[str, str]:
        """Each name that the file gives to a model -> the name of the model's table. Raises `ConfigError`."""
        return names_in(self.tables())

    def tables(self) -> TomlTables:
        """The fields of each model as the file has them. Raises `ConfigError` with the line of a fault."""
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
        """The settings that a model would have after `update` with these changes. Nothing is written.

        Raises the same errors as `update`.
        """
        return self._after(self._text(), name, changes, given or {})[1]

    def update(
        self, name: str, changes: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> ModelSettings:
        """Changes fields of a model in the file. A new model gets a table, and None removes a field. Comments
        and the order of the file stay.

        Returns the model's settings after the change. Raises `InvalidParameter` for a change that is refused,
        for example because a flag or the environment contradicts it, and `ConfigError` for a conflict that
        was there before or a file that cannot be written.
        """
        try:
            with writing(self.path) as path:
                text = self._text()
                changed, settings = self._after(text, name, changes, given or {})
                if not replace(path, text, changed):
                    raise ConfigError(
                        f"{self.path}: another program changed the file just now, so nothing was written; "
                        "repeat the change"
                    )
        except OSError as error:
            raise ConfigError(f"{self.path}: the file cannot be written: {error.strerror or error}") from None
        return settings

    def _after(
        self, text: str, name: str, changes: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[str, ModelSettings]:
        """The text with these fields of a model, and the settings that it then has."""
        if not name.strip():
            raise InvalidParameter("name", name, "must have at least one character")
        fields = {field: self._checked(field, value) for field, value in changes.items()}
        tables = self._read(text)
        table = {**tables.get(name, {}), **fields}
        tables[name] = {field: value for field, value in table.items() if value is not None}
        names_in(tables)
        changed = edited(text, name, tables[name])
        if tomllib.loads(changed).get(TOP, {}) != tables:
            raise ConfigError(
                f"{self.path}: [{TOP}.{name}] is written in a form that this program cannot edit; write it "
                "as a table with a header of its own"
            )
        try:
            settings = self._merged(changed, name, given)
        except ConfigError as error:
            self._merged(text, name, given)  # raises where the conflict was there before the change
            field, value = next(iter(changes.items()))
            raise InvalidParameter(field, value, str(error)) from None
        for field, value in changes.items():
            if field in settings.left_out:
                raise InvalidParameter(field, value, settings.left_out[field])
        return changed, settings

    def _checked(self, field: str, value: Any) -> Any:
        """A new value as TOML has it: right by itself, and a drafter is there."""
        home_of(field, value)
        if value is None:
            return None
        plain = to_jsonable_python(value, exclude_none=True)
        self._check(field, plain)
        if field == "draft" and (reasons := self.methods.missing(plain)):
            raise InvalidParameter(field, value, "; ".join(reasons.values()))
        return plain

    def _check(self, field: str, value: Any) -> None:
        """Raises `InvalidParameter` for what is wrong whatever the other fields are."""
        check_field(field, value)
        if field == "method" and value not in self.methods.known:
            raise InvalidParameter(field, value, f"must be one of {', '.join(sorted(self.methods.known))}")

    def _merged(self, text: str, name: str, given: Mapping[str, Any]) -> ModelSettings:
        tables = self._read(text)
        name = names_in(tables).get(name, name)
        refuse_unknown_variables()
        beside = settings_file()
        with readable():
            environment = flat(EnvSettingsSource(EngineConfig)())
            others = flat(TomlConfigSettingsSource(EngineConfig, beside)())
        settings = [Setting(field, value, FLAG) for field, value in flat(given).items()]
        settings += [Setting(field, value, ENVIRONMENT) for field, value in environment.items()]
        for field, value in others.items():
            keys = [key for key in (HOMES[field].table, field) if key]
            settings.append(Setting(field, value, OTHERS, place(keys, beside)))
        for setting in settings:
            try:
                check_field(setting.field, setting.value)
            except InvalidParameter as error:
                raise ConfigError(f"{setting.line}: {error}" if setting.line else str(error)) from None
        if name in tables:
            settings = [
                setting for setting in settings if setting.field != "model" or setting.source == OTHERS
            ]
            for field, value in {"model": name, **tables[name]}.items():
                settings.append(Setting(field, value, OWN, self._line(text, TOP, name, field)))
        return ModelSettings(name, given, settings, self.methods)

    def _text(self) -> str:
        try:
            return read_exactly(self.path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _read(self, text: str) -> TomlTables:
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise syntax_error(error, self.path) from None
        models: TomlTables = tables.get(TOP, {})
        elsewhere = [[key] for key in tables if key != TOP or not isinstance(models, dict)]
        elsewhere = elsewhere or [
            [TOP, name] for name, table in models.items() if not isinstance(table, dict)
        ]
        if elsewhere:
            keys = elsewhere[0]
            raise self._fault(
                text, keys, f'{keys[-1]}: unknown; this file has only tables of the form [{TOP}."NAME"]'
            )
        for name, table in models.items():
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


def names_in(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every name of a model -> the name of its table. Raises `InvalidParameter` for one of two models."""
    names = {name: name for name in tables}
    for name, table in tables.items():
        served = table.get("served_model_name")
        for other in (*table.get("aliases", ()), *(() if served is None else (served,))):
            if names.setdefault(other, name) != name:
                raise InvalidParameter(
                    "name", other, f"two models have this name, {names[other]} and {name}; rename one"
                )
    return names


def edited(text: str, name: str, table: Mapping[str, Any]) -> str:
    """TOML in which the table of this model has exactly these fields. Comments and order stay.

    Raises `InvalidParameter` for a value that TOML cannot have.
    """
    import tomlkit  # takes 50 ms, and readers do not need it
    from tomlkit.exceptions import ConvertError

    document = tomlkit.parse(text)
    if TOP not in document:
        document.add(TOP, tomlkit.table(is_super_table=True))
    tables: Any = document[TOP]
    if name not in tables:
        tables.add(name, tomlkit.table())
    fields = tables[name]
    for field in set(fields) - set(table):
        del fields[field]
    for field, value in table.items():
        if field not in fields or fields[field] != value:
            try:
                fields[field] = as_inline(value)
            except ConvertError:
                raise InvalidParameter(field, value, "TOML has no form for this value") from None
    return tomlkit.dumps(document)


def as_inline(value: Any) -> Any:
    """A table on the line of its key: one with a header of its own would end its model's table."""
    if not isinstance(value, dict):
        return value
    import tomlkit

    inline = tomlkit.inline_table()
    inline.update(value)
    return inline


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The file itself, behind links, for the one process that writes it now.

    Raises `ConfigError` after ten seconds, and for a folder that does not exist.
    """
    real = path.resolve()
    if not real.parent.is_dir():  # the lock would make it
        raise ConfigError(f"{path}: the folder of this file does not exist")
    try:
        with FileLock(real.with_name(f".{real.name}.lock"), timeout=LOCK_SECONDS):
            yield real
    except Timeout:
        raise ConfigError(
            f"{path}: another process has been writing it for {LOCK_SECONDS:g} s; try again later"
        ) from None


def read_exactly(path: Path) -> str:
    """The text with its line ends as they are; empty for a file that does not exist."""
    return path.read_bytes().decode() if path.exists() else ""


def replace(path: Path, old: str, new: str) -> bool:
    """Replaces the file's text in one step that survives a crash; False where it is no longer `old`."""
    temporary = path.with_name(f".{path.name}.tmp")  # always this one: what a killed writer left is replaced
    try:
        with temporary.open("wb") as file:
            file.write(new.encode())
            file.flush()
            os.fsync(file.fileno())  # before it has its name: else a crash may leave an empty file
        if path.exists():
            shutil.copymode(path, temporary)
        if read_exactly(path) != old:
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True
