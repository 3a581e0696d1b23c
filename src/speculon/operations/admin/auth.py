"""Who may use `/admin`: sessions, the admin key, and requests of other sites. Pure ASGI, torch-free."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculon.core.config.serve import ServeConfig, is_loopback
from speculon.operations.admin.ui.login import login_page
from speculon.server.errors import Failure
from speculon.server.middleware import ADMIN, bearer_token, on_start, under_admin

PREFIX = ADMIN
SESSION_SECONDS = 12 * 3600.0
MOST_SESSIONS = 1000
FAILURES, FAILURE_SECONDS = 10, 60.0  # wrong keys of an address, within these seconds
MOST_ADDRESSES = 10_000
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
SAFE = ("GET", "HEAD", "OPTIONS")
OTHER_SITE = "this page belongs to another site, or the Host header names another server"
NO_SESSION = "log in at /admin/login, or send the admin key as a bearer token"
TOO_MANY = f"{FAILURES} wrong admin keys in {FAILURE_SECONDS:g} s from this address: wait, then try again"


class Sessions:
    """Random tokens, kept as digests in memory: a restart ends all of them."""

    def __init__(self, clock: Callable[[], float] = monotonic):
        self._clock = clock
        self._ends: OrderedDict[bytes, float] = OrderedDict()

    def open(self) -> str:
        """A new session's token. The oldest session ends where there are `MOST_SESSIONS`."""
        token = secrets.token_urlsafe(32)
        self._ends[digest(token)] = self._clock() + SESSION_SECONDS
        while len(self._ends) > MOST_SESSIONS:
            self._ends.popitem(last=False)
        return token

    def valid(self, token: str) -> bool:
        return self._ends.get(digest(token), 0.0) > self._clock()

    def close(self, token: str) -> None:
        self._ends.pop(digest(token), None)


