"""No text of a request enters the log: a canary in every field of every route is not found there."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from speculon.core.errors import SpeculonError
from speculon.core.logs import LogFormatter, described, name_for_log, path_for_log, without_text
from speculon.server import schemas
from tests.server.inside import served
from tests.server.outside import LOCAL_HTTP, started

CANARY = "CanaryZebra"
NUMBER = 4111222233334444
BODIES: dict[str, type[schemas.Body]] = {
    "/v1/completions": schemas.CompletionRequest,
    "/v1/chat/completions": schemas.ChatRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": CANARY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": CANARY}]},
    "/tokenize": {"prompt": CANARY},
    "/detokenize": {"tokens": list(CANARY.encode())},
}
TOOL = {"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": {}}}
VALUES: tuple[Any, ...] = (
    CANARY,
    NUMBER,
    [CANARY],
    [NUMBER],
    {CANARY: CANARY},
    {"type": CANARY, CANARY + " x": 1},
    {"type": "content", "content": [CANARY]},
    {"type": "json_schema", "json_schema": {"name": CANARY, "schema": {"enum": [CANARY]}}},
    {"type": "json_schema", "json_schema": {"name": CANARY, "schema": CANARY}},
    {"type": "function", "function": {"name": CANARY}},
    [{"role": CANARY, "content": CANARY}],
    [{"role": "assistant", "content": [{"type": CANARY, "text": CANARY}]}],
    [{"role": "tool", "content": None, "tool_calls": [{"function": {"name": CANARY}}]}],
    [TOOL],
    {"method": CANARY, "pool": CANARY, "policy": CANARY},
    CANARY + "\udfff",
    {f"metadata {CANARY}": {CANARY: CANARY}},
)
FAULTS = ("refuse:", "fault:", "break:", "unreadable:")
MORE: tuple[dict[str, Any], ...] = (
    {"stop": [CANARY + "\ud800"]},
    {"stop": [CANARY] * 99},
    {"logit_bias": {CANARY: 1}},
    {"logit_bias": {f"{CANARY} {NUMBER}": 1e300}},
    {"prompt": CANARY * 900},
    {"prompt": [NUMBER]},
    {"suffix": f"{CANARY} password={CANARY}"},
    {"model": CANARY},
    {f"{CANARY} is no field": CANARY},
    {f"user.{CANARY} is no field": CANARY},
    {"speculation": {"method": CANARY}},
    {"user": CANARY, "metadata": {CANARY: CANARY}, "safety_identifier": CANARY, "bad_words": [CANARY]},
    *({"prompt": fault + CANARY} for fault in FAULTS),
    *({"prompt": fault + CANARY, "stream": True} for fault in FAULTS),
)
HEADERS = ("x-api-key", "authorization", "cookie", "user-agent", "referer", "content-type", "origin", CANARY)
RAW = (f'{{"prompt": "{CANARY}', f'{{"{CANARY}": {CANARY}}}', CANARY, f'"{CANARY}"', f'["{CANARY}"]')


def send_some(client: httpx.Client) -> None:
    """What has leaked or could, one of each kind."""
    route = "/v1/completions"
    for more in MORE:
        post(client, route, {**GOOD[route], **more})
    for content in RAW:
        client.post(route, content=content, headers={"content-type": "application/json"})
    for name in HEADERS:
        client.post(route, json=GOOD[route], headers={name: CANARY})
    client.get("/health", headers={"x-request-id": f"{CANARY} with a space"})
    for path in (f"/{CANARY}", f"/v1/models/{CANARY}", f"/v1/%20{CANARY}/x", f"/v1/models?q={CANARY}"):
        client.get(path)
    for path in ("pools", "capture"):
        client.delete(f"/v1/speculation/{path}", params={"pool": CANARY})
        client.delete(f"/v1/speculation/{path}", params={CANARY: CANARY})


def send_all(client: httpx.Client) -> None:
    for route, body in BODIES.items():
        for field in (name for name in body.model_fields if name != "n"):
            for value in VALUES:
                post(client, route, {**GOOD[route], "max_tokens": 1, field: value})


def post(client: httpx.Client, route: str, body: dict[str, Any]) -> None:
    if "max_tokens" in body and route.endswith("tokenize"):
        del body["max_tokens"]
    client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})


@contextmanager
def logged(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """All that the server, its engine, uvicorn and asyncio log."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    loggers = [logging.getLogger(name) for name in ("speculon", "uvicorn", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield stream
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def log_of(send: Callable[[httpx.Client], None], **serve: Any) -> str:
    with logged(LogFormatter()) as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("speculon"), "level", logging.DEBUG)
        with served(**serve) as inside:
            send(inside.client)
    return stream.getvalue()


