"""Routes, headers and fields under the names that clients of other servers use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config.serve import ServeConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server.completions import read_chat, read_completion
from speculon.server.model import ServedModel
from speculon.server.pool.catalogue import Catalogue
from speculon.server.schemas import ChatRequest, CompletionRequest
from tests.server.inside import Inside, ScriptedLoader, served, serving
from tests.server.scripted import Bytes
from tests.server.test_answers import check_alike, events_of
from tests.server.test_capture import read, settle

USER = [{"role": "user", "content": "say:yes"}]
MODEL = ServedModel("m", Tokenizer(Bytes()), 4096, 257, "off", ServeConfig())


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_request_tokens=200) as inside:
        yield inside


# routes


def test_routes_that_are_not_there_say_so(inside: Inside) -> None:
    for route in ("embeddings", "moderations"):
        response = inside.post(route, model="x", input="y")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"this server only generates text: it has no {route}"


def test_version_and_ping(inside: Inside) -> None:
    assert inside.client.get("/version").json() == {"version": "0"}
    assert inside.client.get("/ping").status_code == inside.client.post("/ping").status_code == 200


# the key


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"api-key": "secret"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret", "api-key": "wrong"}, 200),
        ({"authorization": "Bearer wrong", "api-key": "secret"}, 401),
        ({"authorization": "Basic wrong", "api-key": "secret"}, 200),
        ({"api-key": "wrong", "x-api-key": "secret"}, 401),
        ({"api-key": ""}, 401),
    ],
)
def test_a_key_in_its_header(keyed: Inside, headers: dict[str, str], status: int) -> None:
    response = keyed.client.get("/v1/models", headers={"authorization": "", **headers})
    assert response.status_code == status


@pytest.fixture(scope="module")
def keyed() -> Iterator[Inside]:
    with served(api_key="secret") as inside:
        yield inside


# stop strings


@pytest.mark.parametrize("stop", ["", [""], ["", "STOP"], []])
def test_empty_stop_strings_are_ignored(inside: Inside, stop: Any) -> None:
    response = inside.post("completions", prompt="say:one STOP", stop=stop)
    assert response.json()["choices"][0]["text"] == ("one " if "STOP" in stop else "one STOP")


def test_a_stop_string_is_shown_where_it_is_asked_for(inside: Inside) -> None:
    body = {"prompt": "say:one STOP two", "stop": ["STOP"], "include_stop_str_in_output": True}
    whole = inside.post("completions", **body).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("one STOP", "STOP")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    check_alike(whole, events_of(inside.post("completions", **body, **options)))


# the form of the text


def constraint_of(**fields: Any) -> tuple[str, Any] | None:
    request = read_completion(CompletionRequest.model_validate({"prompt": "x", **fields}), MODEL)
    assert request.form is not None and request.params.structured == request.form.structured
    return request.form.structured.constraint


SCHEMA = {"type": "object"}
FORMS: list[tuple[dict[str, Any], tuple[str, Any]]] = [
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, ("choice", ("a", "b"))),
    ({"guided_grammar": "start: A"}, ("grammar", "start: A")),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"structured_outputs": {"regex": "a+", "json_object": False}}, ("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, ("choice", ("a",))),
    ({"structured_outputs": {"grammar": "start: A"}}, ("grammar", "start: A")),
    ({"structured_outputs": {"json_object": True}}, ("json_object", True)),
    ({"response_format": {"type": "json_object"}}, ("json_object", True)),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, ("regex", "a+")),
]


@pytest.mark.parametrize(("fields", "constraint"), FORMS)
def test_a_form_under_its_names(fields: dict[str, Any], constraint: tuple[str, Any]) -> None:
    assert constraint_of(**fields) == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
    ],
)
def test_wrong_forms_are_refused_by_name(inside: Inside, fields: dict[str, Any], param: str) -> None:
    response = inside.post("completions", prompt="x", **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_form_beside_a_forced_call_is_refused(inside: Inside) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"messages": USER, "tools": tools, "tool_choice": "required", "guided_regex": "a"}
    response = inside.post("chat/completions", **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "guided_regex"


# token ids


def test_prompts_of_token_ids(inside: Inside) -> None:
    ids = list(b"say:yes")
    for more in ({"prompt_token_ids": ids}, {"prompt_token_ids": [ids]}):
        assert inside.post("completions", **more).json()["choices"][0]["text"] == "yes"
    for more in ({}, {"messages": []}):
        answer = inside.post("chat/completions", prompt_token_ids=ids, **more).json()
        assert answer["choices"][0]["message"]["content"] == "yes"
        assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": "x", "prompt_token_ids": [1]}, "prompt"),
        ("completions", {"prompt_token_ids": [[1, -1]]}, "prompt_token_ids.0.1"),
        ("completions", {"prompt_token_ids": [257]}, "prompt_token_ids"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": USER, "prompt_token_ids": [1]}, "messages"),
        ("chat/completions", {"messages": USER, "prediction": {"type": "content"}}, "prediction.content"),
        (
            "chat/completions",
            {"messages": USER, "prediction": {"type": "content", "token_ids": [257]}},
            "prediction",
        ),
    ],
)
def test_prompts_must_be_one(inside: Inside, route: str, body: dict[str, Any], param: str) -> None:
    response = inside.post(route, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_prediction_of_token_ids() -> None:
    body = {"prompt": "x", "prediction": {"type": "content", "token_ids": [1, 2]}}
    assert read_completion(CompletionRequest.model_validate(body), MODEL).speculation.prediction == (1, 2)


@pytest.mark.parametrize("opens", [True, False, None])
def test_the_template_opens_an_answer_or_not(monkeypatch: pytest.MonkeyPatch, opens: bool | None) -> None:
    known: list[bool] = []

    def apply(self: Bytes, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        known.append(add_generation_prompt)
        return "x"

    monkeypatch.setattr(Bytes, "apply_chat_template", apply)
    read_chat(ChatRequest.model_validate({"messages": USER, "add_generation_prompt": opens}), MODEL)
    assert known == [opens is not False]


def test_what_is_no_conversation_is_not_captured(tmp_path: Path) -> None:
    with served(capture=tmp_path / "texts") as inside:
        inside.post("chat/completions", prompt_token_ids=list(b"say:no"))
        inside.post("chat/completions", messages=USER, add_generation_prompt=False)
        inside.post("completions", prompt_token_ids=list(b"say:ids"))
        inside.post("chat/completions", messages=USER)
        inside.post("responses", input="say:yes", instructions="Be short.")
        inside.post("responses", input="say:no", store=False)
        settle(inside)
        ids, chat, response = read(tmp_path / "texts")
    assert (ids["prompt"], ids["completion"]) == ("say:ids", "ids")
    assert chat["messages"][-1]["content"] == "yes"
    roles = [(message["role"], message["content"]) for message in response["messages"]]
    assert roles == [("system", "Be short."), ("user", "say:yes"), ("assistant", "yes")]


# explained tokens


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_tokens_are_explained(inside: Inside, route: str) -> None:
    prompt: dict[str, Any] = {"prompt": "say:abcdef"} if route == "completions" else {"messages": USER}
    body = {**prompt, "n": 2, "speculation": {"explain": True}}
    whole = inside.post(route, **body).json()
    for choice in whole["choices"]:
        tokens = choice["speculation"]["tokens"]
        text = choice["text"] if route == "completions" else choice["message"]["content"]
        assert "".join(token["token"] for token in tokens) == text
        assert [token["id"] for token in tokens] == list(text.encode())
    if route == "completions":
        fates = [(token["source"], token["fate"]) for token in whole["choices"][0]["speculation"]["tokens"]]
        first, second = [(None, "plain")], [("ngram", "accepted"), (None, "bonus")]
        assert fates == [*first, *second, *first, *second]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    check_alike(whole, events_of(inside.post(route, **body, **options)))


def test_tokens_are_not_explained_unasked(inside: Inside) -> None:
    for body in ({}, {"speculation": {"stats": True}}):
        assert "speculation" not in inside.post("completions", prompt="x", **body).json()["choices"][0]


# names of models


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("{folder}/smol-1.7b/", "smol-1.7b"),
        ("{folder}/Smol.Q4_1.gguf", "Smol.Q4_1"),
        ("owner/smol", "owner/smol"),
    ],
)
def test_a_model_has_the_name_of_its_folder_or_file(tmp_path: Path, given: str, name: str) -> None:
    (tmp_path / "smol-1.7b").mkdir()
    (tmp_path / "Smol.Q4_1.gguf").touch()
    path = given.format(folder=tmp_path)
    with serving(Catalogue.of_one({"model": path}), ScriptedLoader()) as inside:
        assert [card["id"] for card in inside.client.get("/v1/models").json()["data"]] == [name]
        for known in (name, path):
            answer = inside.post("completions", model=known, prompt="say:yes")
            assert answer.status_code == 200 and answer.json()["model"] == name, answer.text
        assert inside.client.get(f"/v1/models/{name}").status_code == 200
        refused = inside.post("completions", model="smol", prompt="x")
        assert refused.status_code == 404 and repr(name) in refused.text


def test_a_served_name_and_the_path_name_a_model(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path), "serve": {"served_model_name": "mine"}}
    assert Catalogue.of_one(settings).names() == {"mine": "mine", str(tmp_path): "mine"}
    several = Catalogue({}, {"a": "/models/a", "b": "a"})
    assert several.names() == {"a": "a", "b": "b", "/models/a": "a"}, "a name comes before a path"


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_model_without_a_template_has_a_warning(caplog: pytest.LogCaptureFixture, template: str) -> None:
    with served(template) as inside:
        assert inside.post("completions", prompt="say:yes").status_code == 200
        assert inside.post("chat/completions", messages=USER).status_code == (200 if template else 400)
    warned = [line for line in caplog.messages if "chat template" in line and "served" in line]
    assert (
        warned == []
        if template
        else ["scripted has no chat template: chats are refused, completions are served"]
    )
