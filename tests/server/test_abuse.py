"""Whatever comes in at the door: an answer in OpenAI's shape, one line in the log, one count, and the others go on."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from speculon.config import EngineConfig
from speculon.errors import ConfigError
from tests.server.inside import Inside, served, wait_until

JSON = {"content-type": "application/json"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "say:yes"}]}
LONG = {"prompt": "x", "max_tokens": 4000}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_body_mb=1.0, max_request_tokens=4000) as inside:
        yield inside


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refused request, which has OpenAI's shape."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    (name,) = response.json()
    error: dict[str, Any] = response.json()[name]
    assert name == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["type"], str)
    return error


def connect(inside: Inside) -> socket.socket:
    url = httpx.URL(inside.url)
    return socket.create_connection((url.host, url.port), timeout=10)


def head(route: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {route} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def all_from(sock: socket.socket) -> bytes:
    """What comes until the server closes."""
    got = b""
    while part := sock.recv(65536):
        got += part
    return got


# bodies

BAD: dict[str, tuple[str | bytes, str | None]] = {
    "half a body": ('{"prompt": "x', None),
    "nothing": ("", None),
    "no object": ("[1, 2]", None),
    "null": ("null", None),
    "a number": ("17", None),
    "no text at all": (b"\xff\xfe\x00{", None),
    "utf-16": ('{"prompt": "x"}'.encode("utf-16")[:-1], None),
    "nested without end": ("[" * 100_000, None),
    "nested and closed": ('{"prompt":' + "[" * 5000 + "]" * 5000 + "}", None),
    "NaN": ('{"prompt": "x", "temperature": NaN}', "temperature"),
    "infinite": ('{"prompt": "x", "temperature": Infinity}', "temperature"),
    "minus infinity": ('{"prompt": "x", "presence_penalty": -Infinity}', "presence_penalty"),
    "beyond floats": ('{"prompt": "x", "temperature": 1e999}', "temperature"),
    "NaN as a bias": ('{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias.5"),
    "negative": ('{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    "huge": ('{"prompt": "x", "max_tokens": 1' + "0" * 300 + "}", "max_tokens"),
    "huger than numbers are read": ('{"prompt": "x", "seed": 1' + "0" * 6000 + "}", None),
    "a huge seed": ('{"prompt": "x", "seed": ' + str(2**64) + "}", "seed"),
    "a huge top_k": ('{"prompt": "x", "top_k": ' + str(2**70) + "}", "top_k"),
    "n = 0": ('{"prompt": "x", "n": 0}', "n"),
    "n = 65": ('{"prompt": "x", "n": 65}', "n"),
    "text for a number": ('{"prompt": "x", "max_tokens": "5"}', "max_tokens"),
    "truth for a number": ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
    "a number for truth": ('{"prompt": "x", "stream": 1}', "stream"),
    "half a surrogate": ('{"prompt": "\\ud800"}', "prompt"),
    "half a surrogate as a name": ('{"prompt": "x", "\\ud800": 1}', None),
    "10,000 stop strings": (json.dumps({"prompt": "x", "stop": ["s"] * 10_000}), "stop"),
    "an empty stop string": ('{"prompt": "x", "stop": ""}', "stop"),
    "a huge stop string": (json.dumps({"prompt": "x", "stop": "s" * 100_000}), "stop"),
    "5,000 biases": (json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}), "logit_bias"),
    "a bias of no token": ('{"prompt": "x", "logit_bias": {"the": 1}}', "logit_bias"),
    "an empty prompt": ('{"prompt": ""}', "prompt"),
    "no prompts": ('{"prompt": []}', "prompt"),
    "no ids": ('{"prompt": [[]]}', "prompt.0"),
    "65 prompts": (json.dumps({"prompt": ["x"] * 65}), "prompt"),
    "mixed prompts": ('{"prompt": ["x", 1]}', "prompt.1"),
    "an unknown token": ('{"prompt": [999]}', "prompt"),
    "a negative token": ('{"prompt": [-1]}', "prompt.0"),
    "no prompt": ("{}", "prompt"),
    "an unknown field": ('{"prompt": "x", "promt": "y"}', "promt"),
    "a field with a line of its own": ('{"prompt": "x", "a\\nb": 1}', "a\nb"),
    "options of no stream": ('{"prompt": "x", "stream_options": {}}', "stream_options"),
    "more texts than places": ('{"prompt": ["a","b","c","d","e"], "n": 64}', "n"),
    "longer than the context": (json.dumps({"prompt": "x" * 5000}), None),
    "more tokens than allowed": ('{"prompt": "x", "max_tokens": 4001}', "max_tokens"),
    "min above max": ('{"prompt": "x", "max_tokens": 3, "min_tokens": 4}', "min_tokens"),
    "best_of": ('{"prompt": "x", "best_of": 2}', "best_of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bodies_are_refused_by_name(inside: Inside, caplog: pytest.LogCaptureFixture, case: str) -> None:
    body, param = BAD[case]
    counted = inside.metric('speculon_http_requests_total{route="/v1/completions",status="400"}')
    with caplog.at_level(logging.INFO, "speculon.server"):
        response = inside.client.post("/v1/completions", content=body, headers=JSON)
        error = refusal(response, 400)
        wait_until(lambda: caplog.messages)
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param, error
    (said,) = caplog.messages
    assert said.startswith(response.headers["x-request-id"] + " 400 /v1/completions ") and "\n" not in said
    assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="400"}') == counted + 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        pytest.param({"messages": []}, "messages", id="no messages"),
        pytest.param({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", id="unknown role"),
        pytest.param({"messages": [{"role": "user", "content": 5}]}, None, id="a number for a text"),
        pytest.param({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, id="an image"),
        pytest.param({"top_logprobs": 2}, "top_logprobs", id="top_logprobs alone"),
        pytest.param({"logprobs": True, "top_logprobs": 21}, "top_logprobs", id="too many logprobs"),
        pytest.param({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", id="two limits"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="a choice of no tools"),
        pytest.param({"response_format": {"type": "json_schema"}}, "response_format.json_schema", id="no schema"),
        pytest.param({"response_format": {"type": "yaml"}}, "response_format.type", id="unknown format"),
        pytest.param({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", id="a template of its own"),
        pytest.param({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", id="what the template is given anyway"),
        pytest.param({"modalities": ["audio"]}, None, id="audio"),
    ],
)
def test_bad_chats_are_refused_by_name(inside: Inside, more: dict[str, Any], param: str | None) -> None:
    error = refusal(inside.post("chat/completions", **{**CHAT, **more}), 400)
    assert param is None or error["param"] == param, error


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [200, 400, 900])
@pytest.mark.parametrize("place", ["tools", "response_format", "chat_template_kwargs", "metadata", "message", "prediction"])
def test_deep_nesting_is_no_fault(inside: Inside, place: str, depth: int) -> None:
    deep = nested(depth)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    bodies: dict[str, dict[str, Any]] = {
        "tools": {"tools": [tool], "tool_choice": "required"},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        "chat_template_kwargs": {"chat_template_kwargs": {"x": deep}},
        "metadata": {"metadata": deep},
        "message": {"messages": [{"role": "user", "content": "say:yes", "more": deep}]},
        "prediction": {"prediction": {"type": "content", "content": deep}},
    }
    response = inside.post("chat/completions", **{**CHAT, **bodies[place]})
    assert response.status_code == 200 or refusal(response, 400)


def test_prompts_of_any_characters_are_written(inside: Inside) -> None:
    text = "".join(map(chr, [*range(32), 127, 0x85, 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF]))
    assert inside.post("completions", prompt="say:" + text, max_tokens=99).json()["choices"][0]["text"] == text
    messages = [{"role": "user", "content": "say:" + text}]
    assert inside.post("chat/completions", messages=messages).json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None])
def test_other_content_types_are_refused(inside: Inside, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    error = refusal(inside.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers), 400)
    assert "content-type" in error["message"]


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_json(inside: Inside, kind: str) -> None:
    response = inside.client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert response.status_code == 200


# routes, methods, names


@pytest.mark.parametrize("name", ["other", "\udfff", "x" * 5000, "a\nb"])
def test_other_models_are_not_found(inside: Inside, name: str) -> None:
    error = refusal(inside.client.post("/v1/completions", content=json.dumps({"prompt": "x", "model": name}), headers=JSON), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model") and len(error["message"]) < 200


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/nothing", "/v1/completions/", "/%0Aforged", "/../etc/passwd", "/v1/models/other"]
)
def test_unknown_routes_are_not_found(inside: Inside, caplog: pytest.LogCaptureFixture, path: str) -> None:
    counted = inside.metric("speculon_http_requests_total")
    with caplog.at_level(logging.INFO, "speculon.server"):
        refusal(inside.client.get(path), 404)
        wait_until(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0] and " 404 " in caplog.messages[0]
    assert inside.metric("speculon_http_requests_total") == counted + 2  # and the first look itself
    labels = inside.client.get("/metrics").text
    assert "forged" not in labels and "passwd" not in labels, "clients must not invent labels"


METHODS = [
    ("GET", "/v1/completions", "POST"),
    ("PUT", "/v1/chat/completions", "POST"),
    ("POST", "/v1/models", "GET"),
    ("DELETE", "/health", "GET"),
]


@pytest.mark.parametrize(("method", "path", "allowed"), METHODS)
def test_other_methods_are_refused(inside: Inside, method: str, path: str, allowed: str) -> None:
    response = inside.client.request(method, path)
    refusal(response, 405)
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3_x", True), ("x" * 64, True), ("x" * 65, False), ("a b", False), ("é", False)]
)
def test_request_ids_are_echoed(inside: Inside, sent: str, kept: bool) -> None:
    for path in ("/health", "/v1/nothing"):
        answered = inside.client.get(path, headers={"x-request-id": sent.encode()}).headers["x-request-id"]
        assert (answered == sent) == kept and answered


def test_every_answer_has_an_id_of_its_own(inside: Inside) -> None:
    assert len({inside.client.get("/health").headers["x-request-id"] for _ in range(5)}) == 5


def test_no_web_page_may_call_unless_told(inside: Inside) -> None:
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    for response in (inside.client.get("/health", headers=headers), inside.client.options("/v1/completions", headers=headers)):
        assert not [name for name in response.headers if name.startswith("access-control")]
    with served(cors_origins=["https://example.com"], api_key="k") as other:
        assert other.client.options("/v1/completions", headers=headers).status_code == 200
        refused = other.client.get("/v1/models", headers={**headers, "authorization": ""})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://example.com"
        refused = other.client.get("/v1/models", headers={**headers, "origin": "https://example.org"})
        assert "access-control-allow-origin" not in refused.headers


# the key


def test_only_the_key_opens() -> None:
    with served(api_key="secret") as inside:
        for wrong in ("", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "secret", "Bearer Secret", "Bearer \xe9"):
            response = inside.client.get("/v1/models", headers={"authorization": wrong.encode("latin-1")})
            assert refusal(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for right in ("Bearer secret", "bearer secret", "BEARER  secret"):
            assert inside.client.get("/v1/models", headers={"authorization": right}).status_code == 200
        for path in ("/health", "/ready"):
            assert inside.client.get(path, headers={"authorization": ""}).status_code == 200
        for path in ("/metrics", "/v1/nothing", "/openapi.json", "/docs"):
            assert inside.client.get(path, headers={"authorization": ""}).status_code == 401
        assert inside.metric('speculon_http_requests_total{route="/v1/models",status="401"}') == 8


def test_a_key_may_be_any_text() -> None:
    with served(api_key="schlüssel 🔑") as inside:
        for token, status in (("schlüssel 🔑", 200), ("schlüssel", 401)):
            headers = {"authorization": ("Bearer " + token).encode()}
            assert inside.client.get("/v1/models", headers=headers).status_code == status


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: asked.append((a, b)) or a == b)
    with served(api_key="secret") as inside:
        assert inside.client.get("/v1/models").status_code == 200
        assert (b"secret", b"secret") in asked


def test_an_empty_key_is_no_key() -> None:
    """As from a variable that was never set: the server must not stand open for it."""
    with pytest.raises(ConfigError, match="api_key"):
        EngineConfig(serve={"api_key": ""})


def test_the_key_is_never_shown() -> None:
    assert "secret" not in repr(EngineConfig(serve={"api_key": "secret"}))


# sizes and times


def test_large_bodies_are_refused(inside: Inside) -> None:
    large = json.dumps({"prompt": "x" * 10_000_000})
    assert refusal(inside.client.post("/v1/completions", content=large), 413)["code"] == "body_too_large"
    chunks = (b"x" * 65536 for _ in range(160))  # without a length
    try:
        refusal(inside.client.post("/v1/completions", content=chunks), 413)
    except (httpx.WriteError, httpx.ReadError):
        pass  # it was still writing when the connection was cut
    assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="413"}') == 2
    assert inside.post("completions", prompt="x").status_code == 200


def test_a_lie_about_the_length_is_no_way_in(inside: Inside) -> None:
    with connect(inside) as sock:
        sock.sendall(head("/v1/completions", "content-length: 99999999999999999999999"))
        assert b" 413 " in (said := all_from(sock)) or b" 400 " in said
    for line in ("content-length: -5", "content-length: 1\r\ncontent-length: 2", "transfer-encoding: nonsense"):
        with connect(inside) as sock:
            sock.sendall(head("/v1/completions", line))
            sock.shutdown(socket.SHUT_WR)
            assert b" 400 " in all_from(sock)
    assert inside.client.get("/health").status_code == 200


def test_no_http_at_all(inside: Inside) -> None:
    for nonsense in (b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"x" * 100_000, b"GET / HTTP/9.9\r\n\r\n"):
        with connect(inside) as sock:
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            try:
                all_from(sock)
            except ConnectionError:
                pass
    assert inside.client.get("/health").status_code == 200


def test_slow_clients_hurt_nobody() -> None:
    """Bodies byte by byte end at `body_timeout`; heads that never end, and idle connections, are just there."""
    with served(body_timeout=0.6) as inside:
        idle = [connect(inside) for _ in range(50)]
        for sock in idle[25:]:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
        with connect(inside) as slow:
            slow.sendall(head("/v1/completions", "content-type: application/json", "content-length: 1000"))
            began = time.monotonic()
            for _ in range(4):
                slow.sendall(b"{")
                time.sleep(0.1)
                assert inside.post("completions", prompt="x").status_code == 200
            said = all_from(slow)
            assert b" 408 " in said and b"body_timeout" in said and time.monotonic() - began < 5
        assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="408"}') == 1
        for sock in idle:
            sock.close()


def test_a_client_that_leaves_in_its_own_body_is_gone(inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "speculon.server"):
        with connect(inside) as sock:
            sock.sendall(head("/v1/completions", "content-type: application/json", "content-length: 1000") + b"{")
            time.sleep(0.1)
        wait_until(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and " 499 " in caplog.messages[0]


# clients that go, or do not read


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "in the middle"])
def test_when_the_client_goes_the_engine_stops(stream: bool, pause: float) -> None:
    with served(script={"step_seconds": 0.01}) as inside:
        body = json.dumps({**LONG, "stream": stream}).encode()
        sock = connect(inside)
        sock.sendall(head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}") + body)
        time.sleep(pause)
        if pause:
            wait_until(lambda: inside.engine.running)
        sock.close()
        wait_until(lambda: inside.metric('speculon_http_requests_total{route="/v1/completions",status="499"}') == 1)
        wait_until(lambda: not inside.engine.has_work and inside.server.engine.open_requests == 0)
        wait_until(lambda: inside.metric("speculon_texts_running") == inside.metric("speculon_requests_open") == 0)
        if pause:
            assert inside.engine.aborted and inside.metric('speculon_requests_total{finish="abort"}') == 1


def test_a_request_that_leaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a session that does not end its mailbox runs on, and `served` says so."""
    with pytest.raises(AssertionError, match="runs on|not come true"):
        with served(script={"step_seconds": 0.01}) as inside:
            monkeypatch.setattr("speculon.server.app.Session.close", lambda session: None)
            monkeypatch.setattr(inside.server.engine, "stop", no_stop)
            with inside.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                next(response.iter_lines())
            wait_until(lambda: not inside.engine.has_work, seconds=0.5)