def check_clean(log: str) -> None:
    found = [line for line in log.splitlines() if CANARY in line or str(NUMBER) in line]
    assert log and not found, found[:5]


def check_faults_are_seen(log: str) -> None:
    for place in ("KeyError", "RuntimeError", "scripted.py", "suffix = a string of 32 characters"):
        assert place in log, place


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_text_of_a_request_is_logged(log_format: str) -> None:
    log = log_of(send_some, log_format=log_format)
    check_clean(log)
    check_faults_are_seen(log)


def test_no_field_of_a_body_is_logged() -> None:
    log = log_of(send_all)
    check_clean(log)
    assert " 400 /v1/completions " in log and " 400 /tokenize " in log


def test_nothing_of_it_is_on_stderr(tmp_path: Path) -> None:
    """Also not what the engine's process prints by itself."""
    with started(tmp_path, "--log-format", "json") as server:
        with httpx.Client(base_url=server.ready(), **LOCAL_HTTP, timeout=20) as client:
            send_some(client)
        assert server.end() == 0
    check_clean(server.stderr)
    check_faults_are_seen(server.stderr)
    assert "WARNING" not in server.stderr, "it listens on this machine only"


def old_format(name: str, value: Any, limit: str) -> str:
    return f"{name} = {value!r}: {limit}"


@pytest.mark.parametrize(
    ("where", "old"),
    [
        pytest.param("speculon.core.errors.without_text", old_format, id="a refused setting"),
        pytest.param("speculon.server.errors.without_text", old_format, id="a refused field"),
        pytest.param("speculon.server.errors.name_for_log", str, id="a name"),
        pytest.param("speculon.server.middleware.path_for_log", lambda path, known: path, id="a path"),
        pytest.param("speculon.core.errors.SpeculonError.for_log", property(str), id="a name of a model"),
        pytest.param(f"{__name__}.LogFormatter", logging.Formatter, id="a traceback"),
    ],
)
def test_the_old_format_is_found(monkeypatch: pytest.MonkeyPatch, where: str, old: Any) -> None:
    monkeypatch.setattr(where, old)
    with pytest.raises(AssertionError, match=CANARY):
        check_clean(log_of(send_some))


# how it is shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("abc", "a string of 3 characters"),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object of 1 fields"),
        (-1, "-1"),
        (0.5, "0.5"),
        (None, "None"),
        (True, "True"),
        (NUMBER, "a number of 16 characters"),
        (b"abc", "a value of type bytes"),
    ],
)
def test_values_are_described(value: Any, shown: str) -> None:
    assert described(value) == shown


def test_a_limit_that_repeats_the_value_is_left_out() -> None:
    assert without_text("n", 99, "at most 64") == "n = 99: at most 64"
    assert without_text("stop", "abcdef", "is too long") == "stop = a string of 6 characters: is too long"
    assert without_text("regex", "(abcdef", "no end of 'abcdef'") == "regex = a string of 7 characters"


def test_names_and_paths_are_shown_where_they_are_known() -> None:
    assert name_for_log("messages.0.content") == "messages.0.content"
    assert name_for_log("metadata.my own text") == "metadata.(11 characters)"
    assert name_for_log("a text. and more") == "(16 characters)"
    assert path_for_log("/v1/v1/secret", {"", "v1"}) == "/v1/v1/(6 characters)"


def test_a_chain_of_exceptions_is_shown_without_messages() -> None:
    try:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            raise SpeculonError(CANARY) from error
    except SpeculonError as error:
        shown = LogFormatter().formatException((type(error), error, error.__traceback__))
    assert CANARY not in shown and shown.index("KeyError") < shown.index("which led to:")
    assert shown.endswith("SpeculonError") and shown.count("test_log_texts.py") == 2
    group = ExceptionGroup(CANARY, [KeyError(CANARY), ValueError(CANARY)])
    shown = LogFormatter().formatException((type(group), group, None))
    assert CANARY not in shown and all(name in shown for name in ("KeyError", "ValueError", "Group"))
