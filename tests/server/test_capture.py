"""Captured traffic: what clients sent and received, for the keys that allow it, without failed requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from speculon.cli import connections
from speculon.core.errors import EngineError
from speculon.server import capture
from speculon.server.capture import label_of, message_fields
from speculon.server.line_files import Files
from speculon.server.middleware import tenant_of
from speculon.server.schemas import Message
from tests.server.inside import Inside, served, wait_until
from tests.server.test_abuse import refusal
from tests.server.test_answers import EMOJI, events_of, put_together
from tests.server.test_tool_calls import HERMES, call

pytestmark = pytest.mark.timeout(60)

KEYS = ["key-of-a", "key-of-b"]
ROUTE = "/v1/speculation/capture"
META = {"id", "index", "time", "model", "key", "finish_reason", "temperature", "prompt_tokens", "tokens"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def read(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("*/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def settle(inside: Inside) -> None:
    """Waits until all that was taken is written: the writer does one thing after the other."""
    assert inside.state.capture
    inside.state.capture.writer.submit(lambda: None).result(10)


# what is written

HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Call f.", "name": "\ud800"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "x": 1}],
    },
    {"role": "tool", "tool_call_id": "1", "content": EMOJI, "image": "A" * 100},
    {"role": "assistant", "content": "Done.", "reasoning_content": "It is done."},
    {"role": "user", "content": "say:and again"},
]
KEPT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Call f.", "name": "?"},
    {"role": "assistant", "content": None, "tool_calls": [{**HISTORY[2]["tool_calls"][0]}]},
    {"role": "tool", "tool_call_id": "1", "content": EMOJI},
    {"role": "assistant", "content": "Done.", "reasoning_content": "It is done."},
    {"role": "user", "content": "say:and again"},
]
del KEPT[2]["tool_calls"][0]["x"]

CHATS: dict[str, dict[str, Any]] = {
    "short": {"messages": user("say:yes")},
    "three": {"messages": user("x"), "n": 3, "max_tokens": 9, "temperature": 0.5},
    "history": {"messages": HISTORY},
    "stop string": {"messages": user("say:one STOP two"), "stop": "STOP"},
    "emoji cut": {"messages": user("say:" + EMOJI), "max_tokens": 6},
    "calls": {"messages": user("say:Well: " + call(x="é")), "tools": [TOOL], "max_tokens": 200},
    "forced": {
        "messages": user('say:[{"name": "f", "arguments": {"x": 1}}]'),
        "tools": [TOOL],
        "tool_choice": "required",
    },
    "named": {
        "messages": user('say:{"x": 1}'),
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "JSON": {"messages": user('say:{"x": 1}'), "response_format": {"type": "json_object"}},
    "template": {"messages": user("say:yes"), "chat_template_kwargs": {"enable_thinking": False}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "short": {"prompt": "say:yes", "store": True},
    "many": {"prompt": ["say:one", "two", "say:three"], "n": 2, "max_tokens": 9},
    "ids": {"prompt": [[104, 105], [97]], "max_tokens": 3},
    "list of ids": {"prompt": [104, 105], "max_tokens": 3},
    "echo": {"prompt": EMOJI + "say:" + EMOJI, "max_tokens": 90, "echo": True, "logprobs": 2},
    "held back": {"prompt": "say:one STO two ST", "stop": "STOP", "max_tokens": 30},
}


def ask(inside: Inside, route: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """What the client saw, by choice."""
    content = json.dumps(body | {"stream": stream})
    response = inside.client.post(
        f"/v1/{route}", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = (
        put_together(events_of(response))["choices"] if stream else response.json()["choices"]
    )
    return choices


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Ids of calls are drawn for each answer."""
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [{"type": one["type"], "function": one["function"]} for one in message.get("tool_calls", ())]
    return {**kept, "tool_calls": calls} if calls else kept


