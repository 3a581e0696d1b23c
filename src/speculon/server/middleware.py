"""Before any route: request ids, the API key, and the body, within its limits of size and time. Pure ASGI.

Every request leaves one `AccessRecord`, however it ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match

from speculon.core.config.serve import ServeConfig
from speculon.core.logs import path_for_log
from speculon.server.access_log import AccessRecord
from speculon.server.errors import failure

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/ready", "/live", "/ping")  # probes have no key
ADMIN = "/admin"  # has a key of its own, which `AdminGate` checks
KEY_HEADERS = ("api-key", "x-api-key")  # where clients of Azure and of others send theirs
REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
LOGGED_PATH = 200  # characters
CLIENT_GONE = 499  # a status in the log alone, as nginx logs it

log = logging.getLogger("speculon.server")


class ClientGone(Exception):
    """The client has closed its connection."""


class RequestMiddleware:
    def __init__(self, app: App, config: ServeConfig, finish: Callable[[AccessRecord], None]):
        self._app, self._config, self._finish = app, config, finish
        self._admin = config.admin
        self._keys = [key.get_secret_value().encode() for key in config.api_key]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        record, token = record_of(scope, headers), token_of(headers)
        scope.setdefault("state", {}).update(record=record, tenant=tenant_of(token))
        send = with_request_id(send, record)
        try:
            await self._handle(scope, headers, token, record, receive, send)
        except ClientGone:
            record.status = CLIENT_GONE
        except asyncio.CancelledError:  # the server ends, and the client reads nothing
            record.status = CLIENT_GONE
        except Exception as error:
            log.exception("%s: a fault inside the server", record.request_id)
            started, record.reason = record.status, type(error).__name__
            if not started:  # otherwise only the connection can still be cut
                await failure(500, "a fault inside the server; its log says more")(scope, receive, send)
            record.status = 500
        finally:
            self._finish(record)

    async def _handle(
        self,
        scope: Message,
        headers: Headers,
        token: bytes,
        record: AccessRecord,
        receive: Receive,
        send: Send,
    ) -> None:
        async def refuse(status: int, message: str, code: str) -> None:
            record.reason = message
            response = failure(status, message, code)
            await response(scope, receive, lingering(receive, send, self._config.body_timeout))

        if not self._may_enter(scope, token):
            return await refuse(
                401,
                "a valid API key is needed, as a bearer token or in the header api-key",
                "invalid_api_key",
            )
        try:
            async with asyncio.timeout(self._config.body_timeout):
                body = await self._read(headers, receive)
        except TimeoutError:
            message = f"the body did not arrive within {self._config.body_timeout:g} s"
            return await refuse(408, message, "body_timeout")
        if body is None:
            message = f"the body is larger than {self._config.max_body_mb:g} MB"
            return await refuse(413, message, "body_too_large")
        # a HEAD is answered as a GET; the connection leaves out the body of the answer
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._app(inner, replay(body, receive), send)

    def _may_enter(self, scope: Message, token: bytes) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        if self._admin and under_admin(scope["path"]):
            return True
        # compared with every key, so that the time does not depend on which one fits
        fits = [hmac.compare_digest(token, key) for key in self._keys]
        return any(fits)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None once it is too large."""
        limit = int(self._config.max_body_mb * 1e6)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            return None
        body, more = bytearray(), True
        while more and len(body) <= limit:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body) if len(body) <= limit else None


def under_admin(path: str) -> bool:
    return path == ADMIN or path.startswith(ADMIN + "/")


def with_request_id(send: Send, record: AccessRecord) -> Send:
    """Adds the header `x-request-id`, and notes the status."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = record.request_id
        await send(message)

    return send_with_id


def lingering(receive: Receive, send: Send, seconds: float) -> Send:
    """Reads the rest of the body before the connection is closed; otherwise the answer could be lost."""

    async def send_and_drain(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            return await send(message)
        await send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    return send_and_drain


def token_of(headers: Headers) -> bytes:
    """The API key: the bearer token, else that of the first of `KEY_HEADERS`; empty where there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    others = (headers.get(name, "").strip() for name in KEY_HEADERS)
    return (bearer or next(filter(None, others), "")).encode("latin-1")


def tenant_of(token: bytes) -> str:
    """The owner of earlier answers and captured traffic: a digest, so that the key itself is not kept."""
    return hashlib.sha256(b"speculon tenant " + token).hexdigest()


def record_of(scope: Message, headers: Headers) -> AccessRecord:
    """Metrics are labelled with the route, not with the path: a client must not create labels."""
    requested = headers.get("x-request-id", "")
    request_id = requested if REQUEST_ID.fullmatch(requested) else secrets.token_hex(8)
    routes = scope["app"].routes
    found = (route.path for route in routes if route.matches(scope)[0] != Match.NONE)
    known = {part for route in routes for part in route.path.split("/")}
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
    return AccessRecord(request_id, next(found, "other"), path_for_log(path, known)[:LOGGED_PATH])


def replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it: the disconnect."""
    replayed = False

    async def receive_again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
