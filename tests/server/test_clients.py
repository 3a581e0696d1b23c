"""Clients that send too much or too slowly, leave, or read nothing; limits; faults: other requests go on."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.inside import Inside, served, wait_until
from tests.server.scripted import HANG
from tests.server.test_abuse import JSON, refusal

LONG = {"prompt": "x", "max_tokens": 4000}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_body_mb=1.0, max_request_tokens=4000) as inside:
        yield inside


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


# sizes and times


def test_large_bodies_are_refused(inside: Inside) -> None:
    large = json.dumps({"prompt": "x" * 10_000_000})
    assert refusal(inside.client.post("/v1/completions", content=large), 413)["code"] == "body_too_large"
    chunks = (b"x" * 65536 for _ in range(640))  # without a length
    assert refusal(inside.client.post("/v1/completions", content=chunks), 413)["code"] == "body_too_large"
    refused = 'speculon_http_requests_total{route="/v1/completions",status="413"}'
    inside.eventually(lambda: inside.metric(refused) == 2)  # counted when the connection is let go
    assert inside.post("completions", prompt="x").status_code == 200


def test_a_lie_about_the_length_is_no_way_in(inside: Inside) -> None:
    with connect(inside) as sock:
        sock.sendall(head("/v1/completions", "content-length: 99999999999999999999999"))
        assert b" 413 " in (reply := all_from(sock)) or b" 400 " in reply
    for line in (
        "content-length: -5",
        "content-length: 1\r\ncontent-length: 2",
        "transfer-encoding: nonsense",
    ):
        with connect(inside) as sock:
            sock.sendall(head("/v1/completions", line))
            sock.shutdown(socket.SHUT_WR)
            assert b" 400 " in all_from(sock)
    assert inside.client.get("/health").status_code == 200


def test_no_http_at_all(inside: Inside) -> None:
    for nonsense in (
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"x" * 100_000,
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with connect(inside) as sock:
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            try:
                all_from(sock)
            except ConnectionError:
                pass
    assert inside.client.get("/health").status_code == 200


def test_slow_clients_hurt_nobody() -> None:
    """A body byte by byte ends at `body_timeout`; endless heads and idle connections do no harm."""
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
            reply = all_from(slow)
            assert b" 408 " in reply and b"body_timeout" in reply and time.monotonic() - began < 5
        assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="408"}') == 1
        for sock in idle:
            sock.close()


def test_a_client_that_leaves_in_its_own_body_is_gone(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "speculon.server"):
        with connect(inside) as sock:
            sock.sendall(
                head("/v1/completions", "content-type: application/json", "content-length: 1000") + b"{"
            )
            time.sleep(0.1)
        wait_until(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and " 499 " in caplog.messages[0]


# clients that go, or do not read


def test_the_log_counts_what_was_written_for_a_client_that_left(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({**LONG, "stream": True}).encode()
    with caplog.at_level(logging.INFO, "speculon.server"), served(script={"step_seconds": 0.01}) as inside:
        with connect(inside) as sock:
            sock.sendall(
                head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}")
                + body
            )
            received = b""
            while received.count(b"data: {") < 3:
                received += sock.recv(1 << 16)
        wait_until(lambda: any(" 499 " in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if " 499 " in line]
    assert " abort | " in line and "  " not in line
    assert int(line.partition(" tok ")[0].rpartition(" ")[2]) > 2, line


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "in the middle"])
def test_when_the_client_goes_the_engine_stops(stream: bool, pause: float) -> None:
    with served(script={"step_seconds": 0.01}) as inside:
        body = json.dumps({**LONG, "stream": stream}).encode()
        sock = connect(inside)
        sock.sendall(
            head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}") + body
        )
        time.sleep(pause)
        if pause:
            wait_until(lambda: inside.engine.running)
        sock.close()
        wait_until(
            lambda: inside.metric('speculon_http_requests_total{route="/v1/completions",status="499"}') == 1
        )
        wait_until(lambda: not inside.engine.has_work and inside.state.pool.open_requests == 0)
        wait_until(
            lambda: (
                inside.metric("speculon_sequences_running") == inside.metric("speculon_requests_open") == 0
            )
        )
        if pause:
            assert inside.engine.aborted and inside.metric('speculon_requests_total{finish="abort"}') == 1


def test_a_request_that_leaks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: an answer that does not end its requests leaves work in the engine, and `served` fails."""
    with pytest.raises(AssertionError, match="still has work|stayed false"):
        with served(script={"step_seconds": 0.01}) as inside:
            monkeypatch.setattr("speculon.server.answer.Answer.close", lambda answer: None)
            monkeypatch.setattr(inside.state.pool.default.engine, "stop", no_stop)
            with inside.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                next(response.iter_lines())
            wait_until(lambda: not inside.engine.has_work, seconds=0.5)


async def no_stop() -> None:
    pass