async def no_stop() -> None:
    pass


def test_a_client_that_reads_nothing_holds_up_nobody() -> None:
    with served() as inside:
        body = json.dumps({"prompt": "x", "n": 4, "max_tokens": 4000, "stream": True, "logprobs": 2}).encode()
        sock = connect(inside)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}") + body)
        wait_until(lambda: inside.engine.running)
        for _ in range(3):
            assert inside.client.get("/health").status_code == 200
        wait_until(lambda: not inside.engine.has_work)
        assert inside.post("completions", prompt="x").status_code == 200
        assert inside.server.engine.open_texts == 0, "what is written holds no place, read or not"
        sock.close()


# limits


def test_requests_end_when_their_time_is_over() -> None:
    with served(request_timeout=0.3, script={"step_seconds": 0.02}) as inside:
        whole = inside.post("completions", **LONG).json()
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "abort" and choice["text"].startswith("abc")
        assert whole["usage"]["completion_tokens"] == len(choice["text"])
        streamed = inside.post("completions", **LONG, stream=True).text
        assert '"finish_reason":"abort"' in streamed and streamed.endswith("data: [DONE]\n\n")
        wait_until(lambda: not inside.engine.has_work)
        assert len(inside.engine.aborted) == 2 and inside.metric('speculon_requests_total{finish="abort"}') == 2