def expected(route: str, body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    if route == "chat/completions":
        messages = KEPT if body["messages"] is HISTORY else body["messages"]
        more = {key: body[key] for key in ("tools", "chat_template_kwargs") if key in body}
        return {**more, "messages": [*messages, without_ids(choice["message"])]}
    n, prompts = body.get("n", 1), body["prompt"]
    prompts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
    prompt = prompts[choice["index"] // n]
    prompt = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    return {"prompt": prompt, "completion": choice["text"][len(prompt) if body.get("echo") else 0 :]}


BODIES = {"chat/completions": CHATS, "completions": COMPLETIONS}
TELLING = {
    "chat/completions": {name: CHATS[name] for name in ("history", "calls")},
    "completions": {"many": COMPLETIONS["many"]},
}


def check_kept(folder: Path, requests: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Whole and streamed: what is kept is what the client saw."""
    lines = []
    with served(HERMES, capture=str(folder)) as inside:
        for route, bodies in requests.items():
            for body in bodies.values():
                for stream in (False, True):
                    for choice in ask(inside, route, {"max_tokens": 60, **body}, stream):
                        meta = {key: choice[key] for key in ("index", "finish_reason")}
                        temperature = body.get("temperature", 1.0)
                        lines.append(expected(route, body, choice) | meta | {"temperature": temperature})
        settle(inside)
        size = sum(path.stat().st_size for path in folder.glob("*/*.jsonl"))
        wait_until(lambda: inside.metric("speculon_captured_choices_total") == len(lines), 2)
        assert (
            inside.metric("speculon_captured_bytes_total")
            == size
            < inside.metric("speculon_capture_disk_bytes")
        )
        assert (
            inside.metric("speculon_capturing") == 1
            and inside.metric("speculon_capture_lost_choices_total") == 0
        )
    found = []
    for line in read(folder):
        assert META < line.keys() and line["model"] == "scripted" and line["key"] == label_of(tenant_of(b""))
        assert line["tokens"] > 0 and line["prompt_tokens"] > 0 and line["time"] > 1.7e9
        if "messages" in line:
            line["messages"][-1] = without_ids(line["messages"][-1])
        found.append(
            {key: line[key] for key in line if key not in META}
            | {key: line[key] for key in ("index", "finish_reason")}
        )
        found[-1]["temperature"] = line["temperature"]
    assert found == lines


def test_lines_are_what_clients_sent_and_received(tmp_path: Path) -> None:
    check_kept(tmp_path, BODIES)


def test_the_parts_of_an_answer_are_kept_as_text_and_thinking() -> None:
    parts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "refusal", "refusal": "No."}]
    message = Message.model_validate({"role": "assistant", "content": parts})
    assert message_fields(message) == {"role": "assistant", "content": "No.", "reasoning_content": "hm"}
    refused = Message.model_validate({"role": "assistant", "content": None, "refusal": "No."})
    assert message_fields(refused) == {"role": "assistant", "content": "No."}


LINES_OF = capture.lines_of
MERGE_DELTAS = capture.merge_deltas


@pytest.mark.parametrize(
    "module, name, wrong",
    [
        pytest.param(
            capture, "lines_of", lambda answer, key: list(LINES_OF(answer, key))[:1], id="a choice is lost"
        ),
        pytest.param(
            capture, "lines_of", lambda answer, key: [*LINES_OF(answer, key)][::-1], id="choices are mixed up"
        ),
        pytest.param(
            capture,
            "merge_deltas",
            lambda deltas: MERGE_DELTAS(deltas[:-1]),
            id="the end of a text is lost",
        ),
        pytest.param(
            capture,
            "merge_deltas",
            lambda deltas: {"role": "assistant", "content": MERGE_DELTAS(deltas)["content"] or ""},
            id="no calls",
        ),
        pytest.param(
            capture,
            "read_messages",
            lambda messages: ([{**one, "content": str(one["content"])} for one in messages], []),
            id="parts are not read",
        ),
        pytest.param(Files, "append", lambda files, label, line: True, id="nothing is written"),
    ],
)
def test_what_is_kept_wrongly_is_found_out(
    module: Any, name: str, wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check_kept(tmp_path, TELLING)


# what is not


def check_unfinished(folder: Path) -> None:
    """Aborted and failed requests leave nothing; others at the same time do."""
    with served(capture=str(folder), request_timeout=0.5, script={"step_seconds": 0.01}) as inside:
        late = inside.post("completions", prompt=["say:short", "x"], max_tokens=2000).json()
        assert [choice["finish_reason"] for choice in late["choices"]] == ["stop", "abort"], (
            "one of its choices was complete"
        )
        streamed = events_of(
            inside.post("completions", prompt=["say:short", "x"], max_tokens=2000, stream=True)
        )
        assert [choice["finish_reason"] for choice in put_together(streamed)["choices"]] == ["stop", "abort"]
        body = {"prompt": ["say:short", "x"], "max_tokens": 60, "stream": True}
        with inside.client.stream("POST", "/v1/completions", json=body) as gone:
            assert any('finish_reason":"stop' in line for line in gone.iter_lines())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "FIRST_PROBE", 0.02)  # missed before the answer is complete
            with pytest.raises(httpx.TimeoutException):
                inside.client.post("/v1/completions", json={**body, "stream": False}, timeout=0.1)
            inside.eventually(lambda: not inside.engine.has_work)
        refusal(inside.post("completions", prompt="x" * 5000), 400)
        assert inside.post("completions", prompt="x", max_tokens=0).json()["choices"][0]["text"] == "", (
            "without tokens there is no line"
        )
        assert inside.post("completions", prompt="say:kept").status_code == 200
        with inside.client.stream("POST", "/v1/completions", json=body | {"max_tokens": 2000}) as lost:
            rest = lost.iter_lines()
            assert any('finish_reason":"stop' in line for line in rest)
            inside.state.pool.default.engine.fail(EngineError("planted"))
            assert any("planted" in line for line in rest)
        settle(inside)
    assert [line["prompt"] for line in read(folder)] == ["say:kept"]


def test_aborted_and_failed_requests_leave_nothing(tmp_path: Path) -> None:
    check_unfinished(tmp_path)


@pytest.mark.parametrize(
    "module, name, wrong",
    [
        pytest.param(capture, "is_complete", lambda answer: True, id="aborted choices"),
        pytest.param(
            capture,
            "is_complete",
            lambda answer: any(choice.finish_reason == "stop" for choice in answer.choices),
            id="half a request",
        ),
    ],
)
def test_an_aborted_request_that_is_kept_is_found_out(
    module: Any, name: str, wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        check_unfinished(tmp_path)


def check_opt_out(folder: Path) -> None:
    with served(capture=str(folder)) as inside:
        for fields in ({"store": False}, {"speculation": {"pool": ""}}, {"store": False, "stream": True}):
            assert inside.post("completions", prompt="say:mine", **fields).status_code == 200
            assert inside.post("chat/completions", messages=user("say:mine"), **fields).status_code == 200
        for fields in ({"store": True}, {"store": None}, {"speculation": {"pool": "x"}}):
            assert inside.post("completions", prompt="say:yours", **fields).status_code == 200
    assert [line.get("prompt") for line in read(folder)] == ["say:yours"] * 3


def test_clients_can_refuse_the_capture(tmp_path: Path) -> None:
    check_opt_out(tmp_path)


def test_a_refusal_that_is_ignored_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "may_be_captured", lambda body, model: True)
    with pytest.raises(AssertionError):
        check_opt_out(tmp_path)


def test_nothing_is_captured_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with served() as inside:
        assert inside.post("completions", prompt="say:yes").status_code == 200
        assert "captur" not in inside.client.get("/metrics").text
        assert refusal(inside.client.delete(ROUTE), 404)
    assert not any(tmp_path.iterdir())


# whose it is


def write(inside: Inside, key: str, text: str = "say:yes") -> None:
    assert inside.client.post("/v1/completions", json={"prompt": text}, headers=by(key)).status_code == 200


def whose(folder: Path) -> Counter[str]:
    """Texts by folder; the label in a line is its folder's name."""
    assert all(
        json.loads(path.read_text().splitlines()[0])["key"] == path.parent.name
        for path in folder.glob("*/*.jsonl")
    )
    return Counter(line["key"] for line in read(folder))


def test_each_key_has_a_folder_and_no_key_is_written(tmp_path: Path) -> None:
    labels = [label_of(tenant_of(key.encode())) for key in KEYS]
    with served(api_key=KEYS, capture=str(tmp_path)) as inside:
        for key in (*KEYS, KEYS[0]):
            write(inside, key)
        assert inside.client.post("/v1/completions", json={"prompt": "x"}, headers=by("c")).status_code == 401
    assert whose(tmp_path) == {labels[0]: 2, labels[1]: 1}
    assert "key-of" not in "".join(path.read_text() for path in tmp_path.glob("*/*.jsonl")) + str(
        [*tmp_path.rglob("*")]
    )


@pytest.mark.parametrize("asks", [True, False], ids=["the server asks for keys", "it does not"])
def test_chosen_keys_alone_are_captured(asks: bool, tmp_path: Path) -> None:
    with served(capture=str(tmp_path), capture_key=KEYS[1], **({"api_key": KEYS} if asks else {})) as inside:
        for key in KEYS:
            write(inside, key)
        settle(inside)
        assert whose(tmp_path) == {label_of(tenant_of(KEYS[1].encode())): 1}


def test_a_key_deletes_what_is_its_own(tmp_path: Path) -> None:
    with served(api_key=KEYS, capture=str(tmp_path)) as inside:
        for key in KEYS:
            write(inside, key)
        assert (
            refusal(inside.client.delete(ROUTE + "?user=alice", headers=by(KEYS[0])), 400)["param"] == "query"
        )
        assert inside.client.delete(ROUTE, headers=by("key-of-c")).status_code == 401
        settle(inside)
        assert sum(whose(tmp_path).values()) == 2
        statuses = [inside.client.delete(ROUTE, headers=by(KEYS[0])).status_code for _ in range(2)]
        assert statuses == [204, 404] and whose(tmp_path) == {label_of(tenant_of(KEYS[1].encode())): 1}
        write(inside, KEYS[0])
    with served(api_key=KEYS, capture=str(tmp_path)) as inside:
        assert inside.client.delete(ROUTE, headers=by(KEYS[0])).status_code == 204, (
            "of an earlier process, too"
        )
    assert whose(tmp_path) == {label_of(tenant_of(KEYS[1].encode())): 1}
