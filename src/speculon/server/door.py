"""Before any route: request ids, the key, and the body, whole, within its limits of size and time. Pure ASGI.

Every request passes here once and leaves one `Record`, however it ends.
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

from speculon.config.serve import ServeConfig
from speculon.server.errors import failure
from speculon.server.record import Record

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/ready")  # probes have no key
REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
SHOWN_PATH = 200  # characters of it in the log
CLIENT_GONE = 499  # in the log alone: nobody is left to read it

log = logging.getLogger("speculon.server")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Door:
    def __init__(self, app: App, config: ServeConfig, finish: Callable[[Record], None]):
        self._app, self._config, self._finish = app, config, finish
        self._keys = [key.get_secret_value().encode() for key in config.api_key]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        record, token = record_of(scope, headers), token_of(headers)
        scope.setdefault("state", {}).update(record=record, tenant=tenant_of(token))

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            await self._pass(scope, headers, token, record, receive, told)
        except ClientGone:
            record.status = CLIENT_GONE
        except (
            asyncio.CancelledError
        ):  # the server ends, and this client has read nothing for the whole time it was given
            record.status = CLIENT_GONE
        except Exception as error:
            log.exception("%s: a fault inside the server", record.request_id)
            begun, record.reason = record.status, f"{type(error).__name__}: {error}"
            if not begun:  # otherwise the connection is cut, which is all that can still be said
                await failure(500, "a fault inside the server; its log says more")(scope, receive, told)
            record.status = 500
        finally:
            self._finish(record)

    async def _pass(
        self, scope: Message, headers: Headers, token: bytes, record: Record, receive: Receive, send: Send
    ) -> None:
        async def refuse(status: int, message: str, code: str) -> None:
            record.reason = message
            await failure(status, message, code)(
                scope, receive, lingering(receive, send, self._config.body_timeout)
            )

        if not self._may_enter(scope, token):
            return await refuse(401, "a valid API key is needed, as a bearer token", "invalid_api_key")
        try:
            async with asyncio.timeout(self._config.body_timeout):
                body = await self._read(headers, receive)
        except TimeoutError:
            return await refuse(
                408, f"the body did not arrive within {self._config.body_timeout:g} s", "body_timeout"
            )
        if body is None:
            return await refuse(
                413, f"the body is larger than {self._config.max_body_mb:g} MB", "body_too_large"
            )
        await self._app(scope, replay(body, receive), send)

    def _may_enter(self, scope: Message, token: bytes) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        # all of them: how long it takes tells of no key
        fits = [hmac.compare_digest(token, key) for key in self._keys]
        return any(fits)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None once it is too large."""
        limit = int(self._config.max_body_mb * 1e6)
        said = headers.get("content-length", "0")
        if said.isdecimal() and int(said) > limit:
            return None
        body, more = bytearray(), True
        while more and len(body) <= limit:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body) if len(body) <= limit else None


def lingering(receive: Receive, send: Send, seconds: float) -> Send:
    """Keeps the connection, once all is said, until the body has come: closed before, the answer could be
    lost with it.
    """

    async def patient(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            return await send(message)
        await send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    return patient


def token_of(headers: Headers) -> bytes:
    """The bearer token; empty where there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def tenant_of(token: bytes) -> str:
    """Whose requests these are, for all that is remembered of them: the key itself goes no further."""
    return hashlib.sha256(b"speculon tenant " + token).hexdigest()


def record_of(scope: Message, headers: Headers) -> Record:
    """The request as log and metrics name it: its route, so that no client can invent labels, and its path."""
    named = headers.get("x-request-id", "")
    request_id = named if REQUEST_ID.fullmatch(named) else secrets.token_hex(8)
    known = (route for route in scope["app"].routes if route.matches(scope)[0] != Match.NONE)
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
    return Record(request_id, next((route.path for route in known), "other"), path[:SHOWN_PATH])


def replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it: that the client is gone."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