def test_a_full_queue_says_when_to_come_again() -> None:
    with served(max_queue=1, max_num_seqs=1, script={"step_seconds": 0.02}) as inside:
        open_streams = [inside.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) for _ in range(2)]
        responses = [stream.__enter__() for stream in open_streams]
        refused = inside.post("completions", prompt="x")
        assert refusal(refused, 429)["code"] == "queue_full" and int(refused.headers["retry-after"]) > 0
        assert refusal(inside.post("completions", prompt="x", n=3), 400)["param"] == "n"
        for stream in open_streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: inside.post("completions", prompt="x").status_code == 200)
        assert len(responses) == 2 and inside.metric('speculon_http_requests_total{route="/v1/completions",status="429"}') >= 1


# faults inside


def test_a_fault_of_the_engine_is_an_answer() -> None:
    fault = MemoryError("planted")
    with served(script={"faults": [fault, fault, None, fault, fault, None, fault]}) as inside:
        error = refusal(inside.post("completions", prompt="x"), 500)
        assert error["code"] == "engine_error" and "planted" in error["message"]
        lines = inside.post("completions", **LONG, stream=True).text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_error" and lines[-2] == "data: [DONE]"
        assert inside.post("completions", prompt="say:yes").json()["choices"][0]["text"] == "yes"
        assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="500"}') == 2


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_fault_of_the_server_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    with served() as inside:
        monkeypatch.setattr("speculon.server.answer.Text.push", fail)
        response = inside.post("completions", prompt="x", stream=stream)
        if stream:
            assert '"type":"server_error"' in response.text and "planted" not in response.text
        else:
            assert "planted" not in refusal(response, 500)["message"]
        assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="500"}') == 1
    assert "planted" in caplog.text


def test_when_the_engine_is_gone_the_server_says_so() -> None:
    with served(script={"step_seconds": 0.02}) as inside:
        with inside.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            inside.server.engine._process.kill()
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_error"
        for path in ("/health", "/ready"):
            refused = inside.client.get(path)
            assert refusal(refused, 503)["code"] == "not_ready" and refused.headers["retry-after"]
        assert refusal(inside.post("completions", prompt="x"), 503)
        inside.engine.running.clear()  # the thread has ended in the middle


def test_logs_in_json_are_json(caplog: pytest.LogCaptureFixture) -> None:
    with served(log_format="json") as inside, caplog.at_level(logging.INFO, "speculon.server"):
        inside.post("completions", prompt="say:yes")
        inside.client.post("/v1/completions", content=b'{"a\\nb\\ud800": 1}', headers=JSON)
        wait_until(lambda: len(caplog.messages) == 2)
        served_one, refused = [json.loads(message) for message in caplog.messages]
    assert served_one["status"] == 200 and served_one["tokens"] == 3 and served_one["finish"] == "stop"
    assert refused["status"] == 400 and refused["finish"] == "refused" and refused["reason"]
