"""Answers over a scripted engine: whole and streamed ones are alike, and their finish reasons are true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.inside import Inside, served

EMOJI = "é€🙂 and 👩‍👧 end"


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_request_tokens=200) as inside:
        yield inside


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def add(whole: Any, part: Any) -> Any:
    """Two values of the same key, as a client puts them together."""
    if whole is None or part is None:
        return part if whole is None else whole
    if isinstance(whole, str | list):
        return whole + part
    return {key: add(whole.get(key), part.get(key)) for key in {**whole, **part}}


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a stream adds up to."""
    choices: dict[int, dict[str, Any]] = {}
    more: dict[str, Any] = {}
    for event in events:
        more |= {key: event[key] for key in ("usage", "speculation") if event.get(key) is not None}
        for choice in event["choices"]:
            merged = choices.setdefault(choice["index"], {"index": choice["index"], "logprobs": None})
            assert merged.get("finish_reason") is None, "something comes after the end"
            assert not (choice["finish_reason"] and carried(choice)), "some clients ignore what is beside it"
            for key in ("text", "delta", "logprobs", "speculation"):
                if key in choice:
                    merged[key] = add(merged.get(key), choice[key])
            merged |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    for choice in choices.values():
        if "delta" in choice:
            choice["message"] = message_of(choice.pop("delta"))
    return {"choices": [choices[index] for index in sorted(choices)], **more}


def carried(choice: dict[str, Any]) -> list[Any]:
    """What a chunk adds to a choice."""
    parts = [choice.get("text"), choice.get("delta"), choice.get("speculation", {}).get("tokens")]
    return [part for part in (*parts, *(choice["logprobs"] or {}).values()) if part]