class Failures:
    """Wrong keys of each address in the last `FAILURE_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = monotonic):
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def blocked(self, address: str) -> bool:
        times = self._times.get(address, deque())
        while times and times[0] <= self._clock() - FAILURE_SECONDS:
            times.popleft()
        return len(times) >= FAILURES

    def add(self, address: str) -> None:
        self._times.setdefault(address, deque(maxlen=FAILURES)).append(self._clock())
        self._times.move_to_end(address)
        while len(self._times) > MOST_ADDRESSES:
            self._times.popitem(last=False)


class AdminGate:
    """Lets requests and sockets under `/admin` pass with a session or the admin key; other paths as they are.

    Without a key, on loopback, a page opens a session by itself; a socket needs that session.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig):
        self._app, self._config = app, config
        self._key = config.admin_key.get_secret_value().encode() if config.admin_key is not None else None
        self.sessions, self.failures = Sessions(), Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._socket(scope, receive, send)
        if scope["type"] != "http" or not under_admin(scope["path"]):
            return await self._app(scope, receive, send)
        await self._request(scope, receive, on_start(send, forbid_frames))

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A socket is refused, before it opens, without a session or with another site's origin."""
        connection = HTTPConnection(scope)
        token = session_token(connection)
        mine = under_admin(scope["path"]) and self._same_site(connection, origin_needed=True)
        if not mine or not self.sessions.valid(token):
            await receive()  # websocket.connect
            return await send({"type": "websocket.close", "code": 4403})

        async def while_valid() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and not self.sessions.valid(token):
                return {"type": "websocket.disconnect", "code": 4401}
            return message

        await self._app(scope, while_valid, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, path = HTTPConnection(scope), scope["path"]
        if not self._same_site(connection):
            return await Failure(403, OTHER_SITE, "other_site").response()(scope, receive, send)
        if path == PREFIX:
            return await RedirectResponse(PREFIX + "/", 307)(scope, receive, send)
        if path in (PREFIX + "/login", PREFIX + "/logout"):
            response = await self._login_or_out(connection, receive)
            return await response(scope, receive, send)
        bearer = bearer_token(connection.headers)
        if bearer and self._key is not None:
            address = client_address(connection)
            if self.failures.blocked(address):
                return await Failure(429, TOO_MANY, "too_many_failures").response()(scope, receive, send)
            if self._is_key(bearer):
                return await self._app(scope, receive, send)
            self.failures.add(address)
        elif self.sessions.valid(session_token(connection)):
            return await self._app(scope, receive, send)
        elif self._key is None:
            return await self._app(scope, receive, self._with_session(scope, send))
        if path.startswith(PREFIX + "/api/") or scope["method"] not in SAFE:
            return await Failure(401, NO_SESSION, "no_admin_session").response()(scope, receive, send)
        await RedirectResponse(PREFIX + "/login", 303)(scope, receive, send)

    def _same_site(self, connection: HTTPConnection, *, origin_needed: bool = False) -> bool:
        """Against DNS rebinding (Host) and forged requests (Origin). Browsers send Origin with changes."""
        headers = connection.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name, of_page = urlsplit(f"//{host}").hostname or "", urlsplit(origin or "").netloc
        except ValueError:
            return False
        # without a key, a name that an attacker's DNS points here is another site
        if self._key is None and not (is_loopback(name) and is_loopback(client_address(connection))):
            return False
        # a proxy on this machine would open it to everyone
        if self._key is None and any(header in headers for header in FORWARDED):
            return False
        if origin is None:
            sent_by = headers.get("sec-fetch-site", "none")
            return not origin_needed and (
                connection.scope["method"] in SAFE or sent_by in ("none", "same-origin")
            )
        return of_page == host or origin in self._config.cors_origins

    async def _login_or_out(self, connection: HTTPConnection, receive: Receive) -> Response:
        method, path = connection.scope["method"], connection.scope["path"]
        if path == PREFIX + "/logout":
            if method != "POST":
                return Failure(405, "log out with POST", "method_not_allowed").response()
            self.sessions.close(session_token(connection))
            response: Response = RedirectResponse(PREFIX + "/login", 303)
            response.delete_cookie(cookie_name(connection.scope), path=PREFIX)
            return response
        if self._key is None:
            return RedirectResponse(PREFIX + "/", 303)
        if method != "POST":
            return page(connection, None, 200)
        address = client_address(connection)
        if self.failures.blocked(address):
            return page(connection, "too_many", 429)
        body = (await receive()).get("body", b"")  # whole: the middleware in front has read it
        sent = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
        if not self._is_key(sent.encode()):
            self.failures.add(address)
            return page(connection, "wrong", 401)
        response = RedirectResponse(PREFIX + "/", 303)
        response.headers.append("set-cookie", self._cookie(connection.scope))
        return response

    def _is_key(self, sent: bytes) -> bool:
        # digests have one length: the time does not tell that of the key
        return self._key is not None and hmac.compare_digest(sha256(sent), sha256(self._key))

    def _cookie(self, scope: Scope) -> str:
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        value = f"{cookie_name(scope)}={self.sessions.open()}"
        return f"{value}; Path={PREFIX}; Max-Age={SESSION_SECONDS:.0f}; HttpOnly; SameSite=Strict{secure}"

    def _with_session(self, scope: Scope, send: Send) -> Send:
        """Adds a session's cookie to a page. Programs that call the API keep none."""
        if scope["path"].startswith((PREFIX + "/api/", PREFIX + "/_nicegui")):
            return send

        def add_cookie(response: Message) -> None:
            MutableHeaders(scope=response).append("set-cookie", self._cookie(scope))

        return on_start(send, add_cookie)


def page(connection: HTTPConnection, fault: str | None, status: int) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
    headers = {"content-security-policy": policy, "cache-control": "no-store"}
    return HTMLResponse(login_page(connection, fault), status, headers)


def forbid_frames(response: Message) -> None:
    """No page of another site may show these pages within its own."""
    MutableHeaders(scope=response)["x-frame-options"] = "DENY"


def cookie_name(scope: Scope) -> str:
    """Cookies of a host are those of all its ports: two servers there have a name each."""
    return f"speculon_admin_{(scope.get('server') or ('', 0))[1] or 0}"


def session_token(connection: HTTPConnection) -> str:
    return connection.cookies.get(cookie_name(connection.scope), "")


def client_address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client else ""


def digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape"))


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
