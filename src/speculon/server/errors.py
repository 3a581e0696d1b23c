"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from fastapi.responses import JSONResponse

from speculon.core.checked import BEYOND
from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import (
    EmptyPrompt,
    EngineError,
    InvalidParameter,
    InvalidRequest,
    LoadFailed,
    NoRoom,
    NotReady,
    QueueFull,
    SpeculonError,
    TooLong,
    UnknownMethod,
    UnknownModel,
    UnknownRequest,
    shorten,
)
from speculon.core.logs import name_for_log, without_text
from speculon.server.answer_schemas import ErrorResponse

# error, status, code; the first row that fits counts
TABLE: tuple[tuple[type[SpeculonError], int, str | None], ...] = (
    (UnknownModel, 404, "model_not_found"),
    (UnknownRequest, 404, "request_not_found"),
    (QueueFull, 429, "queue_full"),
    (TooLong, 400, "context_length_exceeded"),
    (InvalidRequest, 400, None),
    (LoadFailed, 503, "load_failed"),
    (NoRoom, 503, "no_room"),
    (NotReady, 503, "not_ready"),
    (EngineError, 500, "engine_error"),
    (SpeculonError, 500, None),
)
# the field that an error is about
FIELDS = ((UnknownModel, "model"), (UnknownMethod, "speculation.method"), (EmptyPrompt, "prompt"))
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLOSE = {"connection": "close"}  # because the rest of the body is not read
HEADERS: dict[int, dict[str, str]] = {
    401: {"www-authenticate": "Bearer", **CLOSE},
    408: CLOSE,
    413: CLOSE,
    415: {"accept-encoding": "gzip, deflate", **CLOSE},
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
}
# names of a union's branches in the path of a validation error
BRANCHES = re.compile(
    r"^(str|int|float|bool|(list|literal|tagged-union)\[.*|constrained-.*|function-.*|[A-Z]\w*)$"
)

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request is invalid",
        401: "No valid API key",
        404: "No such model",
        408: "The body took too long to arrive",
        413: "The body is too large",
        415: "The body has an encoding that is not decoded",
        429: "Too many requests wait",
        500: "A fault of the server or its engine",
        503: "The model is being loaded, the engine hangs, or the server is about to end",
    }.items()
}


class Failure(NamedTuple):
    """An error as clients get it."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None  # the field that it is about
    feature: str | None = None  # beyond OpenAI's shape: the row of the capability table that denies it

    @classmethod
    def of(cls, error: SpeculonError) -> Self:
        status, code = next((status, code) for kind, status, code in TABLE if isinstance(error, kind))
        return cls(status, str(error), code, param_of(error), error.feature)

    def body(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": clean(self.message),
            "type": ERROR_TYPES.get(self.status, other),
            "param": self.param and clean(self.param),
            "code": self.code,
        }
        return {"error": error | ({"feature": self.feature} if self.feature else {})}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, HEADERS.get(self.status))


def clean(text: str) -> str:
    """Half a surrogate pair in a refused text is shown as its escape."""
    return text.encode(errors="backslashreplace").decode()


def param_of(error: SpeculonError) -> str | None:
    if isinstance(error, InvalidParameter):
        return error.name
    return next((name for cls, name in FIELDS if isinstance(error, cls)), None)


def misfit(errors: Iterable[Any]) -> tuple[Failure, str]:
    """Why a body does not fit its schema, and the message for the log.

    Of a union's branches the one of the right type counts, or the one that got furthest.
    """

    def rank(error: Any) -> tuple[bool, int, bool, bool]:
        code = error["type"]
        right_type = not code.endswith("_type")
        return code.startswith("too_"), len(error["loc"]), code != "extra_forbidden", right_type

    error = max(errors, key=rank)
    parts = [str(part) for part in error["loc"] if part != "body"]
    name = ".".join(part for i, part in enumerate(parts) if i == 0 or not BRANCHES.match(part))
    shown, feature = name or "body", None
    limits = {"extra_forbidden": "unknown or unsupported field", "missing": "is needed"}
    if not parts and isinstance(error["input"], bytes):
        name, message = "", "the request must have content-type application/json"
        logged = message
    elif error["type"] == "json_invalid":
        name, message = "", f"the body is not JSON: {error['ctx']['error']} at character {parts[0]}"
        logged = message
    elif limit := limits.get(error["type"]):
        message, logged = f"{shown}: {limit}", f"{name_for_log(shown)}: {limit}"
    else:
        message = f"{shown} = {shorten(error['input'])}: {error['msg']}"
        logged = without_text(shown, error["input"], error["msg"])
        feature = capability_row(name, error["type"])
    return Failure(400, message, None, name or None, feature), logged


def capability_row(name: str, fault: str) -> str | None:
    """The row of the capability table with the limit of a field, where that is the fault."""
    field = name.removeprefix("speculation.")
    known = field in RequestSpeculation.model_fields or name in SamplingParams.model_fields
    return f"{SamplingParams.features}.{field}" if known and fault in BEYOND else None
