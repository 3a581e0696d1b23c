"""Connections that say nothing, or too little, are closed in time, and nobody can open all of them."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import pytest

from speculon.cli import connections
from speculon.cli.connections import ConnectionLimits, LimitedProtocol
from speculon.cli.serve import http_options
from speculon.core.config.serve import ServeConfig
from tests.server.inside import Inside, served, wait_until
from tests.server.outside import LOCAL_HTTP, started

LIMIT = 0.3  # seconds
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(header_timeout=LIMIT, keep_alive=LIMIT, script={"step_seconds": 0.04}) as inside:
        yield inside


class Client:
    """A raw connection."""

    opened: list[socket.socket] = []

    def __init__(self, url: str, address: str = "127.0.0.1"):
        parsed = httpx.URL(url)
        self.socket = socket.create_connection(
            (parsed.host, parsed.port), timeout=10, source_address=(address, 0)
        )
        self.opened.append(self.socket)

    def send(self, *parts: bytes, pause: float = 0.0) -> Client:
        for part in parts:
            self.socket.sendall(part)
            time.sleep(pause)
        return self

    def receive(self) -> bytes:
        try:
            return self.socket.recv(65536)
        except ConnectionResetError:
            return b""

    def receive_all(self, until: bytes) -> bytes:
        received = b""
        while until not in received and (part := self.receive()):
            received += part
        return received

    def closed(self) -> bool:
        self.socket.setblocking(False)
        try:
            return not self.receive()
        except BlockingIOError:
            return False


@pytest.fixture(autouse=True)
def none_left_open() -> Iterator[None]:
    yield
    while Client.opened:
        Client.opened.pop().close()


def request(prompt: str, max_tokens: int, **more: Any) -> tuple[bytes, bytes]:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, **more}).encode()
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return start + b"content-length: %d\r\n\r\n" % len(body), body


def silent_ones(url: str) -> list[Client]:
    """No byte; half a header; half a second header; nothing after an answer."""
    after_one = [Client(url).send(HEALTH) for _ in range(2)]
    assert all(b"200 OK" in client.receive() for client in after_one)
    return [Client(url), Client(url).send(HEALTH[:9]), after_one[0].send(HEALTH[:9]), after_one[1]]


def check_closed(clients: list[Client], seconds: float) -> None:
    wait_until(lambda: all(client.closed() for client in clients), seconds)


def test_silent_connections_are_closed(inside: Inside) -> None:
    began = time.monotonic()
    clients = silent_ones(inside.url)
    check_closed(clients, 5)
    assert time.monotonic() - began > LIMIT * 0.9


def test_a_header_byte_by_byte_is_closed(inside: Inside) -> None:
    client = Client(inside.url)
    with pytest.raises(OSError):
        client.send(*(bytes([byte]) for byte in b"GET /health HTTP/1.1\r\n" * 3), pause=LIMIT / 6)


def test_without_the_timer_they_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "_await_header", lambda protocol: None)
    with served(header_timeout=LIMIT, keep_alive=LIMIT) as inside:
        with pytest.raises(AssertionError, match="stayed false"):
            check_closed([Client(inside.url)], LIMIT * 3)


def test_an_idle_connection_outlives_the_pools_of_clients() -> None:
    assert ConnectionLimits(ServeConfig()).keep_alive >= 75
    assert http_options("::1", 1, ServeConfig())["keep_alive_timeout_s"] >= 75
    assert http_options("::1", 1, ServeConfig(keep_alive=0.2))["keep_alive_timeout_s"] == 1, "whole seconds"


def test_slow_requests_are_not_cut(inside: Inside) -> None:
    """A stream, a slow body and two requests at once: each takes longer than the limits."""
    stream = Client(inside.url).send(*request("x", 40, stream=True))
    header, body = request("say:slow", 9)
    slow = Client(inside.url).send(header)
    piped = Client(inside.url).send(b"".join(request("x", 30)) + b"".join(request("say:second", 20)))
    slow.send(*(body[i : i + 6] for i in range(0, len(body), 6)), pause=LIMIT / 3)
    assert b'"text":"slow"' in slow.receive_all(b'"text":"slow"')
    assert b'"text":"second"' in piped.receive_all(b'"text":"second"')
    assert b"[DONE]" in stream.receive_all(b"[DONE]")


# a client that has sent all that it will send


def half_closed(url: str, *parts: bytes) -> Client:
    client = Client(url).send(*parts)
    client.socket.shutdown(socket.SHUT_WR)
    return client


def answers_of(client: Client, number: int = 1) -> list[tuple[int, bytes]]:
    """(status, body) of its answers, without interim ones; then the connection is closed."""
    found = []
    with client.socket.makefile("rb") as file:
        for _ in range(number):
            response = http.client.HTTPResponse(cast(Any, Reads(file)))
            response.begin()
            found.append((response.status, response.read()))
        assert file.read() == b"", "the connection is closed after the last answer"
    return found


class Reads:
    """A socket that is only read, by way of a file that stays open."""

    def __init__(self, file: Any):
        self.readline, self.read, self.readinto = file.readline, file.read, file.readinto
        self.read1, self.peek, self.flush, self.closed = file.read1, file.peek, file.flush, False

    def makefile(self, mode: str) -> Reads:
        return self

    def close(self) -> None:
        pass


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_PROBE", 0.05)


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tokens", [1, 60])
def test_a_client_that_closes_its_sending_half_gets_its_answer(
    inside: Inside, stream: bool, tokens: int
) -> None:
    aborted = len(inside.engine.aborted)
    ((status, body),) = answers_of(half_closed(inside.url, *request("x", tokens, stream=stream)))
    assert status == 200 and (b"[DONE]" in body if stream else b'"completion_tokens":%d,' % tokens in body)
    assert len(inside.engine.aborted) == aborted
    ((status, _),) = answers_of(half_closed(inside.url, HEALTH))
    assert status == 200


def test_an_answer_of_a_second_comes_alone(inside: Inside) -> None:
    """Clients that know no interim responses take them for the answer."""
    began = time.monotonic()
    reply = half_closed(inside.url, *request("x", 36)).receive_all(b"never")
    assert reply.startswith(b"HTTP/1.1 200 ") and time.monotonic() - began > 0.7


@pytest.mark.usefixtures("probes")
def test_so_does_one_with_two_requests(inside: Inside) -> None:
    """The second waits in the connection while the first is streamed: no interim response comes between."""
    parts = (*request("x", 60, stream=True), *request("say:second", 20))
    (first, second) = answers_of(half_closed(inside.url, b"".join(parts)), 2)
    assert b"[DONE]" in first[1] and b"100 Continue" not in first[1] and b'"text":"second"' in second[1]


@pytest.mark.usefixtures("probes")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_has_closed_the_connection_is_noticed(inside: Inside, stream: bool) -> None:
    aborted = len(inside.engine.aborted)
    client = Client(inside.url).send(*request("x", 3000, stream=stream))
    wait_until(lambda: inside.engine.running)
    client.socket.close()
    wait_until(lambda: len(inside.engine.aborted) > aborted, 5)


@pytest.mark.usefixtures("probes")
def test_half_a_request_has_no_answer(inside: Inside) -> None:
    header, body = request("x", 3)
    for parts in ((header[:30],), (header,), (header, body[:9])):
        assert half_closed(inside.url, *parts).receive_all(b"never") == b""


@pytest.mark.usefixtures("probes")
def test_in_http_1_0_only_short_answers_come(inside: Inside) -> None:
    """It has no interim responses, so a client that is gone is not told from one that reads."""
    short, long = ([part.replace(b"HTTP/1.1", b"HTTP/1.0") for part in request("x", n)] for n in (1, 3000))
    ((status, _),) = answers_of(half_closed(inside.url, HEALTH.replace(b"1.1", b"1.0")))
    assert status == 200 and short
    assert half_closed(inside.url, *long).receive_all(b"never") == b""


def test_without_the_rule_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(LimitedProtocol, "eof_received", lambda protocol: False)
    with served(script={"step_seconds": 0.04}) as inside:
        with pytest.raises(http.client.RemoteDisconnected):
            answers_of(half_closed(inside.url, *request("x", 60)))


def test_an_address_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    with served(max_connections_per_address=3) as inside:
        for _ in range(2):  # what was closed makes room
            clients = [Client(inside.url, "127.0.0.2") for _ in range(3)]
            for _ in range(5):
                assert Client(inside.url, "127.0.0.2").receive() == b""
            assert inside.client.get("/health").status_code == 200  # from another address
            assert all(b"200 OK" in client.send(HEALTH).receive() for client in clients)
            for client in clients:
                client.socket.close()
            wait_until(lambda: b"200 OK" in answer_to_one(inside.url))
    (line,) = [line for line in caplog.messages if "connections" in line]
    assert line.startswith("127.0.0.2 has 3 open connections, the limit of serve.max_connections_per_address")


def answer_to_one(url: str) -> bytes:
    client = Client(url, "127.0.0.2")
    try:
        return client.send(HEALTH).receive()
    except OSError:
        return b""
    finally:
        client.socket.close()


def test_descriptors_are_kept_free(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connections, "descriptor_limit", lambda: 10)
    limits = ConnectionLimits(ServeConfig(max_connections_per_address=4))
    assert [limits.enter("a") for _ in range(5)] == [True] * 4 + [False]
    assert [limits.enter("b") for _ in range(9)] == [True] + [False] * 8
    limits.leave("a")
    assert limits.enter("b") and not limits.enter("c")
    assert ConnectionLimits(ServeConfig()).most_per_address == 2
    lines = [line for line in caplog.messages if "descriptors" in line]
    assert lines == [
        "10 file descriptors (ulimit -n) allow 5 connections, and all are in use, so new ones are closed"
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of descriptors")
def test_the_limit_of_descriptors_is_raised() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        connections.raise_descriptor_limit()
        assert connections.descriptor_limit() >= min(before[0], connections.MOST_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_refused_accept_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    limits, loop = ConnectionLimits(ServeConfig()), asyncio.new_event_loop()
    loop.set_exception_handler(limits.on_loop_error)
    for _ in range(3):
        loop.call_exception_handler({"message": "accept", "exception": OSError(errno.EMFILE, "too many")})
    assert len(caplog.messages) == 1 and "file descriptors (ulimit -n)" in caplog.messages[0]
    loop.call_exception_handler({"message": "another fault", "exception": OSError(errno.EIO, "")})
    assert caplog.messages[1:] == ["another fault"]
    loop.close()


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of descriptors")
def test_200_silent_connections_leave_the_server_usable(tmp_path: Path) -> None:
    options = ("--header-timeout", "2", "--host", "0.0.0.0", "--log-format", "json")
    with started(tmp_path, *options, SCRIPTED_DESCRIPTORS="128") as server:
        url = server.ready().replace("0.0.0.0", "127.0.0.1")
        clients = [Client(url, "127.0.0.2") for _ in range(200)]
        wait_until(lambda: sum(client.closed() for client in clients) >= 168)
        assert httpx.get(url + "/health", **LOCAL_HTTP).status_code == 200
        check_closed(clients, 10)
        assert b"200 OK" in answer_to_one(url)
        assert server.end() == 0
        assert len([line for line in server.stderr.splitlines() if "connections" in line]) == 1, server.stderr
        warning = json.loads(server.stderr.splitlines()[0])
        assert warning["level"] == "WARNING" and "no API key is set" in warning["message"]
