"""Settings that refuse bad values with one typed error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from speculon.errors import InvalidParameter


class Checked(BaseModel):
    """Refuses bad values with `InvalidParameter`, which names the field, the value and the limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, /, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise invalid_parameter(error) from None


def invalid_parameter(error: ValidationError) -> InvalidParameter:
    first = error.errors(include_url=False)[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidParameter):  # of settings within settings, which has named its own field
        return InvalidParameter(".".join([*map(str, first["loc"]), inner.name]), inner.value, inner.limit)
    name = ".".join(str(part) for part in first["loc"]) or error.title
    limit = (
        "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    )
    return InvalidParameter(name, None if first["type"] == "missing" else first["input"], limit)


def new_or_there(value: Path | None) -> Path | None:
    """A folder that is there, or that can be made by its last name."""
    if value is not None and not (
        value.is_dir() or (value.absolute().parent.is_dir() and not value.exists())
    ):
        raise ValueError("a folder, or the name of a new one in a folder that is there")
    return value
