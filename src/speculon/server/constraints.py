"""The form that a body asks of the text, under OpenAI's or vLLM's names, as the engine's `Structured`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from speculon.core.config import Structured
from speculon.core.errors import InvalidParameter
from speculon.server.schemas import Sampling

# vLLM's field -> our field, in `structured_outputs` and in the fields that begin with `guided_`
NAMES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class Form(NamedTuple):
    """What a body asks of the text."""

    name: str  # of the body's field
    value: Any  # of it, as an error shows it
    structured: Structured


def form_of(body: Sampling) -> Form | None:
    """The one form of a body, or None. Two forms, and forms that are wrong, are refused by name."""
    forms = [*response_formats(body), *structured_outputs(body), *guided(body)]
    if len(forms) > 1:
        (first, *_), (name, _, value), *_ = forms
        raise InvalidParameter(name, value, f"not together with {first}")
    return next((Form(name, value, structured(name, field, value)) for name, field, value in forms), None)


def structured(name: str, field: str, value: Any) -> Structured:
    """Errors are about the parameter `name`."""
    try:
        return Structured(**{field: value})
    except InvalidParameter as error:
        raise error.renamed(name) from None


def response_formats(body: Sampling) -> list[tuple[str, str, Any]]:
    """(name, our field, value) of `response_format`."""
    form = body.response_format
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", "json_object", True)]
    if form.json_schema is None:
        raise InvalidParameter("response_format.json_schema", None, "is needed with type json_schema")
    return [("response_format.json_schema", "json_schema", form.json_schema.schema_)]


def structured_outputs(body: Sampling) -> list[tuple[str, str, Any]]:
    fields = body.structured_outputs
    if fields is None:
        return []
    given = fields.model_dump(by_alias=True, exclude_none=True)
    forms = [(f"structured_outputs.{name}", NAMES.get(name, name), value) for name, value in given.items()]
    forms = [form for form in forms if form[2] is not False]
    if not forms:
        raise InvalidParameter(
            "structured_outputs", given, f"give one of {', '.join([*NAMES, 'json_object'])}"
        )
    return [(name, field, as_schema(name, field, value)) for name, field, value in forms]


def guided(body: Sampling) -> list[tuple[str, str, Any]]:
    forms = ((f"guided_{name}", field) for name, field in NAMES.items())
    given = [(name, field, getattr(body, name)) for name, field in forms]
    return [(name, field, as_schema(name, field, value)) for name, field, value in given if value is not None]


def as_schema(name: str, field: str, value: Any) -> Any:
    """A JSON schema, which may have been sent as text; any other value as it is."""
    if field != "json_schema" or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(name, value, f"is no JSON: {error}") from None
