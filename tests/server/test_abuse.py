"""Bad requests: an error in OpenAI's shape, one line in the log, one count; other requests go on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import ValidationError

from speculon.core.config import EngineConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server.schemas import ChatRequest, CompletionRequest
from tests.server.inside import Inside, served, wait_until

JSON = {"content-type": "application/json"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "say:yes"}]}


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_body_mb=1.0, max_request_tokens=4000) as inside:
        yield inside


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refused request, which has OpenAI's shape."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    (name,) = response.json()
    error: dict[str, Any] = response.json()[name]
    assert name == "error" and set(error) - {"feature"} == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["type"], str)
    return error


# bodies

BAD: dict[str, tuple[str | bytes, str | None]] = {
    "half a body": ('{"prompt": "x', None),
    "nothing": ("", None),
    "no object": ("[1, 2]", None),
    "no text at all": (b"\xff\xfe\x00{", None),
    "utf-16": ('{"prompt": "x"}'.encode("utf-16")[:-1], None),
    "nested without end": ("[" * 100_000, None),
    "NaN": ('{"prompt": "x", "temperature": NaN}', "temperature"),
    "beyond floats": ('{"prompt": "x", "temperature": 1e999}', "temperature"),
    "NaN as a bias": ('{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias.5"),
    "negative": ('{"prompt": "x", "max_tokens": -1}', "max_tokens"),
    "huge": ('{"prompt": "x", "max_tokens": 1' + "0" * 300 + "}", "max_tokens"),
    "huger than numbers are read": ('{"prompt": "x", "seed": 1' + "0" * 6000 + "}", None),
    "a huge top_k": ('{"prompt": "x", "top_k": ' + str(2**70) + "}", "top_k"),
    "n = 65": ('{"prompt": "x", "n": 65}', "n"),
    "truth for a number": ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
    "half a surrogate": ('{"prompt": "\\ud800"}', "prompt"),
    "half a surrogate in a schema": ('{"prompt": "x", "guided_json": {"const": "\\ud800"}}', "guided_json"),
    "half a surrogate as a name": ('{"prompt": "x", "\\ud800": 1}', None),
    "10,000 stop strings": (json.dumps({"prompt": "x", "stop": ["s"] * 10_000}), "stop"),
    "5,000 biases": (
        json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}),
        "logit_bias",
    ),
    "an empty prompt": ('{"prompt": ""}', "prompt"),
    "no ids": ('{"prompt": [[]]}', "prompt.0"),
    "65 prompts": (json.dumps({"prompt": ["x"] * 65}), "prompt"),
    "an unknown token": ('{"prompt": [999]}', "prompt"),
    "a negative token": ('{"prompt": [-1]}', "prompt.0"),
    "no prompt": ("{}", "prompt"),
    "an unknown field": ('{"prompt": "x", "promt": "y"}', "promt"),
    "a field with a line of its own": ('{"prompt": "x", "a\\nb": 1}', "a\nb"),
    "options of no stream": ('{"prompt": "x", "stream_options": {}}', "stream_options"),
    "more sequences than places": ('{"prompt": ["a","b","c","d","e"], "n": 64}', "n"),
    "longer than the context": (json.dumps({"prompt": "x" * 5000}), None),
    "more tokens than allowed": ('{"prompt": "x", "max_tokens": 4001}', "max_tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bodies_are_refused_by_name(inside: Inside, caplog: pytest.LogCaptureFixture, case: str) -> None:
    body, param = BAD[case]
    counted = inside.metric('speculon_http_requests_total{route="/v1/completions",status="400"}')
    with caplog.at_level(logging.INFO, "speculon.server"):
        response = inside.client.post("/v1/completions", content=body, headers=JSON)
        error = refusal(response, 400)
        wait_until(lambda: caplog.messages)
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param, error
    assert case != "a negative token" or "greater than or equal to 0" in error["message"]
    (line,) = caplog.messages
    assert line.startswith(response.headers["x-request-id"] + " 400 /v1/completions ") and "\n" not in line
    assert inside.metric('speculon_http_requests_total{route="/v1/completions",status="400"}') == counted + 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        pytest.param({"messages": []}, "messages", id="no messages"),
        pytest.param({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", id="unknown role"),
        pytest.param({"messages": [{"role": "user", "content": 5}]}, None, id="a number for a text"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, id="an image"
        ),
        pytest.param({"top_logprobs": 2}, "top_logprobs", id="top_logprobs alone"),
        pytest.param({"logprobs": True, "top_logprobs": 21}, "top_logprobs", id="too many logprobs"),
        pytest.param({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", id="two limits"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="a choice of no tools"),
        pytest.param(
            {"response_format": {"type": "json_schema"}}, "response_format.json_schema", id="no schema"
        ),
        pytest.param({"response_format": {"type": "yaml"}}, "response_format.type", id="unknown format"),
        pytest.param(
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs",
            id="a template of its own",
        ),
        pytest.param(
            {"chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            id="what the template is given anyway",
        ),
        pytest.param({"modalities": ["audio"]}, None, id="audio"),
    ],
)
def test_bad_chats_are_refused_by_name(inside: Inside, more: dict[str, Any], param: str | None) -> None:
    error = refusal(inside.post("chat/completions", **{**CHAT, **more}), 400)
    assert param is None or error["param"] == param, error


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"prompt": [-5] * 9000}, id="ids"),
        pytest.param({"prompt": [[-5] * 9000] * 3}, id="lists of ids"),
        pytest.param({"prompt": "x", "stop_token_ids": ["a"] * 9000}, id="stop ids"),
        pytest.param({"prompt": "x", "logit_bias": {str(i): "a" for i in range(9000)}}, id="biases"),
        pytest.param({"prompt": "x", **{f"f{i}": 1 for i in range(9000)}}, id="unknown fields"),
        pytest.param({"messages": [{"role": "user", "content": [{}] * 9000}]}, id="parts"),
        pytest.param({"messages": [{"role": "user", "tool_calls": [{}] * 9000}]}, id="calls"),
    ],
)
def test_of_many_faults_few_are_reported(fault: dict[str, Any]) -> None:
    schema = ChatRequest if "messages" in fault else CompletionRequest
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(fault)
    assert refused.value.error_count() < 10  # 900,000 of them once delayed every stream by 28 s


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_prompt_that_is_far_too_long_is_not_read_to_its_end(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    read: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **how: read.append(len(text)) or encode(self, text, **how)
    )
    text = "x" * 900_000
    body = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    error = refusal(inside.post(route, **body), 400)
    assert error["code"] == "context_length_exceeded" and "characters" in error["message"]
    assert sum(read) < 100_000
    count = inside.client.post("/tokenize", json=body).json()["count"]
    assert count >= 900_000  # who only counts them gets them counted


@pytest.mark.parametrize(
    "body", [{"prompt": "x" * 4096, "max_tokens": 1}, {"prompt": ["x", "x" * 97], "max_tokens": 4000}]
)
def test_what_exceeds_the_context_does_not_travel(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """The server refuses it by the engine's own rule, and the engine never has the prompt."""
    sent: list[Any] = []
    monkeypatch.setattr(
        "speculon.engine.async_engine.AsyncEngine._send", lambda engine, message: sent.append(message)
    )
    error = refusal(inside.post("completions", **body), 400)
    longest = max(map(len, [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]))
    too_long = f"prompt {longest} + max_tokens {body['max_tokens']} > context 4096"
    assert error["message"] == f"{too_long}: shorten the prompt, or lower max_tokens"
    assert error["code"] == "context_length_exceeded" and not sent


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [200, 900])
@pytest.mark.parametrize(
    "place", ["tools", "response_format", "chat_template_kwargs", "metadata", "message", "prediction"]
)
def test_deep_nesting_is_no_fault(inside: Inside, place: str, depth: int) -> None:
    deep = nested(depth)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    bodies: dict[str, dict[str, Any]] = {
        "tools": {"tools": [tool], "tool_choice": "required"},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
        "chat_template_kwargs": {"chat_template_kwargs": {"x": deep}},
        "metadata": {"metadata": deep},
        "message": {"messages": [{"role": "user", "content": "say:yes", "more": deep}]},
        "prediction": {"prediction": {"type": "content", "content": deep}},
    }
    response = inside.post("chat/completions", **{**CHAT, **bodies[place]})
    assert response.status_code == 200 or refusal(response, 400)


