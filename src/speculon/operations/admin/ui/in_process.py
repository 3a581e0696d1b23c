"""Completions by the server's own application, without a socket: its limits and its middleware hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from fastapi import FastAPI

from speculon.core.config.serve import ServeConfig

PATH = "/v1/completions"
WAITING = 64  # messages that may wait for the reader
EVENT = b"data: "
DONE = "[DONE]"


class Refused(Exception):
    """The server's error of one request. `status` is None where the stream had begun."""

    def __init__(self, status: int | None, message: str):
        super().__init__(message)
        self.status, self.message = status, message


async def stream(app: FastAPI, config: ServeConfig, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a streamed completion. To close it ends the request.

    Raises `Refused`.
    """
    messages: asyncio.Queue[Any] = asyncio.Queue(WAITING)
    calling = asyncio.create_task(call(app, scope_of(config), json.dumps(body).encode(), messages))
    try:
        status = (await messages.get() or {}).get("status", 500)
        pending, ended = b"", False
        while not ended:
            message = await messages.get()
            ended = message is None
            pending += b"" if ended else message.get("body", b"")
            if status != 200:
                continue
            *whole, pending = pending.split(b"\n\n")
            for text in whole:
                chunk = chunk_of(text)
                if chunk is not None:
                    yield chunk
        if status != 200:
            raise Refused(status, message_of(pending))
    finally:
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)


async def call(app: FastAPI, scope: dict[str, Any], body: bytes, messages: asyncio.Queue[Any]) -> None:
    """Puts what the application sends, then None."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if first:
            return first.pop()
        await asyncio.Event().wait()  # this client never disconnects: its task is cancelled

    try:
        await app(scope, receive, messages.put)
    finally:
        # a full queue has no reader any more where the task was cancelled
        with suppress(asyncio.QueueFull):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                messages.put_nowait(None)
            else:
                await messages.put(None)


def scope_of(config: ServeConfig) -> dict[str, Any]:
    """An administrator needs no API key: the first one is used, and does not leave the process."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if config.api_key:
        headers.append((b"authorization", b"Bearer " + config.api_key[0].get_secret_value().encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }


def chunk_of(event: bytes) -> dict[str, Any] | None:
    """The data of one event; None at the end. Raises `Refused`."""
    text = event.removeprefix(EVENT).decode()
    if text == DONE:
        return None
    chunk: dict[str, Any] = json.loads(text)
    if "error" in chunk:
        raise Refused(None, str(chunk["error"]["message"]))
    return chunk


def message_of(body: bytes) -> str:
    """The message of an error's body, or all of it where it has another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
