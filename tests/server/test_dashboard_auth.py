"""Who may use the dashboard: keys, sessions, sockets, other sites, and the limits of connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2 as httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter
from speculon.operations.admin.auth import (
    FAILURE_SECONDS,
    FAILURES,
    MOST_SESSIONS,
    SESSION_SECONDS,
    AdminGate,
    Failures,
    Sessions,
)
from tests.server.outside import LOCAL_HTTP, Outside, started

REFUSED = (InvalidMessage, ConnectionClosed, EOFError, OSError)  # as the cut of a connection shows
KEY = "planted-admin-key"
SOCKET = "/admin/_nicegui_ws/socket.io/?EIO=4&transport=websocket"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    options = ("--admin", "--max-connections-per-address", "6", "--header-timeout", "1")
    keys = {"SPECULON_SERVE__ADMIN_KEY": KEY, "SPECULON_SERVE__API_KEY": "of-clients"}
    with started(tmp_path_factory.mktemp("locked"), *options, **keys) as server:
        server.url()
        yield server
        assert server.end() == 0, server.stderr


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with started(tmp_path_factory.mktemp("open"), "--admin") as server:
        server.url()
        yield server


def call(server: Outside, method: str, path: str, **options: Any) -> httpx.Response:
    return httpx.request(method, server.url() + path, **LOCAL_HTTP, follow_redirects=False, **options)


def cookie_of(response: httpx.Response) -> str:
    return response.headers["set-cookie"].partition(";")[0]


def session(server: Outside) -> str:
    response = call(server, "POST", "/admin/login", data={"key": KEY})
    assert response.status_code == 303, response.text
    return cookie_of(response)


def socket(
    server: Outside, origin: str | None, cookie: str | None, key: str | None = None
) -> ClientConnection:
    url = server.url()
    headers = {"Cookie": cookie} if cookie else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    origin = url if origin == "own" else origin
    return connect("ws" + url[4:] + SOCKET, origin=origin, additional_headers=headers, proxy=None)


def test_pages_need_a_session_and_keys_of_clients_open_none(locked: Outside) -> None:
    assert call(locked, "GET", "/admin/").headers["location"] == "/admin/login"
    assert call(locked, "GET", "/admin/api/overview").status_code == 401
    client = {"authorization": "Bearer of-clients"}
    assert call(locked, "GET", "/admin/", headers=client).headers["location"] == "/admin/login"
    assert call(locked, "GET", "/admin/", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert call(locked, "GET", "/admin/", headers={"cookie": session(locked)}).status_code == 200
    assert call(locked, "GET", "/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 401
    assert call(locked, "GET", "/admins").status_code == 401


def test_the_session_cookie_is_kept_from_scripts_and_other_sites(locked: Outside) -> None:
    set_cookie = call(locked, "POST", "/admin/login", data={"key": KEY}).headers["set-cookie"]
    assert {"Path=/admin", "HttpOnly", "SameSite=Strict"} <= set(set_cookie.split("; "))


def test_a_socket_without_session_or_of_another_site_is_refused(locked: Outside) -> None:
    cookie = session(locked)
    forged = cookie.partition("=")[0] + "=forged"
    for origin, shown, key in (
        ("http://evil.example", cookie, None),
        (None, cookie, None),
        ("own", None, None),
        ("own", None, "of-clients"),
        ("own", forged, None),
        ("own", forged, "wrong"),
        ("own", forged, "of-clients"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            socket(locked, origin, shown, key).__enter__()
        assert refused.value.response.status_code == 403, (origin, shown, key)


def test_a_socket_ends_with_its_session_and_leaves_the_limits(locked: Outside) -> None:
    for _ in range(8):  # more than the limit, one after another
        cookie = session(locked)
        with socket(locked, "own", cookie) as opened:
            assert opened.recv(timeout=5)
            call(locked, "POST", "/admin/logout", headers={"cookie": cookie})
            opened.send("40")
            with pytest.raises(ConnectionClosed):
                while True:
                    opened.recv(timeout=5)


def test_sockets_count_among_the_connections_and_stay_open(locked: Outside) -> None:
    cookie = session(locked)
    with ExitStack() as stack:
        opened = [stack.enter_context(ended_by_either(socket(locked, "own", cookie))) for _ in range(6)]
        assert all(one.recv(timeout=5) for one in opened)
        with pytest.raises(REFUSED):
            stack.enter_context(socket(locked, "own", cookie))
        time.sleep(1.5)  # longer than the time for a header
        opened[0].send("40")
        assert opened[0].recv(timeout=5)
    with ended_by_either(socket(locked, "own", cookie), patience=5) as again:
        assert again.recv(timeout=5)


@contextmanager
def ended_by_either(connecting: Any, patience: float = 0) -> Iterator[ClientConnection]:
    """The server may end it first: this client answers no ping of socket.io.

    It notices the end of a connection a moment later than its client; for so long there may be no room.
    """
    until = time.monotonic() + patience
    while True:
        try:
            opened = connecting.__enter__()
            break
        except REFUSED:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
    try:
        yield opened
    finally:
        with suppress(ConnectionClosed):
            connecting.__exit__(None, None, None)


def test_forged_requests_are_refused(open_server: Outside) -> None:
    port = open_server.url().rpartition(":")[2]
    evil = {"host": f"evil.example:{port}"}
    assert call(open_server, "GET", "/admin/", headers=evil).status_code == 403
    origin = {"origin": "http://evil.example"}
    assert call(open_server, "POST", "/admin/api/models", headers=origin).status_code == 403
    cross = {"sec-fetch-site": "cross-site"}
    assert call(open_server, "POST", "/admin/api/models", headers=cross).status_code == 403
    assert call(open_server, "POST", "/admin/api/models").status_code == 404  # passed, and not there


def test_without_a_key_a_page_opens_the_session_that_its_socket_needs(open_server: Outside) -> None:
    with pytest.raises(InvalidStatus):
        socket(open_server, "own", None).__enter__()
    cookie = cookie_of(call(open_server, "GET", "/admin/"))
    with socket(open_server, "own", cookie) as opened:
        assert opened.recv(timeout=5)


@pytest.mark.parametrize(
    "headers",
    [{"x-forwarded-for": "192.0.2.1"}, {"forwarded": "for=192.0.2.1"}, {"host": "["}, {"origin": "http://["}],
)
def test_without_a_key_what_comes_by_a_proxy_or_is_no_address_is_refused(
    open_server: Outside, headers: dict[str, str]
) -> None:
    assert call(open_server, "GET", "/admin/api/overview").status_code == 200
    assert call(open_server, "GET", "/admin/api/overview", headers=headers).status_code == 403


def test_another_cookie_with_any_text_does_not_end_a_session(locked: Outside) -> None:
    cookie = 'prefs={"a":1}; ' + session(locked)
    answer = call(locked, "GET", "/admin/api/overview", headers={"cookie": cookie})
    assert answer.status_code == 200 and answer.headers["x-frame-options"] == "DENY"


def test_other_machines_need_a_key() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(InvalidParameter, match="SPECULON_SERVE__ADMIN_KEY"):
            ServeConfig(admin=True, host=host)
        assert ServeConfig(admin=True, host=host, admin_key="secret").admin
        assert not ServeConfig(host=host).admin
    for host in ("127.0.0.1", "::1", "localhost"):
        assert ServeConfig(admin=True, host=host).admin
    with pytest.raises(InvalidParameter, match="admin_key"):
        ServeConfig(admin=True, admin_key=" ")


def test_without_the_dashboard_nothing_is_there(real: Outside) -> None:
    assert call(real, "GET", "/admin/").status_code == 404
    with pytest.raises(InvalidStatus), socket(real, "own", None):
        pass


def test_wrong_keys_are_counted_per_address() -> None:
    now = 0.0
    failures = Failures(lambda: now)
    for _ in range(FAILURES):
        assert not failures.blocked("a")
        failures.add("a")
    assert failures.blocked("a") and not failures.blocked("b")
    now = FAILURE_SECONDS + 1
    assert not failures.blocked("a")


class OpenGate(AdminGate):
    """A planted error: it lets everything through."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class KeyedGate(AdminGate):
    """Another one: any key is right."""

    def _is_key(self, given: bytes) -> bool:
        return bool(given)


