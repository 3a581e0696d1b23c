"""One model's settings from all sources: where each value came from, and what is left out in a conflict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speculon.core.config.engine import EngineConfig
from speculon.core.config.models.fields import HOMES, SAMPLING, Home, PoolSettings, conflict, home_of
from speculon.core.config.speculation import AUTO, OFF, RequestSpeculation
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
    values: Mapping[str, Any]
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


@dataclass(frozen=True)
class ModelSettings:
    """The settings of one model, merged. `keywords` are those of `EngineConfig`; all are in `config`."""

    name: str
    config: EngineConfig
    keywords: dict[str, Any]
    sampling: dict[str, Any]  # defaults of requests: the fields that a source sets, and no others
    pool: PoolSettings
    left_out: Mapping[str, str]  # field whose value was left out -> a message with its place and the reason
    settings: Mapping[str, Setting]  # by field, where a source sets it

    def origin(self, field: str) -> str:
        """Where the value came from: `flag`, `environment`, a file with its line, or `default`.

        Raises `InvalidParameter` for an unknown field.
        """
        home_of(field)
        found = self.settings.get(field)
        return DEFAULT.name if found is None else found.source.origin(field)

    def value(self, field: str) -> Any:
        found = self.settings.get(field)
        return default_of(field) if found is None else found.value

    def changed(self, new: ModelSettings) -> frozenset[str]:
        """The fields that have another value in `new`; see `needs_new_worker`."""
        fields = {*self.settings, *new.settings}
        return frozenset(field for field in fields if self.value(field) != new.value(field))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.left_out.values()))

    @property
    def speculation(self) -> dict[str, Any]:
        """What a request that sets nothing of its speculation gets: the fields that a source sets."""
        return {
            name: self.settings[name].value
            for name in self.settings
            if name in RequestSpeculation.model_fields
        }


def merge(sources: Sequence[Source], methods: Methods) -> tuple[dict[str, Setting], dict[str, str]]:
    """The setting of each field that a source sets, and a message for each field whose value is left out.

    Raises `ConfigError` for a conflict that a flag or the environment is part of.
    """
    merged: dict[str, Setting] = {}
    for rank, source in enumerate(sources):
        for field, value in source.values.items():
            merged.setdefault(field, Setting(field, value, source, rank))
    resolved = Resolved(merged, methods)
    resolved.drafters()
    resolved.method()
    resolved.without_effect()
    resolved.orders()
    return resolved.settings, resolved.left_out


class Resolved:
    """Settings from which each check takes what cannot be right, if it comes from a file."""

    def __init__(self, settings: dict[str, Setting], methods: Methods):
        self.settings, self.left_out = settings, dict[str, str]()
        self._methods, self._lowest = methods, len(HOMES)
        self._missing = ""  # why a drafter was left out

    def value(self, field: str) -> Any:
        found = self.settings.get(field)
        return default_of(field) if found is None else found.value

    def drafters(self) -> None:
        """Leaves out drafters whose path is not there; a flag's is refused when it is loaded."""
        setting = self.settings.get("draft")
        if setting is None or not setting.source.persisted:
            return
        reasons = absences(setting.value, self._methods)
        self._missing = "; ".join(reasons.values())
        if not reasons:
            return
        self._leave_out([setting], self._missing)
        if isinstance(setting.value, Mapping) and len(reasons) < len(setting.value):
            kept = {method: path for method, path in setting.value.items() if method not in reasons}
            self.settings["draft"] = Setting("draft", kept, setting.source, setting.rank)
            self.left_out["draft"] += f"; what is left is {kept}"

    def method(self) -> None:
        """A method that needs a drafter and has none becomes `auto`, which uses what there is."""
        method, draft = self.settings.get("method"), self.value("draft")
        if method is None or method.value not in self._methods.with_draft:
            return
        if draft is None:
            draft = self._methods.usual_drafters(self.value("model")) or None
        if draft is None or (isinstance(draft, Mapping) and method.value not in draft):
            reason = f"needs a drafter, and draft = {shorten(draft)} ({self._origin('draft')})"
            if self._missing:
                reason = f"{reason}; {self._missing}"
            if not method.source.persisted:
                raise ConfigError(f"{method}: {reason}")
            self._leave_out([method], reason)

    def without_effect(self) -> None:
        """A drafter or K that was set for a method which a source behind it excludes.

        Set by the same source they are for requests that choose another method.
        """
        method = self.settings.get("method")
        if method is None:
            return
        excluded = {
            "num_speculative_tokens": method.value == OFF and bool(self.value("num_speculative_tokens")),
            "draft": method.value in self._methods.without_draft and self.value("draft") is not None,
        }
        for field, without in excluded.items():
            setting = self.settings.get(field)
            if without and setting is not None and setting.rank < method.rank:
                reason = f"has no effect with {method}"
                if not setting.source.persisted:
                    raise ConfigError(f"{setting}: {reason}; set method beside it")
                self._leave_out([setting], reason)

    def orders(self) -> None:
        """Values of one table that contradict each other, by the checks of that table."""
        for home in dict.fromkeys(HOMES.values()):
            while reason := conflict(home.model, self._of(home)):
                involved = [
                    setting for setting in self.settings.values() if self._changes(home, setting, reason)
                ]
                together = ", ".join(map(str, involved))
                if not involved or not all(setting.source.persisted for setting in involved):
                    raise ConfigError(f"{reason}: {together}")
                self._leave_out(involved, reason)

    def _of(self, home: Home) -> dict[str, Any]:
        return {name: one.value for name, one in self.settings.items() if HOMES[name] == home}

    def _changes(self, home: Home, setting: Setting, reason: str) -> bool:
        """Whether without this value the table is right, or wrong in another way."""
        values = self._of(home)
        return (
            setting.field in values
            and conflict(home.model, {name: value for name, value in values.items() if name != setting.field})
            != reason
        )

    def _origin(self, field: str) -> str:
        found = self.settings.get(field)
        return DEFAULT.name if found is None else found.source.origin(field)

    def _leave_out(self, settings: Sequence[Setting], reason: str) -> None:
        """The default takes their place, not the value of a source behind: that is for other models."""
        message = f"{', '.join(map(str, settings))} left out: {reason}"
        for one in settings:
            self.left_out[one.field] = message
            self.settings[one.field] = Setting(one.field, default_of(one.field), DEFAULT, self._lowest)


def absences(draft: Any, methods: Methods) -> dict[str, str]:
    """Why drafters are not there, by method; the method of a single one is empty."""
    found = {}
    for method, path in draft.items() if isinstance(draft, Mapping) else [("", draft)]:
        if isinstance(path, str) and path != AUTO:
            try:
                methods.refuse_missing(path.removeprefix(SEARCH))
            except ModelNotFound as error:
                found[method] = str(error)
    return found


def default_of(field: str) -> Any:
    return HOMES[field].model.model_fields[field].get_default(call_default_factory=True)


def keywords_of(given: Mapping[str, Any], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The keywords of `EngineConfig`: what a command line gave, and each setting in its table."""
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    found.pop(SAMPLING, None)
    for name, setting in settings.items():
        home = HOMES[name]
        if home.of_engine:
            table = found.setdefault(home.table, {}) if home.table else found
            table[name] = setting.value
    return found


def of_table(settings: Mapping[str, Setting], table: str) -> dict[str, Any]:
    return {name: one.value for name, one in settings.items() if HOMES[name].table == table}
