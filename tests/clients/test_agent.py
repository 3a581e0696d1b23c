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
    """Whole and streamed, with the same calls."""
    tools = [tool(name, schema) for name, schema in ODD.items()]
    given: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": tools, "tool_choice": choice}
    given |= {"temperature": 0, "max_tokens": 48, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        whole = client.chat.completions.create(**given).choices[0]
        with client.chat.completions.stream(**given) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason
    assert (whole.message.content or "") == (streamed.message.content or "")
    assert calls_of(whole.message) == calls_of(streamed.message)
    assert (choice == "auto" and whole.message.content) or {name for name, _ in calls_of(whole.message)} <= {
        *ODD
    }


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
