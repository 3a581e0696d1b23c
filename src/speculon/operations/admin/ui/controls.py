"""A control for each type of a setting, by its JSON schema: switch, number, choice, list or text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from speculon.operations.admin.schemas import FieldView
from speculon.operations.admin.ui.words import UiWords

EXACT = 2**53  # beyond it a browser's numbers are not exact
SWITCHED = {"": None, "on": True, "off": False}  # a switch that may be left to the server


@dataclass
class Control:
    """What shows a value. `parse` makes JSON of what is typed, None where it is empty; `form` undoes it."""

    shown: Any  # an element
    parse: Callable[[Any], Any] = lambda typed: typed
    form: Callable[[Any], Any] = lambda value: value
    one_line: bool = False  # the enter key has no meaning of its own in it

    def read(self) -> Any:
        return self.parse(self.shown.value)

    def write(self, value: Any) -> None:
        self.shown.value = self.form(value)

    def lock(self) -> None:
        # Quasar's switch knows no `readonly`
        self.shown.disable() if isinstance(self.shown, ui.switch) else self.shown.props("readonly")


class Number(ui.number):
    def sanitize(self) -> None:
        """It stays as it was typed: a value beyond its limits is refused, and not replaced."""


def control_of(field: FieldView, words: UiWords) -> Control:
    control = empty(field, words)
    control.write(field.value)
    if not isinstance(control.shown, ui.switch):
        control.shown.props("outlined dense").classes("w-full")
    return control


def empty(field: FieldView, words: UiWords) -> Control:
    (schema, optional), name = plain_schema(field.value_schema), field.name
    json_type = schema.get("type")
    if "enum" in schema:
        # a value that is no longer known stays as it is
        return Control(ui.select(list(dict.fromkeys([*schema["enum"], field.value])), label=name))
    if json_type == "boolean" and optional:
        texts = {"": words("models.unset"), "on": words("models.on"), "off": words("models.off")}
        return Control(ui.select(texts, label=name), SWITCHED.get, key_of)
    if json_type == "boolean":
        return Control(ui.switch(name))
    if json_type in ("integer", "number") and is_exact(schema):
        return Control(number(name, schema), unified, one_line=True)
    if json_type == "array":
        item = whole if schema.get("items", {}).get("type") == "integer" else str
        chips = ui.input_chips(name, new_value_mode="add-unique")
        return Control(chips, lambda typed: [item(text) for text in typed] or None, as_texts)
    if json_type in ("string", "integer"):
        return Control(ui.input(name), whole if json_type == "integer" else or_none, as_text, one_line=True)
    return Control(ui.textarea(name).props("autogrow"), as_json, as_text)


def plain_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(the schema of a value, whether it may be null)."""
    types = [part for part in schema.get("anyOf", ()) if part.get("type") != "null"]
    return (types[0], True) if len(types) == 1 else (schema, bool(types))


def is_exact(schema: dict[str, Any]) -> bool:
    limits = [schema.get(name, 0) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
    return all(abs(limit) <= EXACT for limit in limits)


def number(name: str, schema: dict[str, Any]) -> Number:
    shown = Number(name)
    shown.props["step"] = 1 if schema["type"] == "integer" else "any"
    for side, bound in (("min", "minimum"), ("max", "maximum")):
        if bound in schema:
            shown.props[side] = schema[bound]
    return shown


def key_of(value: bool | None) -> str:
    return next(key for key, one in SWITCHED.items() if one is value)


def as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_texts(values: list[Any] | None) -> list[str]:
    return [str(value) for value in values or ()]


def or_none(text: str | None) -> str | None:
    return text or None


def unified(value: float | None) -> float | None:
    """A browser's 3 may arrive as 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole(text: str | None) -> Any:
    """An integer of any size."""
    return parsed(int, text)


def as_json(text: str | None) -> Any:
    return parsed(json.loads, text)


def parsed(parse: Callable[[str], Any], text: str | None) -> Any:
    """None for an empty text; one that cannot be parsed stays as it is, for the server to refuse."""
    try:
        return parse(text) if text else None
    except ValueError:
        return text
