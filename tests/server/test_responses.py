"""`/v1/responses` through the official client, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.server.choice import ChoiceDelta
from speculon.server.request import GenerationRequest
from speculon.server.response_events import ResponseAnswer
from speculon.server.responses import ResponseRequest, as_chat
from tests.server.inside import Inside, served
from tests.server.test_client_fields import MODEL

TOOL: dict[str, Any] = {"type": "function", "name": "birth", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "birth", "arguments": '{"age":7}'}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


NAMED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "birth"}}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_request_tokens=200) as inside:
        yield inside


@pytest.fixture(scope="module")
def client(inside: Inside) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=inside.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(inside: Inside, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each under its name, numbered from 0."""
    blocks = inside.post("responses", stream=True, **body).text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"] and events[-1]["sequence_number"] == number
    return events


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two requests."""
    output = [
        {key: part for key, part in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]
    return {**response, "id": None, "created_at": None, "output": output}


def check_adds_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The deltas of each item are its text, and the items are the output of the last event's response."""
    response: dict[str, Any] = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["id"] == item["id"]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
    return response


CASES: dict[str, dict[str, Any]] = {
    "text": {"input": "say:the end"},
    "cut": {"input": "x", "max_output_tokens": 7},
    "stop string": {"input": "say:one STOP two", "stop": "STOP"},
    "nothing": {"input": "x", "max_output_tokens": 0},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "say:é🙂"}]}]},
    "a call": {"input": 'say:{"age":7}', **NAMED},
    "calls": {
        "input": 'say:[{"name":"birth","arguments":{}},{"name":"birth","arguments":{"age":1}}]',
        "tools": [TOOL],
        "tool_choice": "required",
    },
    "log-probabilities": {"input": "say:yes", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "statistics": {"input": "say:yes", "speculation": {"stats": True, "explain": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole_responses_are_alike(inside: Inside, case: str) -> None:
    whole = inside.post("responses", **CASES[case]).json()
    events = events_of(inside, **CASES[case])
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert comparable(check_adds_up(events)) == comparable(whole)
    Response.model_validate(whole)


def test_a_delta_that_is_lost_is_seen(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    chunks = ResponseAnswer.chunks
    monkeypatch.setattr(ResponseAnswer, "chunks", lambda self, new: chunks(self, new)[:-1])
    with pytest.raises(AssertionError):
        check_adds_up(events_of(inside, input="say:the end"))


def test_a_response_is_as_openai_gives_it(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="scripted", input="say:yes", instructions="Be short.", metadata={"a": "b"}, temperature=0.5
    )
    assert (answer.output_text, answer.status, answer.object) == ("yes", "completed", "response")
    assert answer.id.startswith("resp_") and answer.output[0].type == "message"
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be short.", {"a": "b"}, 0.5)
    assert answer.usage is not None and answer.usage.output_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + 3
    assert answer.usage.input_tokens == len("[system]Be short.[user]say:yes")
    assert answer.store is False  # type: ignore[attr-defined]


def test_a_response_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="scripted", input="x", max_output_tokens=3)
    assert (answer.output_text, answer.status) == ("abc", "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    events = list(client.responses.create(model="scripted", input="x", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_streams_of_the_client(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="scripted", input="say:the end", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "the end"
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "the end"
    with client.responses.stream(model="scripted", input="say:the end") as stream:
        assert stream.get_final_response().output_text == "the end"
    with client.responses.stream(model="scripted", input='say:{"age":7}', **NAMED) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and (call.name, call.arguments) == ("birth", '{"age":7}')


class Person(BaseModel):
    age: int


def test_a_response_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="scripted", input='say:{"age":7}', text_format=Person)
    assert answer.output_parsed == Person(age=7)
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.type == "json_schema"


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input='say:{"age":7}', **NAMED)
    (call,) = first.output
    assert call.type == "function_call" and call.call_id.startswith("call_")
    said: list[Any] = [{"role": "user", "content": "say:no"}, *first.output]
    said += [{"type": "function_call_output", "call_id": call.call_id, "output": "say:done"}]
    answer = client.responses.create(model="scripted", input=said)
    assert answer.output_text.startswith("done")  # then the tag after a result, in the generic form
    again = [*said, *answer.output, {"role": "user", "content": "say:bye"}]
    assert client.responses.create(model="scripted", input=again).output_text == "bye"


def test_items_become_messages() -> None:
    part = {"type": "output_text", "text": "I look.", "annotations": []}
    items = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]},
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "call_2"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "12"}],
        },
    ]
    body = ResponseRequest.model_validate({"input": items, "instructions": "Read.", "tools": [TOOL]})
    chat = as_chat(body)
    roles = [(message.role, message.content) for message in chat.messages or ()]
    assert roles == [
        ("system", "Read."),
        ("developer", "Be short."),
        ("assistant", "I look."),
        ("tool", "12"),
    ]
    assert chat.messages is not None and chat.tools is not None
    assert [call.id for call in chat.messages[2].tool_calls or ()] == ["call_1", "call_2"]
    assert chat.messages[3].tool_call_id == "call_1"
    assert chat.tools[0].function.model_dump() == {
        key: TOOL.get(key) for key in ("name", "description", "parameters", "strict")
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "f"}]}, "input.0.input"),
        ({"input": [{"type": "local_shell_call", "action": {}}]}, "input.0.id"),
        ({"input": [{"id": "x", "type": None}]}, "input.0.type"),
        ({"tools": [{"name": "x"}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "parameter": {}}]}, "tools.0.parameter"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "name": "f"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": allowed("required", "other"), "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {**allowed("auto"), "mode": "none"}}, "tool_choice.mode"),
        ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{**CALL, "call_id": None}]}, "input.0.call_id"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, **NAMED}, "text.format"),
        ({"include": ["other"]}, "include.0"),
        ({"n": 2}, "n"),
    ],
)
def test_bad_responses_are_refused_by_name(inside: Inside, body: dict[str, Any], param: str) -> None:
    response = inside.post("responses", **{"input": "x", **body})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('"metadata": {"a": "\\ud800"}', "metadata"),
        ('"user": "\\ud800"', "user"),
        ('"tool_choice": "none", "tools": [{"type":"function","name":"f","parameters":{"a":NaN}}]', "tools"),
        ('"text": {"format": {"type": "text", "description": "\\ud800"}}', "text"),
    ],
)
def test_what_an_answer_could_not_show_again_is_refused(inside: Inside, body: str, param: str) -> None:
    headers = {"content-type": "application/json"}
    response = inside.client.post("/v1/responses", content='{"input": "x", ' + body + "}", headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_no_response_is_stored(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="scripted", input="say:yes", store=True)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="responses are not stored"):
            call(answer.id)
    with pytest.raises(openai.NotFoundError, match="responses are not stored"):
        client.responses.input_items.list(answer.id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_that_is_ended_early_has_failed(stream: bool) -> None:
    with served(script={"step_seconds": 0.05}, request_timeout=0.2) as inside:
        response = (
            events_of(inside, input="x")[-1]["response"]
            if stream
            else inside.post("responses", input="x").json()
        )
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert response["output"][0]["content"][0]["text"].startswith("abc")


def test_a_fault_of_the_engine_ends_the_stream() -> None:
    fault = RuntimeError("a planted fault")
    faults = [None, None, fault, fault]
    with (
        served(script={"faults": faults}) as inside,
        openai.OpenAI(base_url=inside.url + "/v1", api_key="x") as client,
    ):
        events = list(client.responses.create(model="scripted", input="x", stream=True))
        last = events[-1]
        assert last.type == "response.failed" and last.response.error is not None
        assert last.response.error.message and last.response.status == "failed"


def test_explained_tokens_are_carried_by_deltas(inside: Inside) -> None:
    events = events_of(inside, input="say:yes indeed", speculation={"explain": True})
    carried = [token for e in events if e["type"].endswith(".delta") for token in e["speculation"]["tokens"]]
    assert carried == events[-1]["response"]["speculation"]["tokens"]
    assert "".join(token["token"] for token in carried) == "yes indeed"


PLAN, HELLO, YOU = {"reasoning_content": "plan"}, {"content": "Hello"}, {"content": " you"}


@pytest.mark.parametrize(
    "events",
    [
        [([PLAN], []), ([], []), ([HELLO], ["Hello"]), ([YOU], [" you"])],
        [([PLAN, HELLO], ["Hello"]), ([YOU], [" you"])],
        [([PLAN, HELLO, YOU], ["Hello", " you"])],
    ],
    ids=["one by one", "two", "at once"],
)
def test_a_message_after_a_thinking_has_the_log_probabilities_of_all_its_tokens(events: list[Any]) -> None:
    request = GenerationRequest(True, [[1]], SamplingParams(), RequestSpeculation(), "off")
    answer = ResponseAnswer(ResponseRequest(input="x"), "r", request, MODEL)
    deltas = [ChoiceDelta(0, parts, {"content": logprobs}) for parts, logprobs in events]
    assert answer.whole(deltas)["output"][-1]["content"][0]["logprobs"] == ["Hello", " you"]