def test_prompts_of_any_characters_are_written(inside: Inside) -> None:
    text = "".join(map(chr, [*range(32), 127, 0x85, 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF]))
    assert (
        inside.post("completions", prompt="say:" + text, max_tokens=99).json()["choices"][0]["text"] == text
    )
    messages = [{"role": "user", "content": "say:" + text}]
    assert (
        inside.post("chat/completions", messages=messages).json()["choices"][0]["message"]["content"] == text
    )


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=x", "", None])
def test_other_content_types_are_refused(inside: Inside, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    error = refusal(inside.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers), 400)
    assert "content-type" in error["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_is_json(inside: Inside, content_type: str) -> None:
    response = inside.client.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": content_type}
    )
    assert response.status_code == 200


# routes, methods, names


@pytest.mark.parametrize("name", ["other", "\udfff", "x" * 5000, "a\nb"])
def test_other_models_are_not_found(inside: Inside, name: str) -> None:
    error = refusal(
        inside.client.post(
            "/v1/completions", content=json.dumps({"prompt": "x", "model": name}), headers=JSON
        ),
        404,
    )
    assert (error["code"], error["param"]) == ("model_not_found", "model") and len(error["message"]) < 200


@pytest.mark.parametrize(
    "path", ["/", "/v1/completions/", "/%0Aforged", "/../etc/passwd", "/v1/models/other"]
)
def test_unknown_routes_are_not_found(inside: Inside, caplog: pytest.LogCaptureFixture, path: str) -> None:
    counted = inside.metric("speculon_http_requests_total")
    with caplog.at_level(logging.INFO, "speculon.server"):
        refusal(inside.client.get(path), 404)
        wait_until(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0] and " 404 " in caplog.messages[0]
    assert inside.metric("speculon_http_requests_total") == counted + 2  # and the first look itself
    labels = inside.client.get("/metrics").text
    assert "forged" not in labels and "passwd" not in labels, "clients must not invent labels"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("POST", "/v1/models", "GET, HEAD")],
)
def test_other_methods_are_refused(inside: Inside, method: str, path: str, allowed: str) -> None:
    response = inside.client.request(method, path)
    refusal(response, 405)
    assert response.headers["allow"] == allowed


