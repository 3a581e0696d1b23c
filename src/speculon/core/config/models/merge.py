"""One model's settings from all sources: where each value came from, and what is left out in a conflict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from speculon.core.config.engine import EngineConfig
from speculon.core.config.models.fields import (
    HOMES,
    POOL,
    SAMPLING,
    Home,
    PoolSettings,
    conflict,
    default_value,
    home_of,
)
from speculon.core.config.speculation import AUTO, OFF
from speculon.core.errors import ConfigError, ModelNotFound, shorten

SEARCH = "auto:"  # before the folder in which drafters are searched for


@dataclass(frozen=True, slots=True)
class Methods:
    """What settings must know of the drafting methods; `speculation.proposers.registry.methods` has it."""

    known: frozenset[str]
    with_draft: frozenset[str]  # methods that need a `draft`
    without_draft: frozenset[str]  # methods that read none
    refuse_missing: Callable[[str], None]  # raises `ModelNotFound` for a path that is not there
    usual_drafters: Callable[[str], Mapping[str, str]] = lambda model: {}  # of a model by name, by method


@dataclass(frozen=True, slots=True)
class Source:
    """One place that sets fields. The first of several that sets a field is used."""

    name: str
    values: dict[str, Any]
    persisted: bool = False  # in a file: a conflict in it must not keep the model from being served
    line_of: Callable[[str], str | None] = lambda field: None  # "FILE, line N"

    def origin(self, field: str) -> str:
        return ": ".join(part for part in (self.name, self.line_of(field)) if part)


@dataclass(frozen=True, slots=True)
class Setting:
    """A field's value, and which source set it; `rank` 0 is the first source."""

    field: str
    value: Any
    source: Source
    rank: int

    def __str__(self) -> str:
        return f"{self.field} = {shorten(self.value)} ({self.source.origin(self.field)})"


DEFAULT = Source("default", {})


class ModelSettings:
    """The settings of one model, merged: where each value came from, and what is left out in a conflict.

    `keywords` are those of `EngineConfig`: what a command line gave, and each setting in its table. Raises
    `ConfigError` for a conflict that a flag or the environment is part of.
    """

    def __init__(
        self,
        name: str,
        given: Mapping[str, Any],
        sources: Sequence[Source] = (),
        methods: Methods | None = None,
    ):
        self.name = name
        self.fields: dict[str, Setting] = {}  # by field, where a source sets it
        self.left_out: dict[str, str] = {}  # field -> a message with its place and the reason
        for rank, source in enumerate(sources):
            for field, value in source.values.items():
                self.fields.setdefault(field, Setting(field, value, source, rank))
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
        """The same model with other keywords of `EngineConfig`."""
        other = copy(self)
        other.keywords, other.config = keywords, EngineConfig(**keywords)
        return other

    def origin(self, field: str) -> str:
        """Where the value came from: `flag`, `environment`, a file with its line, or `default`.

        Raises `InvalidParameter` for an unknown field.
        """
        home_of(field)
        setting = self.fields.get(field)
        return DEFAULT.name if setting is None else setting.source.origin(field)

    def value(self, field: str) -> Any:
        setting = self.fields.get(field)
        return default_value(field) if setting is None else setting.value

    def changed(self, new: ModelSettings) -> frozenset[str]:
        """The fields that have another value in `new`; see `needs_new_worker`."""
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
        for name, setting in self.fields.items():
            home = HOMES[name]
            if home.of_engine:
                table = keywords.setdefault(home.table, {}) if home.table else keywords
                table[name] = setting.value
        return keywords

    # Each check takes away what cannot be right, if it comes from a file.

    def _check_drafters(self, methods: Methods) -> str:
        """Leaves out drafters whose path is not there, and returns why; a flag's is refused at its load."""
        setting = self.fields.get("draft")
        if setting is None or not setting.source.persisted:
            return ""
        reasons = absences(setting.value, methods)
        missing = "; ".join(reasons.values())
        if not reasons:
            return ""
        self._leave_out([setting], missing)
        if isinstance(setting.value, Mapping) and len(reasons) < len(setting.value):
            rest = {method: path for method, path in setting.value.items() if method not in reasons}
            self.fields["draft"] = Setting("draft", rest, setting.source, setting.rank)
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
            reason = f"needs a drafter, and draft = {shorten(draft)} ({self.origin('draft')})"
            if missing:
                reason = f"{reason}; {missing}"
            if not method.source.persisted:
                raise ConfigError(f"{method}: {reason}")
            self._leave_out([method], reason)

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
        for field, without in excluded.items():
            setting = self.fields.get(field)
            if without and setting is not None and setting.rank < method.rank:
                reason = f"has no effect with {method}"
                if not setting.source.persisted:
                    raise ConfigError(f"{setting}: {reason}; set method beside it")
                self._leave_out([setting], reason)

    def _check_tables(self) -> None:
        """Values of one table that contradict each other, by the checks of that table."""
        for home in dict.fromkeys(HOMES.values()):
            while reason := conflict(home.model, self._table(home.table)):
                involved = [
                    setting for setting in self.fields.values() if self._changes(home, setting, reason)
                ]
                together = ", ".join(map(str, involved))
                if not involved or not all(setting.source.persisted for setting in involved):
                    raise ConfigError(f"{reason}: {together}")
                self._leave_out(involved, reason)

    def _changes(self, home: Home, setting: Setting, reason: str) -> bool:
        """Whether without this value the table is right, or wrong in another way."""
        values = self._table(home.table)
        if setting.field not in values:
            return False
        del values[setting.field]
        return conflict(home.model, values) != reason

    def _leave_out(self, settings: Sequence[Setting], reason: str) -> None:
        """The default takes their place, not the value of a source behind: that is for other models."""
        message = f"{', '.join(map(str, settings))} left out: {reason}"
        for setting in settings:
            field = setting.field
            self.left_out[field] = message
            self.fields[field] = Setting(field, default_value(field), DEFAULT, len(HOMES))


def absences(draft: Any, methods: Methods) -> dict[str, str]:
    """Why drafters are not there, by method; the method of a single one is empty."""
    reasons = {}
    for method, path in draft.items() if isinstance(draft, Mapping) else [("", draft)]:
        if isinstance(path, str) and path != AUTO:
            try:
                methods.refuse_missing(path.removeprefix(SEARCH))
            except ModelNotFound as error:
                reasons[method] = str(error)
    return reasons
