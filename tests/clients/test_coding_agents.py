"""The first three turns of Codex and of opencode, with a published model.

The requests are written by hand, in the shapes that these programs send. Only the length of answers is
bounded.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response

SHORT = 24  # tokens of an answer

# Codex

SHELL = {
    "type": "function",
    "name": "shell_command",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the task plan.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "plan": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                    "required": ["step", "status"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["plan"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
}
DOCS = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Tools of the server docs.",
    "tools": [{**SHELL, "name": "search", "description": "Searches the documents.", "defer_loading": True}],
}
CODEX: dict[str, Any] = {
    "model": "smollm2",
    "instructions": "You are a coding agent in a terminal. Be brief.",
    "tools": [
        SHELL,
        PLAN,
        PATCH,
        DOCS,
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a-thread",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
    "temperature": 0,
    "max_output_tokens": SHORT,
}


def message(role: str, text: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


def lines(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", "accept": "text/event-stream"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def codex(url: str, said: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """The items that Codex keeps of a turn."""
    events = list(lines(f"{url}/responses", {**CODEX, "input": said, **more}))
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    assert last["response"]["usage"]["output_tokens"] <= SHORT
    Response.model_validate(last["response"])
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items and items == last["response"]["output"]
    for item in items:  # what Codex reads of an item
        assert item["type"] in ("message", "function_call", "custom_tool_call")
        assert item["type"] == "message" or (item["call_id"] and item["name"])
    return items


def test_three_turns_of_codex(smollm2_url: str) -> None:
    said = [
        message("developer", "<permissions instructions>Read only.</permissions instructions>"),
        message("user", "<environment_context><cwd>/src</cwd><shell>bash</shell></environment_context>"),
        message("user", "Which files are here?"),
    ]
    said += codex(smollm2_url, said)
    said += [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {
            "type": "function_call",
            "name": "shell_command",
            "arguments": '{"command":"ls"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\na.py\n"},
        {
            "type": "local_shell_call",
            "call_id": "call_2",
            "status": "completed",
            "action": {"type": "exec", "command": ["cat", "a.py"], "timeout_ms": None, "env": None},
        },
        {"type": "function_call_output", "call_id": "call_2", "output": "x = 1\n"},
        {
            "type": "web_search_call",
            "status": "completed",
            "action": {"type": "search", "query": "python"},
        },
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_3",
            "name": "apply_patch",
            "input": "*** Begin Patch\n*** End Patch\n",
        },
        {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Success."},
        {
            "type": "function_call",
            "name": "search",
            "namespace": "mcp__docs",
            "arguments": '{"command":"x"}',
            "call_id": "call_4",
        },
        {
            "type": "function_call_output",
            "call_id": "call_4",
            "output": [{"type": "input_text", "text": "Nothing found."}],
        },
        {"type": "compaction", "encrypted_content": "gAAA"},
        message("user", "Go on."),
    ]
    said += codex(smollm2_url, said)
    said += [message("user", "Thank you. Edit it.")]
    choice = {"type": "custom", "name": "apply_patch"}
    (call,) = codex(smollm2_url, said, tool_choice=choice)
    assert call["type"] == "custom_tool_call" and call["name"] == "apply_patch" and call["input"]


# opencode

OPENCODE: dict[str, Any] = {
    "model": "smollm2",
    "max_tokens": SHORT,
    "temperature": 0,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool {name}.",
                "parameters": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {
                        argument: {"type": "string", "description": "What."},
                        "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                    },
                    "required": [argument],
                    "additionalProperties": False,
                },
            },
        }
        for name, argument in (("bash", "command"), ("read", "filePath"), ("grep", "pattern"))
    ],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}


def opencode(url: str, said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The message that opencode keeps of a turn."""
    chunks = list(lines(f"{url}/chat/completions", {**OPENCODE, "messages": said, **more}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls") and choices[-1]["delta"] == {}
    assert chunks[-1]["usage"]["completion_tokens"] <= SHORT
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls: dict[int, dict[str, Any]] = {}
    for part in (part for choice in choices for part in choice["delta"].get("tool_calls", ())):
        call = calls.setdefault(part["index"], {**part, "function": {"name": "", "arguments": ""}})
        for key, value in part["function"].items():
            call["function"][key] += value
    kept = [{key: call[key] for key in ("id", "type", "function")} for call in calls.values()]
    return {"role": "assistant", "content": text, **({"tool_calls": kept} if kept else {})}


def called(identity: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": identity, "type": "function", "function": function}


def test_three_turns_of_opencode(smollm2_url: str) -> None:
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "You are opencode, an agent. Be brief."},
        {"role": "system", "content": "<env>\n  Working directory: /src\n</env>"},
        {"role": "user", "content": "Which files are here?"},
    ]
    first = opencode(smollm2_url, said)
    assert first["content"] or first["tool_calls"]
    calls = [called("call_1", "bash", command="ls"), called("call_2", "read", filePath="/src/a.py")]
    said += [
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py\n"},
        {"role": "tool", "tool_call_id": "call_2", "content": "<file>\n00001| x = 1\n</file>"},
    ]
    said += [opencode(smollm2_url, said)]
    said += [{"role": "user", "content": [{"type": "text", "text": "Thank you. Read it again."}]}]
    named = [{"type": "function", "function": {"name": "read"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    last = opencode(smollm2_url, said, tool_choice=choice)
    assert {call["function"]["name"] for call in last["tool_calls"]} == {"read"}


@pytest.mark.parametrize("field", ["tools", "input"])
def test_what_is_wrong_in_a_turn_is_told(smollm2_url: str, field: str) -> None:
    """Not everything is taken."""
    wrong = {"tools": [{**SHELL, "parameter": {}}], "input": [{"type": "message", "content": "x"}]}
    with pytest.raises(urllib.request.HTTPError) as refused:
        list(lines(f"{smollm2_url}/responses", {**CODEX, "input": "x", field: wrong[field]}))
    error = json.loads(refused.value.read())["error"]
    assert refused.value.code == 400 and error["param"].startswith(f"{field}.0."), error
