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
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculon.core.config.serve import ServeConfig
from speculon.core.logs import path_for_log
from speculon.server.access_log import AccessRecord
from speculon.server.encodings import DamagedBody, Encodings, UnknownEncoding
from speculon.server.errors import Failure

OPEN_PATHS = ("/health", "/ready", "/live", "/ping")  # probes have no key
ADMIN = "/admin"  # has a key of its own, which `AdminGate` checks
KEY_HEADERS = ("api-key", "x-api-key")  # headers in which clients of Azure and of other services send the key
REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
LOGGED_PATH = 200  # characters
IMAGE, BASE64 = b'"data:', b";base64,"
ESCAPES = (rb"\/", rb"\n", rb"\r", rb"\t")  # that JSON may have in base64
IMAGE_HEAD = 100  # guess: characters before the base64 of a data URL
CLIENT_GONE = 499  # a status in the log alone, as nginx logs it

log = logging.getLogger("speculon.server")


class ClientGone(Exception):
    """The client has closed its connection."""


class RequestMiddleware:
    def __init__(self, app: ASGIApp, config: ServeConfig, finish: Callable[[AccessRecord], None]):
        self._app, self._config, self._finish = app, config, finish
        self._admin = config.admin
        self._keys = [key.get_secret_value().encode() for key in config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        record, token = begin_record(scope, headers), api_key(headers)
        scope.setdefault("state", {}).update(record=record, tenant=tenant_of(token))

        def begin(response: Message) -> None:
            record.status = response["status"]
            MutableHeaders(scope=response)["x-request-id"] = record.request_id

        send, arrival = on_start(send, begin), Arrival(receive)
        try:
            body = await self._body(scope, headers, token, arrival)
            if isinstance(body, Failure):
                record.reason = body.message
                send = lingering(arrival, send, self._config.body_timeout)
                await body.response()(scope, receive, send)
            else:
                # a HEAD is answered as a GET; the connection leaves out the body of the answer
                inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
                await self._app(inner, replay(body, arrival), send)
        except ClientGone:
            record.status = CLIENT_GONE
        except asyncio.CancelledError:  # the server ends, and the client reads nothing
            record.status = CLIENT_GONE
        except Exception as error:
            log.exception("%s: a fault inside the server", record.request_id)
            started, record.reason = record.status, type(error).__name__
            if not started:  # otherwise only the connection can still be cut
                response = Failure(500, "a fault inside the server; its log says more").response()
                await response(scope, receive, send)
            record.status = 500
        finally:
            self._finish(record)

    async def _body(self, scope: Scope, headers: Headers, token: bytes, receive: Receive) -> bytes | Failure:
        """The body of a request that may enter; else why it is refused."""
        config = self._config
        if not self._may_enter(scope, token):
            needed = "a valid API key is needed, as a bearer token or in the header api-key"
            return Failure(401, needed, "invalid_api_key")
        try:
            encodings = Encodings(headers.getlist("content-encoding"))
            async with asyncio.timeout(config.body_timeout):
                body = await self._read(headers, receive, encodings)
        except UnknownEncoding as error:
            return Failure(415, str(error), "unknown_encoding")
        except DamagedBody as error:
            return Failure(400, str(error), "damaged_body")
        except TimeoutError:
            return Failure(408, f"the body did not arrive within {config.body_timeout:g} s", "body_timeout")
        if body is None:
            return Failure(413, f"the body is larger than {self._limits}", "body_too_large")
        return body

    @property
    def _limits(self) -> str:
        config = self._config
        return f"{config.max_body_mb:g} MB, or {config.max_image_body_mb:g} MB with images in it"

    def _may_enter(self, scope: Scope, token: bytes) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        if self._admin and under_admin(scope["path"]):
            return True
        # compared with every key, so that the time does not depend on which one fits
        fits = [hmac.compare_digest(token, key) for key in self._keys]
        return any(fits)

    async def _read(self, headers: Headers, receive: Receive, encodings: Encodings) -> bytes | None:
        """The decoded body; None once it is too large, as it is sent or decoded. Only data URLs of images may
        exceed `max_body_mb`.
        """
        limit, most = (int(mb * 1e6) for mb in (self._config.max_body_mb, self._config.max_image_body_mb))
        most = max(limit, most)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            return None
        body, received, more, images = bytearray(), 0, True, False
        while more and received <= most and len(body) <= most:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            sent = message.get("body", b"")
            received += len(sent)
            body += encodings.decode(sent, most + 1 - len(body))
            more = message.get("more_body", False)
            images = images or (len(body) > limit and IMAGE in body)
            if len(body) > limit and not images:
                return None
        if received > most or len(body) > most:
            return None
        if len(body) > limit and without_images(body, self._config.max_images) > limit:
            return None
        encodings.end()
        return bytes(body)


def without_images(body: bytes | bytearray, most: int) -> int:
    """Bytes of a body outside of its first `most` images: data URLs of base64 in JSON.

    Without a regular expression, which takes four times as long.
    """
    size, start = len(body), body.find(IMAGE)
    while most and start >= 0 and (end := body.find(b'"', start + 1)) >= 0:
        if 0 <= body.find(BASE64, start, start + IMAGE_HEAD) < end:
            escapes = sum(body.count(escape, start, end) for escape in ESCAPES)
            size -= (end + 1 - start) * (body.count(b"\\", start, end) == escapes)
        start, most = body.find(IMAGE, end), most - 1
    return size


def under_admin(path: str) -> bool:
    return path == ADMIN or path.startswith(ADMIN + "/")


def on_start(send: Send, change: Callable[[Message], None]) -> Send:
    """Calls `change` with the beginning of a response, which has its status and headers."""

    async def send_changed(message: Message) -> None:
        if message["type"] == "http.response.start":
            change(message)
        await send(message)

    return send_changed


class Arrival:
    """The messages of a request as they arrive."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self.more_body = True  # whether more of the body is to come

    async def __call__(self) -> Message:
        message = await self._receive()
        self.more_body = message.get("more_body", False)
        return message


def lingering(receive: Arrival, send: Send, seconds: float) -> Send:
    """Reads the rest of the body before the connection is closed; otherwise the answer could be lost."""

    async def send_and_drain(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            return await send(message)
        await send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while receive.more_body:
                    await receive()
        await send({"type": "http.response.body", "body": b""})

    return send_and_drain


def bearer_token(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def api_key(headers: Headers) -> bytes:
    """The API key of a request: the bearer token, else the first of `KEY_HEADERS`; empty without one."""
    others = (headers.get(name, "").strip().encode("latin-1") for name in KEY_HEADERS)
    return bearer_token(headers) or next(filter(None, others), b"")


def tenant_of(token: bytes) -> str:
    """The owner of earlier answers and captured traffic: a digest, so that the key itself is not kept."""
    return hashlib.sha256(b"speculon tenant " + token).hexdigest()


def begin_record(scope: Scope, headers: Headers) -> AccessRecord:
    """Metrics are labelled with the route, not with the path: a client must not create labels."""
    requested = headers.get("x-request-id", "")
    request_id = requested if REQUEST_ID.fullmatch(requested) else secrets.token_hex(8)
    routes = scope["app"].routes
    fitting = (route.path for route in routes if route.matches(scope)[0] != Match.NONE)
    known = {part for route in routes for part in route.path.split("/")}
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
    return AccessRecord(request_id, next(fitting, "other"), path_for_log(path, known)[:LOGGED_PATH])


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
