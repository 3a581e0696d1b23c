"""The settings of a model as an administrator sees and changes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from speculon.core.config.models import HOMES, Methods, ModelSettings, needs_new_worker
from speculon.core.config.models.fields import home_of
from speculon.core.config.models.merge import default_of
from speculon.core.config.speculation import USUAL_DRAFTS
from speculon.core.errors import InvalidParameter
from speculon.operations.admin.schemas import FieldView

PLAIN_JSON: TypeAdapter[Any] = TypeAdapter(Any)
OF_THE_START = ("model", "served_model_name")
# what a remote administrator must not be able to set: it runs code, or writes where it says
UNSAFE = ("trust_remote_code", "allow_pickle", "events", "state")
SOURCES = {"flag": "flag", "environment": "environment", "model's settings": "model", "": "file"}


def fields_of(found: ModelSettings, methods: Methods) -> list[FieldView]:
    choices = {"method": sorted(methods.known), "policy": list(USUAL_DRAFTS)}
    return [field_of(found, name, choices.get(name)) for name in HOMES]


def field_of(found: ModelSettings, name: str, choices: list[str] | None) -> FieldView:
    home, setting = HOMES[name], found.settings.get(name)
    source = "default" if setting is None else SOURCES.get(setting.source.name, "default")
    return FieldView(
        name=name,
        group=home.table if home.table in ("speculation", "sampling", "pool") else "engine",
        value=as_json(found.value(name)),
        default=as_json(default_of(name)),
        description=home.model.model_fields[name].description or "",
        value_schema=schema_of(name) | ({"enum": choices} if choices else {}),
        source=source,
        origin=found.origin(name),
        locked=lock_of(found, name),
        new_worker=needs_new_worker(name),
    )


def lock_of(found: ModelSettings, name: str) -> str | None:
    """Why a field cannot be changed here; None: it can."""
    if name in OF_THE_START:
        return "set where the server is started"
    if name in UNSAFE:
        return "only in the file or by a flag: it can run code of a checkpoint, or write files"
    setting = found.settings.get(name)
    if setting is not None and setting.source.name == "flag":
        return f"set by a flag, which goes before the file: --{name.replace('_', '-')}"
    if setting is not None and setting.source.name == "environment":
        return "set by the environment, which goes before the file"
    return None


def check_unlocked(found: ModelSettings, changes: Mapping[str, Any]) -> None:
    """Raises `InvalidParameter` for an unknown field, or one that cannot be changed here."""
    for name, value in changes.items():
        home_of(name, value)
        if (why := lock_of(found, name)) is not None:
            raise InvalidParameter(name, value, why)


@cache
def schema_of(name: str) -> dict[str, Any]:
    schema = HOMES[name].model.model_json_schema()
    found = dict(schema["properties"].get(name, {}))
    if "$ref" in json.dumps(found):
        found["$defs"] = schema.get("$defs", {})
    return found


def as_json(value: Any) -> Any:
    return PLAIN_JSON.dump_python(value, mode="json", fallback=str)
