"""Completions by the server itself, without a socket: counted, logged and limited as those of clients."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from pydantic import ValidationError

from speculon.core.errors import EngineError, InvalidRequest, SpeculonError
from speculon.decoding.sequence import Event
from speculon.server.access_log import AccessRecord
from speculon.server.answer import Answer
from speculon.server.app_state import AppState
from speculon.server.completions import read_completion
from speculon.server.errors import Failure, misfit
from speculon.server.middleware import CLIENT_GONE, tenant_of
from speculon.server.schemas import CompletionRequest

PATH = "/v1/completions"

log = logging.getLogger("speculon.server")


async def complete(state: AppState, body: dict[str, Any]) -> AsyncGenerator[tuple[Answer, list[Event]]]:
    """The answer, with what the engine adds to it. To close it ends the request. Raises `SpeculonError`."""
    record = AccessRecord(secrets.token_hex(8), PATH, PATH, status=0)
    # an administrator needs no API key: the first one is used
    key = state.config.api_key[0].get_secret_value() if state.config.api_key else ""
    events: list[Event] = []

    def receive(batch: list[Event]) -> None:
        record.receive(batch)
        events.extend(batch)

    try:
        read, answer_id = partial(read_completion, parsed(body)), f"cmpl-{secrets.token_hex(12)}"
        answer = await state.begin(record, tenant_of(key.encode()), answer_id, body.get("model"), read)
        record.status = 200
        async for _ in answer.deltas(receive):
            yield answer, events.copy()
            events.clear()
    except (GeneratorExit, asyncio.CancelledError):
        record.status = CLIENT_GONE
        raise
    except SpeculonError as error:
        record.status, record.reason = Failure.of(error).status, error.for_log
        raise
    except Exception as error:
        log.exception("%s: a fault inside the server", record.request_id)
        record.status, record.reason = 500, type(error).__name__
        raise EngineError(f"a fault inside the server: {type(error).__name__}") from None
    finally:
        if record.answer is not None:
            record.answer.close()
        state.finish(record)


def parsed(body: dict[str, Any]) -> CompletionRequest:
    try:
        return CompletionRequest(**body)
    except ValidationError as error:
        failure, logged = misfit(error.errors())
        refused = InvalidRequest(failure.message)
        refused.logged = logged  # without text of the request
        raise refused from None
