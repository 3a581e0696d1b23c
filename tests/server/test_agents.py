"""What agents send beside functions: tools that a server runs, tools of text, namespaces, items of calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from speculon.server.responses import ResponseRequest, as_chat
from speculon.server.tools import input_of
from tests.server.inside import Inside, served
from tests.server.test_abuse import refusal
from tests.server.test_responses import allowed, events_of

SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "parameters": {"type": "object"},
    "strict": False,
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
GIT: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__git",
    "description": "Git.",
    "tools": [{**SHELL, "name": "log", "defer_loading": True}, {**SHELL, "output_schema": {}}, PATCH],
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True},
    {"type": "web_search_preview_2025_03_11", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["a"]},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "a", "server_url": "https://example.org"},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "", "parameters": {}},
]
SKIPPED: list[dict[str, Any]] = [
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "x"}},
    {
        "type": "tool_search_output",
        "call_id": "1",
        "execution": "client",
        "status": "completed",
        "tools": [GIT],
    },
    {"type": "item_reference", "id": "msg_1"},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None},
    {"type": "computer_call_output", "call_id": "2", "output": {"type": "computer_screenshot"}},
    {"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]},
    {"type": "image_generation_call", "id": "i", "result": "AAAA"},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
]
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say:yes"}]}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_request_tokens=400) as inside:
        yield inside


@pytest.fixture(scope="module")
def client(inside: Inside) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=inside.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_of(**body: Any) -> Any:
    return as_chat(ResponseRequest.model_validate({"input": "x", **body}))


def names(chat: Any) -> list[str]:
    return [tool.function.name for tool in chat.tools or () if tool.type == "function"]


# tools


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
@pytest.mark.parametrize("route", ["responses", "chat/completions"])
def test_hosted_tools_are_left_out(
    inside: Inside, caplog: pytest.LogCaptureFixture, route: str, tool: dict[str, Any]
) -> None:
    chat = route != "responses"
    own = {"type": "function", "function": {"name": "shell"}} if chat else SHELL
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "say:yes"}]} if chat else {"input": [USER]}
    )
    with caplog.at_level(logging.INFO, "speculon.server"):
        answer = inside.post(route, **body, tools=[tool, own], tool_choice="auto")
    assert answer.status_code == 200 and "yes" in answer.text, answer.text
    (line,) = [line for line in caplog.messages if "left out" in line]
    assert line.endswith(tool["type"])
    alone = inside.post(route, **body, tools=[tool])
    assert alone.status_code == 200, alone.text
    forced = refusal(inside.post(route, **body, tools=[tool], tool_choice="required"), 400)
    assert forced["param"] == "tool_choice"
    assert (
        refusal(inside.post(route, **body, tools=[own, tool], tool_choice=tool), 400)["param"]
        == "tool_choice"
    )


def test_the_content_of_an_item_that_is_left_out_is_not_read(inside: Inside) -> None:
    other = {"type": "web_search_call", "content": [{"no": "type"}]}
    assert inside.post("responses", input=[other, USER]).status_code == 200


def test_a_namespaces_functions_have_its_name_where_they_need_it() -> None:
    assert names(chat_of(tools=[SHELL, GIT])) == ["shell", "log", "mcp__git__shell", "apply_patch"]
    long = {**GIT, "name": "a.b" * 30}
    found = names(chat_of(tools=[SHELL, PATCH, long]))
    assert all(len(name) <= 64 and "." not in name for name in found) and len(set(found)) == 5


def test_a_custom_tool_is_a_function_of_a_text() -> None:
    (tool,) = chat_of(tools=[PATCH]).tools
    assert tool.function.parameters["required"] == ["input"]
    assert (
        tool.function.description == 'Edits files.\nThe input follows this grammar:\nstart: "*** Begin Patch"'
    )
    (free,) = chat_of(tools=[{"type": "custom", "name": "f", "format": {"type": "text"}}]).tools
    assert free.function.description is None


@pytest.mark.parametrize(
    ("tool", "choice", "fields"),
    [
        (
            PATCH,
            {"type": "custom", "name": "apply_patch"},
            {"type": "custom_tool_call", "name": "apply_patch"},
        ),
        (
            {**GIT, "tools": GIT["tools"][2:]},
            {"type": "custom", "name": "apply_patch", "namespace": "mcp__git"},
            {"type": "custom_tool_call", "name": "apply_patch", "namespace": "mcp__git"},
        ),
        (
            {**GIT, "tools": [SHELL]},
            {"type": "function", "name": "shell", "namespace": "mcp__git"},
            {"type": "function_call", "name": "shell", "namespace": "mcp__git"},
        ),
    ],
    ids=["custom", "custom of a namespace", "function of a namespace"],
)
@pytest.mark.parametrize("forced", [True, False])
def test_calls_go_back_as_the_client_knows_them(
    inside: Inside, tool: dict[str, Any], choice: dict[str, Any], fields: dict[str, Any], forced: bool
) -> None:
    text = '*** Begin Patch\n+é "1"'
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    call = f'{{"name":"{fields["name"]}","arguments":{arguments}}}'
    said = f"say:{arguments}" if forced else f"say:<tool_call>{call}</tool_call>"
    body: dict[str, Any] = {"input": said, "tools": [tool], "tool_choice": choice if forced else "auto"}
    whole = inside.post("responses", **body).json()
    (item,) = whole["output"]
    Response.model_validate(whole)
    assert item.items() >= fields.items() and item["call_id"].startswith("call_")
    assert item["status"] == "completed"
    assert item.get("input", item.get("arguments")) == (text if "input" in item else arguments)
    events = events_of(inside, **body)
    (added,) = [event for event in events if event["type"] == "response.output_item.added"]
    assert added["item"].items() >= fields.items() and added["item"].get("input", "") == ""
    deltas = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert deltas == item.get("input", item.get("arguments"))
    (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert {**done, "id": 0, "call_id": 0} == {**item, "id": 0, "call_id": 0}
    if "input" in item:
        (ended,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
        assert ended["input"] == text and ended["item_id"] == done["id"]
    # and the next turn takes it
    output = {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "Done"}
    (ask, called, result) = chat_of(input=[USER, item, output], tools=[tool]).messages
    assert called.tool_calls[0].function.arguments == arguments and result.content == "Done"


def test_a_client_streams_a_call_of_a_custom_tool(client: openai.OpenAI) -> None:
    tool: Any = PATCH
    choice: Any = {"type": "custom", "name": "apply_patch"}
    with client.responses.stream(
        model="scripted", input='say:{"input":"a"}', tools=[tool], tool_choice=choice
    ) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("apply_patch", "a")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "a"}', "a"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "cut', '{"input": "cut'),
        ("", ""),
        ("[1]", "[1]"),
    ],
)
def test_the_text_of_a_call(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


# choices


def test_only_allowed_tools_are_offered(inside: Inside) -> None:
    two = [SHELL, {**SHELL, "name": "other"}]
    call = '{"name":"other","arguments":{}}'
    body: dict[str, Any] = {"input": f"say:[{call}]", "tools": two}
    answer = inside.post("responses", **body, tool_choice=allowed("required", "other")).json()
    assert [item["name"] for item in answer["output"]] == ["other"]
    assert answer["tool_choice"]["type"] == "allowed_tools"
    # of no tool at all the text is a text
    for choice in (allowed("auto"), {**allowed("auto"), "tools": [{"type": "mcp", "server_label": "x"}]}):
        answer = inside.post(
            "responses", input=f"say:<tool_call>{call}</tool_call>", tools=two, tool_choice=choice
        )
        assert [item["type"] for item in answer.json()["output"]] == ["message"]
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"say:[{call}]"}],
        "tools": [{"type": "function", "function": {"name": name}} for name in ("shell", "other")],
    }
    named = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    (choice_of,) = inside.post("chat/completions", **chat, tool_choice=choice).json()["choices"]
    assert choice_of["message"]["tool_calls"][0]["function"]["name"] == "other"
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "missing"}}]
    assert refusal(inside.post("chat/completions", **chat, tool_choice=choice), 400)["param"] == "tool_choice"
    choice["allowed_tools"]["mode"] = "auto"
    assert inside.post("chat/completions", **chat, tool_choice=choice).status_code == 200


# items


@pytest.mark.parametrize("item", SKIPPED, ids=lambda item: item["type"])
def test_items_without_text_are_skipped(
    inside: Inside, caplog: pytest.LogCaptureFixture, item: dict[str, Any]
) -> None:
    with caplog.at_level(logging.INFO, "speculon.server"):
        answer = inside.post("responses", input=[item, USER], client_metadata={"a": "b"}, store=False)
    assert answer.status_code == 200 and answer.json()["output"][0]["content"][0]["text"] == "yes", (
        answer.text
    )
    assert item["type"] == "reasoning" or any(item["type"] in line for line in caplog.messages)


def test_items_with_text_are_in_the_history() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    said = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I plan."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        {"type": "local_shell_call", "id": "lsh_1", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "a.py"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "***"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "ok"}],
        },
        {
            "type": "function_call",
            "call_id": "c2",
            "name": "shell",
            "namespace": "mcp__git",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c2", "output": "no"},
        {"type": "agent_message", "role": "user", "content": "Thanks."},
    ]
    chat = chat_of(input=said, tools=[SHELL, GIT])
    shown = [
        (m.role, m.content, [(c.id, c.function.name, c.function.arguments) for c in m.tool_calls or ()])
        for m in chat.messages
    ]
    assert shown == [
        ("assistant", "Look:", [("lsh_1", "local_shell", json.dumps(action))]),
        ("tool", "a.py", []),
        ("assistant", None, [("c1", "apply_patch", '{"input": "***"}')]),
        ("tool", "ok", []),
        ("assistant", None, [("c2", "mcp__git__shell", "{}")]),
        ("tool", "no", []),
        ("user", "Thanks.", []),
    ]
    assert chat.messages[0].reasoning_content == "I plan."