def test_a_client_that_reads_nothing_delays_no_other() -> None:
    with served() as inside:
        body = json.dumps({"prompt": "x", "n": 4, "max_tokens": 4000, "stream": True, "logprobs": 2}).encode()
        sock = connect(inside)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(
            head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}") + body
        )
        wait_until(lambda: inside.engine.running)
        for _ in range(3):
            assert inside.client.get("/health").status_code == 200
        wait_until(lambda: not inside.engine.has_work)
        assert inside.post("completions", prompt="x").status_code == 200
        assert inside.state.pool.default.engine.open_sequences == 0, (
            "ended sequences hold no place, read or not"
        )
        sock.close()


# limits


def test_requests_end_when_their_time_is_over() -> None:
    with served(request_timeout=0.3, script={"step_seconds": 0.02}) as inside:
        whole = inside.post("completions", **LONG, speculation={"stats": True}).json()
        choice = whole["choices"][0]
        rounds = whole["speculation"]["reasons"]["no_match"]
        assert rounds > 3 and whole["speculation"]["changes"][0]["count"] == rounds, (
            "it comes with its statistics"
        )
        assert choice["finish_reason"] == "abort" and choice["text"].startswith("abc")
        assert whole["usage"]["completion_tokens"] == len(choice["text"])
        streamed = inside.post("completions", **LONG, stream=True).text
        assert '"finish_reason":"abort"' in streamed and streamed.endswith("data: [DONE]\n\n")
        wait_until(lambda: not inside.engine.has_work)
        assert (
            len(inside.engine.aborted) == 2 and inside.metric('speculon_requests_total{finish="abort"}') == 2
        )


def test_requests_end_in_time_though_the_engine_has_no_time_for_them() -> None:
    with served(request_timeout=0.1) as inside:
        body = {**LONG, "prompt": HANG.decode(), "speculation": {"stats": True}}
        whole = inside.post("completions", **body).json()
        inside.engine.running[0].prompt = [0]  # the step ends
        assert whole["choices"][0]["finish_reason"] == "abort"
        assert whole["speculation"]["reasons"] == {}, "the engine has sent none yet"


def test_changes_of_method_are_counted_by_methods_and_reason() -> None:
    with served() as inside:
        stats = inside.post("completions", prompt="x", max_tokens=12, speculation={"stats": True}).json()[
            "speculation"
        ]
        (change,) = stats["changes"]
        assert change == {
            "from": "ngram",
            "to": "plain",
            "reason": "no_match",
            "count": stats["reasons"]["no_match"],
        }
        label = 'speculon_changes_total{from="ngram",model="scripted",reason="no_match",to="plain"}'
        inside.eventually(lambda: inside.metric(label) == change["count"])
        assert inside.metric("speculon_changes_total{") == change["count"], "there was no other change"


def test_a_full_queue_says_when_to_come_again() -> None:
    with served(max_queue=1, max_num_seqs=1, script={"step_seconds": 0.02}) as inside:
        open_streams = [
            inside.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) for _ in range(2)
        ]
        responses = [stream.__enter__() for stream in open_streams]
        refused = inside.post("completions", prompt="x")
        assert refusal(refused, 429)["code"] == "queue_full" and int(refused.headers["retry-after"]) > 0
        assert refusal(inside.post("completions", prompt="x", n=3), 400)["param"] == "n"
        for stream in open_streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: inside.post("completions", prompt="x").status_code == 200)
        assert (
            len(responses) == 2
            and inside.metric('speculon_http_requests_total{route="/v1/completions",status="429"}') >= 1
        )


# faults inside


def test_a_fault_of_the_engine_is_an_answer() -> None:
    fault = MemoryError("planted")
    # a step that takes a while: the stream begins before the fault
    faults = [fault, fault, None, fault, fault, None, fault]
    with served(script={"faults": faults, "step_seconds": 0.05}) as inside:
        error = refusal(inside.post("completions", prompt="x"), 500)
        assert error["code"] == "engine_error" and "MemoryError" in error["message"]
        lines = inside.post("completions", **LONG, stream=True).text.split("\n\n")
        assert (
            json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_error"
            and lines[-2] == "data: [DONE]"
        )
        assert inside.post("completions", prompt="say:yes").json()["choices"][0]["text"] == "yes"
        assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="500"}') == 2


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_fault_of_the_server_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    with served() as inside:
        monkeypatch.setattr("speculon.server.choice.Choice.push", fail)
        response = inside.post("completions", prompt="x", stream=stream)
        if stream:
            assert '"type":"server_error"' in response.text and "planted" not in response.text
        else:
            assert "planted" not in refusal(response, 500)["message"]
        assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="500"}') == 1
    assert "planted" in caplog.text


def test_logs_in_json_are_json(caplog: pytest.LogCaptureFixture) -> None:
    with served(log_format="json") as inside, caplog.at_level(logging.INFO, "speculon.server"):
        inside.post("completions", prompt="say:yes")
        inside.client.post("/v1/completions", content=b'{"a\\nb\\ud800": 1}', headers=JSON)
        wait_until(lambda: len(caplog.messages) == 2)
        served_one, refused = [json.loads(message) for message in caplog.messages]
    assert served_one["status"] == 200 and served_one["tokens"] == 3 and served_one["finish"] == "stop"
    assert refused["status"] == 400 and refused["finish"] == "refused" and refused["reason"]
