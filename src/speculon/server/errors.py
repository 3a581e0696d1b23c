"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fastapi.responses import JSONResponse

from speculon.errors import (
    EmptyPrompt,
    EngineError,
    InvalidParameter,
    InvalidRequest,
    NotReady,
    QueueFull,
    SpeculonError,
    TooLong,
    UnknownMethod,
    UnknownModel,
    shorten,
)
from speculon.server.schemas import ErrorResponse

# the first that fits: error, status, code
TABLE: tuple[tuple[type[SpeculonError], int, str | None], ...] = (
    (UnknownModel, 404, "model_not_found"),
    (QueueFull, 429, "queue_full"),
    (TooLong, 400, "context_length_exceeded"),
    (InvalidRequest, 400, None),
    (NotReady, 503, "not_ready"),
    (EngineError, 500, "engine_error"),
    (SpeculonError, 500, None),
)
# what they speak of
FIELDS = ((UnknownModel, "model"), (UnknownMethod, "speculation.method"), (EmptyPrompt, "prompt"))
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLOSE = {"connection": "close"}  # the rest of the body is not read
HEADERS: dict[int, dict[str, str]] = {
    401: {"www-authenticate": "Bearer", **CLOSE},
    408: CLOSE,
    413: CLOSE,
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
}
# of a union
BRANCHES = re.compile(r"^(str|int|float|bool|list\[.*|literal\[.*|constrained-.*|function-.*|[A-Z]\w*)$")

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request cannot be served as asked",
        401: "No valid API key",
        404: "No such model",
        408: "The body took too long to arrive",
        413: "The body is too large",
        429: "Too many requests wait",
        500: "A fault inside",
        503: "The model is being loaded, or the server is about to end",
    }.items()
}


def failure(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    return JSONResponse(body_of(status, message, code, param), status, HEADERS.get(status))


def body_of(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": clean(message), "type": kind, "param": param and clean(param), "code": code}}


def clean(text: str) -> str:
    """A refused text may be no text: halves of surrogate pairs as they were written."""
    return text.encode(errors="backslashreplace").decode()


def status_of(error: SpeculonError) -> tuple[int, str | None]:
    return next((status, code) for kind, status, code in TABLE if isinstance(error, kind))


def param_of(error: SpeculonError) -> str | None:
    if isinstance(error, InvalidParameter):
        return error.name
    return next((name for kind, name in FIELDS if isinstance(error, kind)), None)


def first_of(errors: Iterable[Any]) -> tuple[str, str | None]:
    """(message, field) of a body that does not fit its schema; of a union the branch of the right type, or
    that came furthest.
    """

    def rank(error: Any) -> tuple[bool, int, bool, bool]:
        kind = error["type"]
        return (
            kind.startswith("too_"),
            len(error["loc"]),
            kind != "extra_forbidden",
            not kind.endswith("_type"),
        )

    found = max(errors, key=rank)
    parts = [str(part) for part in found["loc"] if part != "body"]
    name = ".".join(part for i, part in enumerate(parts) if i == 0 or not BRANCHES.match(part))
    if not parts and isinstance(found["input"], bytes):
        return "the body must come with content-type application/json", None
    if found["type"] == "extra_forbidden":
        return f"{name}: unknown or unsupported field", name
    if found["type"] == "json_invalid":
        return f"the body is no JSON: {found['ctx']['error']} at character {parts[0]}", None
    if found["type"] == "missing":
        return f"{name or 'body'}: is needed", name or None
    return f"{name or 'body'} = {shorten(found['input'])}: {found['msg']}", name or None