def message_of(delta: dict[str, Any]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for part in delta.pop("tool_calls", ()):
        if part["index"] == len(calls):
            calls.append({**part, "function": {"name": "", "arguments": ""}})
        calls[part["index"]]["function"] = add(calls[part["index"]]["function"], part["function"])
    if not calls:
        return delta
    calls = [{key: call[key] for key in ("type", "function")} for call in calls]
    return {**delta, "content": delta["content"] or None, "tool_calls": calls}


def comparable(whole: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two requests."""
    kept = {key: whole[key] for key in ("choices", "usage", "speculation") if key in whole}
    for choice in kept["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id", None), call.pop("index", None)
    for name in ("draft_ms", "verify_ms", "saved_ms"):
        kept.get("speculation", {}).pop(name, None)
    return kept


def check_alike(whole: dict[str, Any], events: list[dict[str, Any]]) -> None:
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert comparable(put_together(events)) == comparable(whole)


CASES: dict[str, dict[str, Any]] = {
    "length": {"prompt": "a", "max_tokens": 7},
    "stop": {"prompt": "say:the end", "max_tokens": 50},
    "stop string": {"prompt": "say:one STOP two", "max_tokens": 50, "stop": ["nothing", "STOP"]},
    "held back": {"prompt": "say:one STO two ST", "max_tokens": 50, "stop": "STOP", "logprobs": 1},
    "no tokens": {"prompt": "x", "max_tokens": 0},
    "echo alone": {"prompt": EMOJI, "max_tokens": 0, "echo": True, "logprobs": 0},
    "echo": {"prompt": EMOJI + "say:" + EMOJI, "max_tokens": 90, "echo": True, "logprobs": 2},
    "characters of bytes": {"prompt": "say:" + EMOJI, "max_tokens": 90, "logprobs": 1},
    "cut in a character": {"prompt": "say:" + EMOJI, "max_tokens": 6, "logprobs": 1},
    "many": {"prompt": ["say:one", "two", "say:three"], "n": 3, "max_tokens": 9, "logprobs": 0},
    "ids": {"prompt": [[104, 105], [97]], "max_tokens": 3},
    "stats": {"prompt": "say:yes", "speculation": {"stats": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole_completions_are_alike(inside: Inside, case: str) -> None:
    whole = inside.post("completions", **CASES[case]).json()
    body = {**CASES[case], "stream": True, "stream_options": {"include_usage": True}}
    check_alike(whole, events_of(inside.post("completions", **body)))


@pytest.mark.parametrize(
    "case", [name for name, body in CASES.items() if isinstance(body["prompt"], str) and "echo" not in body]
)
def test_streamed_and_whole_chats_are_alike(inside: Inside, case: str) -> None:
    body = dict(CASES[case])
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    body["max_tokens"] = body.get("max_tokens", 20)
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    whole = inside.post("chat/completions", **body).json()
    events = events_of(
        inside.post("chat/completions", **body, stream=True, stream_options={"include_usage": True})
    )
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    check_alike(whole, events)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_statistics_of_a_short_answer_have_all_counts(inside: Inside, route: str, max_tokens: int) -> None:
    """Zeros where no round ran."""
    prompts = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}
    body = prompts.get(route, {"messages": [{"role": "user", "content": "x"}]})
    body |= {"max_output_tokens" if route == "responses" else "max_tokens": max_tokens}
    account = inside.post(route, **body, speculation={"stats": True}).json()["speculation"]
    assert (account["rounds"], account["drafted"], account["emitted"]) == (0, 0, max_tokens)
    assert account.keys() >= {"target_calls", "accepted", "tokens_per_target_call", "per_position", "reasons"}


CALL: dict[str, Any] = {
    "messages": [{"role": "user", "content": 'say:{"age":7}'}],
    "tools": [{"type": "function", "function": {"name": "birth"}}],
    "tool_choice": {"type": "function", "function": {"name": "birth"}},
}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", CASES["length"]),
        ("completions", {**CASES["many"], "speculation": {"explain": True}}),
        ("completions", {**CASES["stop string"], "logprobs": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 7}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 7, "n": 2}),
        ("chat/completions", {**CALL, "max_tokens": 13}),
        ("chat/completions", {**CALL, "max_tokens": 12, "logprobs": True, "stop": "7"}),
    ],
    ids=["text", "several", "stop string", "chat", "n", "call", "cut call"],
)
def test_the_finish_reason_has_a_chunk_of_its_own(inside: Inside, route: str, body: dict[str, Any]) -> None:
    """After the text, and before the usage."""
    options = {"include_usage": True}
    *chunks, usage = events_of(inside.post(route, **body, stream=True, stream_options=options))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert len(ends) == len({choice["index"] for choice in choices}) and not any(map(carried, ends))
    assert all("text" in end or end["delta"] == {} for end in ends)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    check_alike(inside.post(route, **body).json(), [*chunks, usage])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda events: events.pop(1), id="a chunk is lost"),
        pytest.param(lambda events: events.insert(1, events[1]), id="a chunk comes twice"),
        pytest.param(
            lambda events: events[-2]["choices"][0].update(finish_reason="stop"), id="another reason"
        ),
        pytest.param(lambda events: events[-1]["usage"].update(completion_tokens=1), id="another usage"),
        pytest.param(
            lambda events: events[1]["choices"][0]["logprobs"]["text_offset"].append(3), id="another offset"
        ),
        pytest.param(lambda events: events[1].update(id="other"), id="another id"),
        pytest.param(lambda events: events.insert(-1, events[1]), id="text after the end"),
    ],
)
def test_a_stream_that_differs_is_seen(inside: Inside, fault: Any) -> None:
    """The twin of the two above."""
    body = {"prompt": "a", "max_tokens": 7, "logprobs": 0}
    whole = inside.post("completions", **body).json()
    events = events_of(
        inside.post("completions", **body, stream=True, stream_options={"include_usage": True})
    )
    check_alike(whole, json.loads(json.dumps(events)))
    fault(events)
    with pytest.raises(AssertionError):
        check_alike(whole, events)


@pytest.mark.parametrize(
    ("prompt", "more", "text", "reason", "matched", "tokens"),
    [
        pytest.param("say:yes", {}, "yes", "stop", None, 3, id="end of text"),
        pytest.param("say:no 🙂 no", {"stop": ["🙂"]}, "no ", "stop", "🙂", 7, id="stop emoji"),
        pytest.param("x", {}, "abcdefghijklmnop", "length", None, 16, id="16 tokens by default"),
    ],
)
def test_finish_reasons_and_token_counts_are_true(
    inside: Inside,
    prompt: str,
    more: dict[str, Any],
    text: str,
    reason: str,
    matched: str | None,
    tokens: int,
) -> None:
    """A stop token is no part of the text, so it does not count; the tokens of a stop string do."""
    answer = inside.post("completions", prompt=prompt, **more).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, matched)
    assert answer["usage"]["completion_tokens"] == tokens


def test_offsets_point_at_what_they_are_of(inside: Inside) -> None:
    body = {"prompt": "é<say:a ST€🙂 STOP", "stop": "STOP", "max_tokens": 60, "echo": True, "logprobs": 0}
    (choice,) = inside.post("completions", **body).json()["choices"]
    text, table = choice["text"], choice["logprobs"]
    shown = [
        (token, offset)
        for token, offset in zip(table["tokens"], table["text_offset"], strict=True)
        if not token.startswith("bytes:")
    ]
    assert text == "é<say:a ST€🙂 STOPa ST€🙂 "
    for token, offset in shown:
        assert (text + "STOP")[offset] == token, (token, offset)
    assert table["text_offset"] == sorted(table["text_offset"])
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None


def test_without_max_tokens_the_server_limit_holds(inside: Inside) -> None:
    chat = inside.post("chat/completions", messages=[{"role": "user", "content": "x"}]).json()
    assert (chat["usage"]["completion_tokens"], chat["choices"][0]["finish_reason"]) == (200, "length")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 201}
    assert inside.post("chat/completions", **body).json()["error"]["param"] == "max_tokens"
    with served(max_request_tokens=5) as small:
        assert small.post("completions", prompt="x").json()["usage"]["completion_tokens"] == 5


def test_a_chat_may_go_to_the_end_of_the_context() -> None:
    with served() as inside:
        usage = inside.post("chat/completions", messages=[{"role": "user", "content": "x"}]).json()["usage"]
        assert usage["total_tokens"] == 4096
        full = inside.post("chat/completions", messages=[{"role": "user", "content": "x" * 4090}]).json()
        assert full["usage"]["completion_tokens"] == 0 and full["choices"][0]["finish_reason"] == "length"
        error = inside.post("chat/completions", messages=[{"role": "user", "content": "x" * 4091}]).json()[
            "error"
        ]
        assert error["code"] == "context_length_exceeded"


def test_tokens_there_and_back(inside: Inside) -> None:
    reply = inside.client.post("/tokenize", json={"prompt": EMOJI}).json()
    assert reply["tokens"] == list(EMOJI.encode()) and reply["count"] == len(EMOJI.encode())
    assert inside.client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": EMOJI}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert inside.client.post("/tokenize", json=chat).json()["tokens"] == list(b"[user]x")
    for wrong in ({}, {"prompt": "x", **chat}):
        assert inside.client.post("/tokenize", json=wrong).status_code == 400
    assert inside.client.post("/detokenize", json={"tokens": [257]}).json()["error"]["param"] == "tokens"