def test_request_ids_are_echoed_or_each_answer_has_one_of_its_own(inside: Inside) -> None:
    def answered(sent: str, path: str = "/health") -> str:
        headers = {"x-request-id": sent.encode()}
        return inside.client.get(path, headers=headers).headers["x-request-id"]

    for sent in ("abc-1.2:3_x", "x" * 64):
        assert answered(sent) == answered(sent, "/v1/nothing") == sent
    refused = ["x" * 65, "a b", "é"]
    own = {answered(sent) for sent in refused}
    assert len(own) == 3 and not own & {"", *refused}


def test_what_may_fall_is_no_counter(inside: Inside) -> None:
    assert "# TYPE speculon_saved_seconds gauge" in inside.client.get("/metrics").text


def test_web_pages_may_call_only_from_allowed_origins(inside: Inside) -> None:
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    for response in (
        inside.client.get("/health", headers=headers),
        inside.client.options("/v1/completions", headers=headers),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]
    with served(cors_origins=["https://example.com"], api_key="k") as other:
        assert other.client.options("/v1/completions", headers=headers).status_code == 200
        refused = other.client.get("/v1/models", headers={**headers, "authorization": ""})
        assert (
            refused.status_code == 401
            and refused.headers["access-control-allow-origin"] == "https://example.com"
        )
        refused = other.client.get("/v1/models", headers={**headers, "origin": "https://example.org"})
        assert "access-control-allow-origin" not in refused.headers


# the key


def test_only_the_key_opens() -> None:
    with served(api_key="secret") as inside:
        for wrong in (
            "",
            "Bearer",
            "Bearer secre",
            "Bearer secrets",
            "Basic secret",
            "secret",
            "Bearer Secret",
            "Bearer \xe9",
        ):
            response = inside.client.get("/v1/models", headers={"authorization": wrong.encode("latin-1")})
            assert refusal(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for right in ("Bearer secret", "bearer secret", "BEARER  secret"):
            assert inside.client.get("/v1/models", headers={"authorization": right}).status_code == 200
        for path in ("/health", "/ready", "/live", "/ping"):
            assert inside.client.get(path, headers={"authorization": ""}).status_code == 200
        for path in ("/metrics", "/v1/nothing", "/openapi.json", "/docs", "/version"):
            assert inside.client.get(path, headers={"authorization": ""}).status_code == 401
        assert inside.metric('speculon_http_requests_total{route="/v1/models",status="401"}') == 8


def test_a_key_may_be_any_text() -> None:
    with served(api_key="schlüssel 🔑") as inside:
        for token, status in (("schlüssel 🔑", 200), ("schlüssel", 401)):
            headers = {"authorization": ("Bearer " + token).encode()}
            assert inside.client.get("/v1/models", headers=headers).status_code == status


def test_the_key_is_never_shown() -> None:
    assert "secret" not in repr(EngineConfig(serve={"api_key": "secret"}))