class OpenSockets(AdminGate):
    """Another one: sockets are let through."""

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def passes(gate: type[AdminGate], of: str, path: str, **headers: str) -> bool:
    """Whether a request or a socket with these headers comes through."""
    passed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        pass

    host = {"host": "localhost", "origin": "http://localhost"}
    encoded = [(name.encode(), value.encode()) for name, value in (host | headers).items()]
    scope = {"type": of, "method": "GET", "path": path, "headers": encoded, "client": ("127.0.0.1", 1)}
    asyncio.run(gate(app, ServeConfig(admin=True, admin_key=KEY))(scope, receive, send))
    return bool(passed)


def check_gate(gate: type[AdminGate]) -> None:
    """Nothing comes through without the key or a session."""
    forged = {"cookie": "speculon_admin_0=forged"}
    for refused in ({}, {"authorization": "Bearer wrong"}, forged):
        for path in ("/admin/", "/admin/api/overview", "/admin/_nicegui/x"):
            assert not passes(gate, "http", path, **refused)
        assert not passes(gate, "websocket", "/admin/_nicegui_ws/socket.io/", **refused)
    assert passes(gate, "http", "/admin/api/overview", authorization=f"Bearer {KEY}")
    assert passes(gate, "http", "/v1/models"), "other paths are not its own"


def test_the_gate_lets_nothing_through_without_the_key() -> None:
    check_gate(AdminGate)


@pytest.mark.parametrize("planted", [OpenGate, KeyedGate, OpenSockets])
def test_a_gate_that_lets_something_through_is_seen(planted: type[AdminGate]) -> None:
    with pytest.raises(AssertionError):
        check_gate(planted)


def test_a_blocked_address_gets_429_even_with_the_key() -> None:
    gate = AdminGate(None, ServeConfig(admin=True, admin_key=KEY))  # type: ignore[arg-type]
    for _ in range(FAILURES):
        gate.failures.add("192.0.2.7")
    sent: list[Any] = []

    async def ask() -> None:
        body = {"type": "http.request", "body": f"key={KEY}".encode()}

        async def receive() -> Any:
            return body

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/admin/login", "headers": headers}
        await gate(scope | {"client": ("192.0.2.7", 1)}, receive, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 429


def test_sessions_end_with_time_and_number() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    first = sessions.open()
    assert sessions.valid(first) and not sessions.valid("") and not sessions.valid(first + "x")
    now = SESSION_SECONDS + 1
    assert not sessions.valid(first)
    second = sessions.open()
    for _ in range(MOST_SESSIONS):
        sessions.open()
    assert not sessions.valid(second)
