"""Fields that clients always send: each has its meaning, or none, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from speculon.core.config import SamplingParams
from speculon.core.config.models import OTHERS, ModelSettings, Setting
from speculon.core.config.serve import ServeConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server.completions import read_chat, read_completion
from speculon.server.model import ServedModel
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.pooled import PooledModel
from speculon.server.request import thinks
from speculon.server.responses import ResponseRequest, as_chat, read_response
from speculon.server.schemas import ChatRequest, CompletionRequest
from tests.server.inside import Inside, ScriptedLoader, served, serving
from tests.server.scripted import Bytes
from tests.server.test_answers import events_of

USER = [{"role": "user", "content": "say:yes"}]
MODEL = ServedModel("m", Tokenizer(Bytes()), 4096, 257, "off", ServeConfig())


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served() as inside:
        yield inside


# seeds


@pytest.mark.parametrize("seed", [-1, -1.0, None])
def test_a_seed_of_minus_one_is_no_seed(seed: Any) -> None:
    bodies = (
        read_completion(CompletionRequest.model_validate({"prompt": "x", "seed": seed}), MODEL),
        read_chat(ChatRequest.model_validate({"messages": USER, "seed": seed}), MODEL),
        read_response(ResponseRequest.model_validate({"input": "x", "seed": seed}), MODEL),
    )
    assert [request.params.seed for request in bodies] == [None] * 3


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_seeds_beyond_the_range_are_refused_with_it(inside: Inside, seed: int) -> None:
    response = inside.post("completions", prompt="x", seed=seed)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "seed"
    assert f"{seed}: " in error["message"] and f"from {-(2**63)} to {2**63 - 1}" in error["message"]


# defaults of the checkpoint


def sampled(generation: dict[str, Any], own: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    settings = [Setting(field, value, OTHERS) for field, value in (own or {}).items()]
    settings_of_model = ModelSettings("m", {"model": "m"}, settings)
    model = PooledModel("m", settings_of_model, ScriptedLoader(), read_at_once)
    model._checkpoint_sampling = generation
    served = model._with_defaults(MODEL)
    return read_chat(ChatRequest.model_validate({"messages": USER, **fields}), served).params


async def read_at_once(work: Any) -> Any:
    return work()


def test_requests_have_the_checkpoints_defaults() -> None:
    found = {"top_k": 1, "temperature": 0.6, "max_tokens": 7}
    assert sampled(found) == SamplingParams(top_k=1, temperature=0.6, max_tokens=7)
    own = {"temperature": 0.2, "max_tokens": 9}
    assert sampled(found, own) == SamplingParams(top_k=1, temperature=0.2, max_tokens=9)
    fields = {"temperature": 1.0, "top_k": 0, "max_tokens": 99}
    assert sampled(found, own, **fields) == SamplingParams(**fields)


def test_the_checkpoints_length_is_a_default_and_no_limit() -> None:
    with serving(
        Catalogue.of_one({"model": "scripted"}), ScriptedLoader(generation={"max_tokens": 20})
    ) as it:
        chat = it.post("chat/completions", messages=[{"role": "user", "content": "x"}]).json()
        assert chat["usage"]["completion_tokens"] == 20
        assert it.post("completions", prompt="x").json()["usage"]["completion_tokens"] == 16, "as OpenAI"
        longer = it.post("completions", prompt="x", max_tokens=40).json()
        assert longer["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("own", [{}, {"max_tokens": 7}], ids=["the checkpoint's", "its settings'"])
def test_a_default_length_gives_way_to_a_longer_minimum(own: dict[str, Any]) -> None:
    params = sampled({"max_tokens": 7}, own, min_tokens=30)
    assert (params.min_tokens, params.max_tokens) == (30, 30)
    assert sampled({"max_tokens": 7}, own, min_tokens=3).max_tokens == 7
    completion = read_completion(CompletionRequest(prompt="x", min_tokens=30), MODEL).params
    assert (completion.min_tokens, completion.max_tokens) == (30, 30), "16 is a default, too"


def test_limits_do_not_give_way_to_a_minimum() -> None:
    with served(max_request_tokens=20) as inside:
        for fields in ({"min_tokens": 21}, {"min_tokens": 8, "max_tokens": 7}, {"min_tokens": 5000}):
            error = inside.post("completions", prompt="x", **fields).json()["error"]
            assert error["param"] == "min_tokens" and "must be at most max_tokens" in error["message"]


# fields of clients and other servers

CACHED = {"cache_control": {"type": "ephemeral"}}
PARTS = [{"type": "input_text", "text": "say:", **CACHED}, {"type": "text", "text": "yes"}]
TOOL = {"type": "function", "function": {"name": "now", **CACHED}, **CACHED}
NEUTRAL: list[dict[str, Any]] = [
    {"best_of": 1},
    {"best_of": 2, "n": 2},
    {"cache_prompt": False},
    {"num_ctx": 4096},
    {"truncate_prompt_tokens": None},
    {"documents": None},
    {"repeat_penalty": 1.1, "repetition_penalty": 1.1},
    {"max_completion_tokens": 9, "max_tokens": 9},
    {"think": False},
    {"enable_thinking": True, "think": "high"},
    {"echo": False},
    {"add_special_tokens": False},
    CACHED,
    # Ollama, LM Studio, vLLM
    {"keep_alive": "5m", "options": {}},
    {"keep_alive": -1, "options": {"num_ctx": 4096, "num_gpu": 99, "use_mmap": True}},
    {"ttl": 300},
    {"request_id": "r-1", "detokenize": True, "priority": 0},
    {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "vllm_xargs": {}},
    {"spaces_between_special_tokens": True, "return_token_ids": False, "include_reasoning": True},
    # llama.cpp
    {"id_slot": -1, "n_keep": 0, "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "grammar": ""},
    {"timings_per_token": False, "return_progress": False, "reasoning_format": "auto", "lora": []},
    # OpenRouter, Groq, Anthropic, Mistral
    {"reasoning": {"effort": "high", "exclude": False, "summary": "auto"}, "reasoning_format": "parsed"},
    {"reasoning": {"max_tokens": 512}, "usage": {"include": True}},
    {"transforms": [], "models": [], "provider": {}, "plugins": [], "top_a": 0},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "disabled"}, "reasoning": {"effort": "none"}, "think": False},
    {"thinking": {"type": "adaptive"}, "safe_prompt": False},
    {"thinking": True, "reasoning": {"enabled": True}},
]
OF_CHATS: list[dict[str, Any]] = [
    {"documents": []},
    {"logprobs": False, "top_logprobs": 0},
    {"messages": [{"role": "user", "content": PARTS, **CACHED}]},
    {"messages": [*USER, {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}, *USER]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"messages": [*USER, {"role": "assistant", "content": "x", "reasoning_details": []}, *USER]},
    {"continue_final_message": False},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_neutral_fields_and_hints_are_accepted(inside: Inside, fields: dict[str, Any]) -> None:
    whole = inside.post("completions", prompt="say:yes", **fields)
    assert whole.status_code == 200 and whole.json()["choices"][0]["text"] == "yes", whole.text
    check_chat(inside, {"messages": USER, **fields})


@pytest.mark.parametrize("fields", OF_CHATS, ids=str)
def test_neutral_fields_of_chats_are_accepted(inside: Inside, fields: dict[str, Any]) -> None:
    check_chat(inside, {"messages": USER, **fields})


def check_chat(inside: Inside, body: dict[str, Any]) -> None:
    answer = inside.post("chat/completions", **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"best_of": 3}),
        ("completions", {"best_of": 1, "n": 2}),
        ("completions", {"truncate_prompt_tokens": 100}),
        ("completions", {"documents": [{"text": "x"}]}),
        ("completions", {"repeat_penalty": 1.1, "repetition_penalty": 1.2}),
        ("completions", {"max_completion_tokens": 3, "max_tokens": 4}),
        ("chat/completions", {"echo": True}),
        ("chat/completions", {"top_logprobs": 2, "logprobs": False}),
        ("chat/completions", {"enable_thinking": True, "think": False}),
        ("chat/completions", {"think": "hard"}),
        ("completions", {"options": {"temperature": 0.2}}),
        ("completions", {"options": {"stop": ["x"]}}),
        ("completions", {"detokenize": False}),
        ("completions", {"mirostat": 2}),
        ("completions", {"typical_p": 0.5}),
        ("completions", {"top_a": 0.1}),
        ("completions", {"grammar": "root ::= x"}),
        ("completions", {"priority": 3}),
        ("completions", {"cache_salt": "x"}),
        ("chat/completions", {"include_reasoning": False}),
        ("chat/completions", {"reasoning": {"exclude": True}}),
        ("chat/completions", {"reasoning_format": "none"}),
        ("chat/completions", {"transforms": ["middle-out"]}),
        ("chat/completions", {"plugins": [{"id": "web"}]}),
        ("chat/completions", {"thinking": {"type": "enabled"}, "think": False}),
        ("chat/completions", {"reasoning": {"effort": "none"}, "enable_thinking": True}),
        ("chat/completions", {"reasoning_effort": "none", "think": True}),
        ("chat/completions", {"continue_final_message": "more"}),
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused(inside: Inside, route: str, fields: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if route == "completions" else {"messages": USER}
    response = inside.post(route, **prompt, **fields)
    param = response.json()["error"]["param"]
    named = {param, param.partition(".")[0]} & {*fields, "repetition_penalty", "max_tokens"}
    assert response.status_code == 400 and named, response.text


def test_other_names_have_the_same_meaning() -> None:
    fields = {"repeat_penalty": 1.3, "max_completion_tokens": 5}
    params = read_completion(CompletionRequest.model_validate({"prompt": "x", **fields}), MODEL).params
    assert (params.repetition_penalty, params.max_tokens) == (1.3, 5)


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"think": True}, {"enable_thinking": True}),
        ({"think": "low"}, {"enable_thinking": True}),
        ({"thinking": True}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "high"}}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {}),
        (
            {"think": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "x": 1},
        ),
    ],
    ids=str,
)
def test_thinking_is_a_variable_of_the_template(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    known: list[dict[str, Any]] = []

    def apply(
        self: Bytes, messages: Any, *, tools: Any, tokenize: bool, add_generation_prompt: bool, **more: Any
    ) -> str:
        known.append(more)
        return "x"

    monkeypatch.setattr(Bytes, "apply_chat_template", apply)
    read_chat(ChatRequest.model_validate({"messages": USER, **fields}), MODEL)
    assert known == [variables]


@pytest.mark.parametrize(("effort", "switched"), [("none", False), ("low", None), (None, None)])
def test_responses_switch_the_thinking_off_by_its_effort(effort: str | None, switched: bool | None) -> None:
    assert thinks(as_chat(ResponseRequest(input="x", reasoning={"effort": effort}))) is switched


def test_a_chat_of_minus_one_tokens_has_no_limit_of_its_own() -> None:
    assert sampled({"max_tokens": 7}, max_tokens=-1).max_tokens == 7
    assert sampled({}, max_tokens=-1) == sampled({}) != sampled({}, max_tokens=1)
    for field in ({"max_tokens": -2}, {"max_completion_tokens": -1}):
        with pytest.raises(ValidationError, match="greater than or equal to 0"):
            sampled({}, **field)


def chosen(kind: str) -> dict[str, Any]:
    few = {"mode": "auto", "tools": [{"type": kind, "function": {"name": "f"}}]}
    return {"messages": USER, "tool_choice": {"type": "allowed_tools", "allowed_tools": few}}


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (chosen("function"), True),
        (chosen("web_search"), True),
        (called('{"a": 1}'), True),
        (called({"a": 1}), True),
        (called(None), True),
        (called(7), True),
        ({"messages": USER, "max_tokens": -1}, True),
        ({"messages": USER, "max_tokens": -2}, False),
        ({"messages": USER, "think": "high"}, True),
        ({"messages": USER, "think": "much"}, False),
    ],
)
def test_the_published_schema_allows_what_is_taken(body: dict[str, Any], taken: bool) -> None:
    described = jsonschema.Draft202012Validator(ChatRequest.model_json_schema())
    assert described.is_valid(body) is taken
    if taken:
        ChatRequest.model_validate(body)
    else:
        with pytest.raises(ValidationError):
            ChatRequest.model_validate(body)


@pytest.mark.parametrize("added", [True, False, None])
def test_special_tokens_are_added_or_not(monkeypatch: pytest.MonkeyPatch, added: bool | None) -> None:
    known: list[bool] = []

    def encode(self: ServedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
        known.append(add_special_tokens)
        return [1]

    monkeypatch.setattr(ServedModel, "encode", encode)
    read_completion(CompletionRequest.model_validate({"prompt": "x", "add_special_tokens": added}), MODEL)
    read_chat(ChatRequest.model_validate({"messages": USER, "add_special_tokens": added}), MODEL)
    assert known == [added is not False, added is True]


def test_hints_are_no_part_of_a_tool() -> None:
    body = ChatRequest.model_validate({"messages": USER, "tools": [TOOL]})
    assert body.tools and body.tools[0].model_dump(exclude_none=True) == {
        "type": "function",
        "function": {"name": "now"},
    }


# usage in streams


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("running", [True, False])
def test_usage_of_the_chunks_of_a_stream(inside: Inside, route: str, running: bool) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if route == "completions" else {"messages": USER}
    options = {"include_usage": True, "continuous_usage_stats": running}
    body = {**prompt, "max_tokens": 10, "stream": True}
    *chunks, last = events_of(inside.post(route, **body, stream_options=options))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    usages = [chunk["usage"] for chunk in chunks]
    if not running:
        assert set(usages) == {None}
        return
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
    assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
    (*_, last) = events_of(inside.post(route, **body, usage={"include": True}))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0, "as OpenRouter names it"
    only_running = {"continuous_usage_stats": True}
    assert all(
        "usage" not in one for one in events_of(inside.post(route, **body, stream_options=only_running))
    )


@pytest.mark.parametrize(
    "fields",
    [{"keep_alive": 0, "ttl": 60, "request_id": "x", "options": {}}, {"detokenize": True, "provider": {}}],
    ids=str,
)
def test_responses_take_the_same_hints(inside: Inside, fields: dict[str, Any]) -> None:
    assert inside.post("responses", input="say:yes", **fields).status_code == 200
    assert inside.post("responses", input="x", **{**fields, "detokenize": False}).status_code == 400
