"""Server-sent events of an answer, and work that ends with its client's connection."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from speculon.core.errors import EngineError, SpeculonError
from speculon.server.access_log import AccessRecord
from speculon.server.answer import Answer
from speculon.server.errors import Failure
from speculon.server.middleware import CLIENT_GONE, ClientGone

T = TypeVar("T")

log = logging.getLogger("speculon.server")


class EventStream(StreamingResponse):
    """Server-sent events of one answer, which ends with the connection, however that ends."""

    def __init__(self, answer: Answer, record: AccessRecord, on_complete: Callable[[Answer], None]):
        super().__init__(self._lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._answer, self._record, self._on_complete = answer, record, on_complete

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            if not self._record.complete:
                self._record.status = CLIENT_GONE

    async def _lines(self) -> AsyncIterator[bytes]:
        answer = self._answer
        try:
            for chunk in answer.first_chunks():
                yield line(chunk)
            async for batch in answer.deltas(self._record.receive):
                yield b"".join(line(chunk) for new in batch for chunk in answer.chunks(new))
            for chunk in answer.last_chunks():
                yield line(chunk)
            self._on_complete(answer)
        except SpeculonError as error:
            yield self._error_line(error)
        except Exception as error:
            log.exception("%s: a fault inside the server", self._record.request_id)
            yield self._error_line(EngineError(f"a fault inside the server: {type(error).__name__}"))
        self._record.complete = True
        yield answer.DONE

    def _error_line(self, error: SpeculonError) -> bytes:
        failure = Failure.of(error)
        self._record.status, self._record.reason = failure.status, error.for_log
        return line(self._answer.failure(failure.body()))


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """The answer of a route, as OpenAPI describes it."""
    return {200: {"description": description, "content": {"text/event-stream": {}}}}


def line(chunk: dict[str, Any]) -> bytes:
    """One event; a typed one has its name on a line before it."""
    name = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return name + b"data: " + text.encode() + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
