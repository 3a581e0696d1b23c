"""Before any route: request ids, the key, and the body, whole, within its limits of size and time. Pure ASGI."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from speculon.config import ServeConfig
from speculon.server.errors import failure

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health", "/ready")  # probes have no key
REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class Door:
    def __init__(self, app: App, config: ServeConfig):
        self._app, self._config = app, config
        self._key = config.api_key.get_secret_value().encode() if config.api_key else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        named = headers.get("x-request-id", "")
        request_id = named if REQUEST_ID.fullmatch(named) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if not self._may_enter(scope, headers):
            return await failure(401, "a valid API key is needed, as a bearer token", "invalid_api_key")(scope, receive, with_id)
        try:
            async with asyncio.timeout(self._config.body_timeout):
                body = await self._read(headers, receive)
        except TimeoutError:
            message = f"the body did not arrive within {self._config.body_timeout:g} s"
            return await failure(408, message, "body_timeout")(scope, receive, with_id)
        if body is None:
            limit = f"the body is larger than {self._config.max_body_mb:g} MB"
            return await failure(413, limit, "body_too_large")(scope, receive, with_id)
        await self._app(scope, replay(body, receive), with_id)

    def _may_enter(self, scope: Message, headers: Headers) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._key)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None once it is too large."""
        limit = int(self._config.max_body_mb * 1e6)
        said = headers.get("content-length", "0")
        if said.isdecimal() and int(said) > limit:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return bytes(body)  # the client is gone; the route will find out
            body += message.get("body", b"")
            if len(body) > limit:
                return None
            if not message.get("more_body", False):
                return bytes(body)


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
