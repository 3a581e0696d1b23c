"""openai with the tools of an agent: schemas as servers of the model context protocol write them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from .forms import ASK

DRAFT = "http://json-schema.org/draft-07/schema#"
# each of a parameter
ODD: dict[str, Any] = {
    "open_page": {"type": "string", "format": "uri-reference"},
    "upload": {"type": "string", "format": "byte", "contentEncoding": "base64"},
    "fetch": {"type": "string", "format": "url", "minLength": 1},
    "set_password": {"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-z]).{8,}$"},
    "label": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "set_variables": {"type": "object", "propertyNames": {"pattern": "^[A-Z_]+$"}},
    "search": {"type": "string", "not": {"const": ""}},
    "schedule": {"type": "object", "if": {"required": ["at"]}, "then": {"required": ["zone"]}},
    "send": {"$ref": "https://example.org/message.json"},
    "list_files": {"type": "object", "properties": {"path": {"type": "string"}}, "required": None},
    "resize": {"type": ["integer", "null"], "exclusiveMinimum": 0, "default": None},
    "choose": {"anyOf": [{"const": "a"}, {"type": "object", "additionalProperties": {}}], "title": "Choice"},
}


def tool(name: str, schema: Any) -> Any:
    parameters = {"$schema": DRAFT, "type": "object", "properties": {"value": schema}, "required": ["value"]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_twelve_odd_tools_are_answered(base_url: str, choice: str) -> None:
    """Whole and streamed, with the same text and the same calls."""
    tools = [tool(name, schema) for name, schema in ODD.items()]
    given: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": tools, "tool_choice": choice}
    given |= {"temperature": 0, "max_tokens": 48, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        message = client.chat.completions.create(**given).choices[0].message
        deltas = [one.choices[0].delta for one in client.chat.completions.create(**given, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
    names = [part.name for part in parts if part.name]
    arguments = "".join(part.arguments or "" for part in parts)
    assert [(name, arguments) for name in names] == [
        (call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    assert message.content or {*names} <= {*ODD}
    assert names or choice == "auto"
