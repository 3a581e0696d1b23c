"""Adapters over HTTP: names, answers of the real engine through the official client, refusals, figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from speculon.core.config import SamplingParams
from speculon.core.errors import UnknownModel
from speculon.engine.messages import Add
from speculon.server.pool.catalogue import Catalogue
from tests.server.inside import Inside, ScriptedLoader, ThreadEngine, cut, serving
from tests.tiny.adapter_files import adapted, write
from tests.tiny.forms import engine_of, words
from tests.tiny.scripted import Request

pytestmark = pytest.mark.timeout(60)

ADAPTERS = {"one": "folder-one", "two": "folder-two"}
PROMPT = "abcabcab"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Inside]:
    """The real engine of a tiny model with two adapters, in a thread."""
    settings = {"model": "tiny", "adapters": ADAPTERS}
    with serving(Catalogue.of_one(settings), ScriptedLoader(over=engine_of(adapted("llama")))) as inside:
        yield inside


@pytest.fixture(scope="module")
def client(server: Inside) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def written(adapter: str) -> str:
    """The text of the engine itself."""
    params = SamplingParams(temperature=0, max_tokens=12)
    prompt = words().encode(PROMPT)
    request = Request(prompt, params, {"method": "off"})
    result = write(adapted("llama"), [(request, adapter)])["r"]
    return words().continuation(words().context(prompt), result.tokens)


def test_the_name_of_a_model_and_its_adapter_chooses_both(client: openai.OpenAI) -> None:
    texts = {}
    for adapter in ("", *ADAPTERS):
        name = f"tiny:{adapter}" if adapter else "tiny"
        whole = client.completions.create(model=name, **BODY)
        assert whole.model == name
        texts[adapter] = whole.choices[0].text
        chunks = list(client.completions.create(model=name, stream=True, **BODY))
        assert {chunk.model for chunk in chunks} == {name}
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == texts[adapter]
    assert len({*texts.values()}) == 3
    assert texts == {adapter: written(adapter) for adapter in texts}


def test_models_list_their_adapters(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", "tiny:one", "tiny:two"]
    assert [getattr(card, "parent", None) for card in cards] == [None, "tiny", "tiny"]
    assert [getattr(card, "default", None) for card in cards] == [True, False, False]
    assert client.models.retrieve("tiny:two") == cards[2]


@pytest.mark.parametrize("name", ["tiny:three", "tiny:", "other:one"])
def test_an_unknown_adapter_is_an_unknown_model(name: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=name, **BODY)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert f"model = {name!r}: this server serves 'tiny', 'tiny:one', 'tiny:two'" in str(caught.value)


def test_other_routes_take_the_name_and_figures_have_the_adapter(server: Inside) -> None:
    named = {"model": "tiny:one"}
    tokens = server.client.post("/tokenize", json={"prompt": "abc", **named}).json()["tokens"]
    assert server.client.post("/detokenize", json={"tokens": tokens, **named}).json()["prompt"] == "abc"
    rows = server.client.get("/v1/speculation/capabilities?model=tiny:one").json()["capabilities"]
    assert rows["adapters"]["status"] == "on" and rows["adapters"]["limits"] == {"adapters": 2}
    ngram = {"speculation": {"method": "ngram", "num_speculative_tokens": 4}}
    answer = server.post("completions", **{**BODY, **named, **ngram, "max_tokens": 40, "prompt": PROMPT * 3})
    assert answer.json()["model"] == "tiny:one"
    metric = "speculon_adapter_{}_tokens_total"
    server.eventually(lambda: server.metric(metric.format("draft") + '{adapter="one"') > 0)
    # in this order: both grow while the statistics of the end come
    accepted, drafted = (server.metric(metric.format(name)) for name in ("accepted", "draft"))
    assert drafted >= accepted


def test_a_model_that_was_loaded_again_goes_on_under_the_adapter() -> None:
    """Also the messages for the rest of a request that lost its process."""
    settings = {"model": "scripted", "adapters": ADAPTERS, "serve": {"restart_engine": True}}

    async def test() -> list[str]:
        engine = ThreadEngine(settings, step_seconds=0.01)
        await engine.start()
        params = SamplingParams(max_tokens=60, temperature=0)
        queue = await engine.submit([Add("r", [1, 2], params, adapter="two")])
        await queue.take()
        seen = [*engine.inner.adapters]
        cut(engine)
        while await queue.take():
            pass
        seen += engine.inner.adapters
        await engine.stop()
        return seen

    assert asyncio.run(test()) == ["two", "two"]


def test_two_models_have_adapters_of_their_own() -> None:
    paths, loader = {"a": "path-a", "b": "path-b"}, ScriptedLoader()
    with serving(Catalogue({"model": "path-a", "adapters": {"sql": "x"}}, paths), loader) as inside:
        pool = inside.state.pool
        pool.models["b"].config = pool.models["b"].config.model_copy(update={"adapters": {"law": "y"}})
        assert pool.served_names == ["a", "a:sql", "b", "b:law"]
        for name, adapter in (("a:sql", "sql"), ("b:law", "law"), ("b", "")):
            assert inside.post("completions", model=name, prompt="x", max_tokens=2).json()["model"] == name
            assert loader.engines[f"path-{name[0]}"].inner.adapters[-1] == adapter
        with pytest.raises(UnknownModel, match="'a', 'a:sql', 'b', 'b:law'"):
            pool.find("b:sql")
