"""The capability table over HTTP, the feature of a refusal, and HEAD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from speculon.core.types import capabilities_json
from tests.server.inside import Inside, served
from tests.tiny.forms import engine_of

ROUTE = "/v1/speculation/capabilities"


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    """A server over a small random model."""
    serve = {"max_request_tokens": 40}
    with served(over=engine_of(num_blocks=16, serve=serve), **serve) as made:
        yield made


def table_of(inside: Inside) -> dict[str, Any]:
    answer = inside.client.get(ROUTE).json()
    assert (answer["object"], answer["model"]) == ("speculation.capabilities", "scripted")
    found: dict[str, Any] = answer["capabilities"]
    return found


def test_the_table_is_that_of_the_engine(inside: Inside) -> None:
    table = table_of(inside)
    assert table == capabilities_json(inside.engine.capabilities())
    assert table["limits.max_request_tokens"]["limits"] == {"tokens": 40}


def error_of(inside: Inside, **body: Any) -> dict[str, Any]:
    response = inside.post("completions", **{"prompt": "an", "max_tokens": 4, **body})
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


MANY = 10_000
DENIED: dict[str, dict[str, Any]] = {
    "parameters.method": {"speculation": {"method": "none"}},
    "parameters.policy": {"speculation": {"policy": "none"}},
    "parameters.acceptance": {"speculation": {"acceptance": "typical"}},
    "parameters.num_speculative_tokens": {"speculation": {"num_speculative_tokens": 65}},
    "parameters.prediction": {"prediction": {"type": "content", "content": "a" * (2**20 + 1)}},
    "parameters.n": {"n": 65},
    "parameters.logprobs": {"logprobs": 97},
    "parameters.stop": {"stop": ["a"] * 65},
    "parameters.stop_token_ids": {"stop_token_ids": [4] * 65},
    "parameters.bad_words": {"bad_words": ["a"] * 257},
    "parameters.logit_bias": {"logit_bias": {str(i): 0 for i in range(4097)}},
    "limits.max_context": {"prompt": [4] * 129},
    "limits.pool": {"prompt": [4] * 40, "max_tokens": 30},
    "limits.vocab_size": {"prompt": [96]},
    "limits.max_request_tokens": {"max_tokens": 41},
}


@pytest.mark.parametrize("feature", DENIED)
def test_what_the_table_denies_is_refused_with_its_key(inside: Inside, feature: str) -> None:
    assert error_of(inside, **DENIED[feature])["feature"] == feature
    assert feature in table_of(inside)


@pytest.mark.parametrize("body", [{"temperature": -1}, {"n": 0}, {"unknown": 1}])
def test_other_refusals_have_openai_s_shape(inside: Inside, body: dict[str, Any]) -> None:
    assert set(error_of(inside, **body)) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("method", ["auto", "draft_model", "eagle3", "grammar", "ngram", "suffix"])
def test_a_method_that_is_off_drafts_nothing(inside: Inside, method: str) -> None:
    row = table_of(inside)[f"methods.{method}"]
    wishes = {"method": method, "stats": True}
    answer = inside.post(
        "completions", prompt="an an an an", max_tokens=6, ignore_eos=True, speculation=wishes
    )
    assert answer.status_code == 200, answer.text
    off = "no_drafter" in answer.json()["speculation"]["reasons"]
    assert row["status"] == ("off" if off else "on") and ("no drafter" in row["reason"]) == off


def test_head_is_answered_where_get_is(inside: Inside) -> None:
    paths = inside.client.get("/openapi.json").json()["paths"]
    asked_for = [path for path, found in paths.items() if "get" in found]
    assert ROUTE in asked_for and "/version" in asked_for and len(asked_for) >= 9
    for path in ["/v1/models/scripted", "/v1/models/other", "/v1/nothing", "/docs", *asked_for]:
        got, head = inside.client.get(path), inside.client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert not [path for path, found in paths.items() if "head" in found]


def test_head_is_refused_where_there_is_no_get(inside: Inside) -> None:
    response = inside.client.head("/v1/completions")
    assert (response.status_code, response.headers["allow"], response.content) == (405, "POST", b"")


def test_the_table_needs_the_key() -> None:
    with served(api_key="secret") as inside:
        assert inside.client.get(ROUTE).json()["capabilities"].keys() == {
            "limits.max_context",
            "methods.ngram",
        }
        for method in ("GET", "HEAD"):
            refused = inside.client.request(method, ROUTE, headers={"authorization": ""})
            assert refused.status_code == 401


def test_a_prompt_of_ids_is_refused_under_the_client_s_name(inside: Inside) -> None:
    ids = inside.post("completions", prompt_token_ids=[96], max_tokens=1).json()["error"]
    assert (ids["param"], ids["feature"]) == ("prompt_token_ids", "limits.vocab_size")
