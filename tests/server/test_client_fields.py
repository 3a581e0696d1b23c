"""Fields that clients always send: each has its meaning, or none, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from speculon.config import SamplingParams
from speculon.config.serve import ServeConfig
from speculon.server.catalogue import Catalogue, OfModel
from speculon.server.completions import read_chat, read_completion
from speculon.server.model import ServedModel
from speculon.server.pooled import PooledModel
from speculon.server.response_schemas import ResponseRequest
from speculon.server.responses import read_response
from speculon.server.schemas import ChatRequest, CompletionRequest
from speculon.text import Tokenizer
from tests.server.inside import Inside, ScriptedLoader, served, serving
from tests.server.scripted import Bytes

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


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, -(2**63) - 1])
def test_seeds_beyond_the_range_are_refused_with_it(inside: Inside, seed: int) -> None:
    response = inside.post("completions", prompt="x", seed=seed)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "seed"
    assert f"{seed}: " in error["message"] and f"from {-(2**63)} to {2**63 - 1}" in error["message"]


# defaults of the checkpoint


def sampled(generation: dict[str, Any], own: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    model = PooledModel("m", OfModel({"model": "m"}, own or {}), ScriptedLoader(), read_at_once)
    model._found = generation
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
