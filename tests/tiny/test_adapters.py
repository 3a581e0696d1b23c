"""Rows of a batch take the updates of their adapters, and no others: alone, together, and under drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.errors import UnknownModel, UnsupportedModel
from speculon.decoding.rounds import Drafted, Span
from speculon.decoding.sequence import Sequence
from speculon.engine.messages import Add
from speculon.engine.progress import RequestProgress
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.blocks import BlockPool, PageKey
from speculon.runtimes.torch.loading.invariant import decide, fused_blocks
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model import captured as capturing
from speculon.runtimes.torch.model.adapters import Adapted
from speculon.runtimes.torch.model.captured import Captured
from tests.builders import make_sequence
from tests.tiny.adapter_files import (
    GREEDY,
    NAMES,
    adapted,
    ask,
    differs_from_stock,
    folders,
    make_adapted,
    stock_with,
    with_adapters,
    write,
)
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.drafting import DRAFT, use_draft
from tests.tiny.kernels import Multiply, by_place, one_by_one, plant, where_invariant
from tests.tiny.scripted import Request, Result, drain, make_engine
from tests.tiny.test_captured import Noted, replayed

ARCHITECTURES = ("llama", "qwen2", "gemma3", "phi3", "qwen3_moe", "gpt_neox", "deepseek_v3")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1},
}
Texts = dict[str, list[int]]


@cache
def requests_of(mode: str) -> tuple[tuple[Request, str], ...]:
    """Nine requests under two adapters and the base in turn; prompts of three begin alike."""
    chance, common = random.Random(3), [5, 9, 14, 5, 9, 14, 5, 9, 21]
    found = []
    for i in range(9):
        prompt = common[: 9 * (i % 3 == 0)] + [chance.randrange(3, 96) for _ in range(2 + 5 * i % 17)]
        params = SamplingParams(max_tokens=12 + i, seed=50 + i, ignore_eos=True, **MODES[mode])
        found.append((Request(prompt, params, {"method": "off"}, f"q{i}"), NAMES[i % 3]))
    return tuple(found)


@cache
def alone(mode: str) -> Texts:
    """What each request's text is without company and without drafts."""
    target = adapted("llama")
    return {r.id: write(target, [(r, adapter)])[r.id].tokens for r, adapter in requests_of(mode)}


def texts_of(results: dict[str, Result]) -> Texts:
    return {name: result.tokens for name, result in results.items()}


def drafting(mode: str, method: str, k: int = 4) -> list[tuple[Request, str]]:
    way = {"method": method, "num_speculative_tokens": k}
    return [(replace(request, speculation=way), adapter) for request, adapter in requests_of(mode)]


# what a row takes


@pytest.mark.parametrize(("name", "fused"), [*((name, True) for name in ARCHITECTURES), ("phi3", False)])
def test_log_probabilities_are_those_of_a_stock_model_with_the_updates(name: str, fused: bool) -> None:
    prompts = {adapter: [7 + i, 30, 4, 61, 12][: 4 + i % 2] for i, adapter in enumerate(NAMES)}
    requests = [(Request(prompt, GREEDY, None, f"of {a}"), a) for a, prompt in prompts.items()]
    results = write(adapted(name, fused), requests)
    for adapter, prompt in prompts.items():
        stock = tiny_model(name)
        truth = stock_with(stock, folders(name)[adapter]) if adapter else stock
        assert differs_from_stock(truth, prompt, results[f"of {adapter}"]) < 1e-4, adapter
    one = results["of one"]
    assert differs_from_stock(tiny_model(name), prompts["one"], one) > 1e-2, "the update shows"


def test_rows_of_an_adapter_are_together_after_those_of_the_base() -> None:
    named = ["two", "", "one", "two", ""]
    seqs = [make_sequence([3, 4, 5][: 1 + i % 3], adapter=adapter) for i, adapter in enumerate(named)]
    drafted = [Drafted(Span.of(seq, 0, len(seq.tokens))) for seq in seqs]
    batch = Batch.pack(drafted, torch.device("cpu"))
    placed = [one for one, _ in batch.placed]
    assert [one.seq.request.adapter for one in placed] == ["", "", "one", "two", "two"]
    assert batch.adapters == (9, (("one", 4, 7), ("two", 7, 9)))
    assert {*placed} == {*drafted}
    assert [placed[rows.start] for rows in batch.scored] == drafted, "each has one scored row"
    plain = [one for one in drafted if not one.seq.request.adapter]
    assert Batch.pack(plain, torch.device("cpu")).adapters.runs == ()


# together, and under drafts


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", "together"), ("float32", "one by one")])
def test_rows_are_bitwise_equal_alone_and_in_a_batch(
    dtype: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of this machine, where they can be; and with some that multiply each row by itself."""
    if rows == "one by one":
        plant(monkeypatch, one_by_one)
    target = make_adapted("llama", dtype=dtype)
    with where_invariant() if rows == "together" else nullcontext():
        decide(target, True)
    assert target.batch_invariant
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3, seed=1)
    requests = [(replace(request, params=params), adapter) for request, adapter in requests_of("greedy")[:6]]
    together = write(target, requests)
    for request, adapter in requests:
        own = write(target, [(request, adapter)])[request.id]
        assert own.logprobs == together[request.id].logprobs, request.id  # all digits


def test_an_update_whose_rows_depend_on_their_place_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of some machines add the few outputs of an update in an order of their own."""

    def multiplied(multiply: Multiply, x: Tensor) -> Tensor:
        return by_place(multiply, x) if multiply(x[:0]).shape[1] == 3 else multiply(x)

    plant(monkeypatch, multiplied)
    target = make_adapted("llama")
    with pytest.raises(UnsupportedModel, match="a product of 3 x 48 differs by its number of rows"):
        decide(target, True)
    assert not target.batch_invariant
    assert texts_of(write(target, list(requests_of("greedy")))) == alone("greedy"), "it runs as it did"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capturing.RECORDERS, "cpu", lambda device: replayed)


def test_steps_with_rows_of_adapters_are_not_captured(recorder: None) -> None:
    target = wrap_model(tiny_model("llama"), name="llama", share=False, compile=True)
    captured = target.runner.run
    assert isinstance(captured, Captured)
    loop, noted = captured.loop, Noted(captured.loop, lambda batch: batch.adapters.runs)
    captured.loop = noted  # type: ignore[assignment]
    with_adapters(target, folders("llama"))
    assert len(noted.steps) == 2, "the trial of each adapter, which a graph would not run"
    captured.loop = loop
    assert texts_of(write(target, list(requests_of("greedy")))) == alone("greedy")
    captured.loop = noted  # type: ignore[assignment]
    noted.steps.clear()
    request, _ = requests_of("greedy")[0]
    assert write(target, [(request, "")])[request.id].tokens == alone("greedy")["q0"]
    assert not noted.steps
    write(target, [(request, "one")])
    assert len(noted.steps) == request.params.max_tokens and all(noted.steps)


# what is kept between requests


def found(adapters: tuple[str, str], planted: bool = False) -> tuple[int, bool]:
    """Prompt tokens that the second of two equal requests finds, and whether its text is right."""
    engine, prompt = make_engine(adapted("llama")), [9, 5, 61, 30, 5, 9, 61, 30, 44, 45, 46, 47, 48]
    results: dict[Any, Result] = {}
    for i, adapter in enumerate(adapters):
        ask(engine, Request(prompt, GREEDY, {"method": "off"}, f"r{i}"), adapter)
        results |= drain(engine)
    truth = write(adapted("llama"), [(Request(prompt, GREEDY, {"method": "off"}), adapters[1])])["r"]
    second = results["r1", 0]
    return second.stats.cached_tokens, second.tokens == truth.tokens


@pytest.mark.parametrize("other", ["", "two"])
def test_pages_are_found_under_their_own_adapter_alone(other: str) -> None:
    assert found(("one", "one")) == (12, True)
    assert found(("one", other)) == found((other, "one")) == (0, True)


def test_pages_without_the_adapter_in_their_key_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error."""
    stock = BlockPool._key_of

    def without(self: BlockPool, seq: Sequence, start: int, content: int) -> PageKey:
        return (*stock(self, seq, start, content)[:3], "")

    monkeypatch.setattr(BlockPool, "_key_of", without)
    assert found(("one", "")) == (12, False)


def test_pages_of_running_sequences_are_not_waited_for_under_another_adapter() -> None:
    """Two equal prompts: the second waits for the pages of the first, unless it has another adapter."""
    prompt, steps = [9, 5, 61, 30] * 4, {}
    for second in ("one", ""):
        engine = make_engine(adapted("llama"), max_batch_tokens=8)
        for name, adapter in (("a", "one"), ("b", second)):
            ask(engine, Request(prompt, GREEDY, {"method": "off"}, name), adapter)
        results = drain(engine)
        steps[second] = results["b", 0].stats.cached_tokens
    assert steps == {"one": 12, "": 0}


def test_answers_are_remembered_by_adapter() -> None:
    engine, prompt = make_engine(adapted("llama")), [5, 6, 7, 8]
    suffix = {"method": "suffix", "num_speculative_tokens": 4, "pool": "me"}
    drafted = {}
    for i, adapter in enumerate(("one", "one", "", "")):
        ask(engine, Request(prompt, GREEDY, suffix, f"r{i}"), adapter)
        result = drain(engine)[f"r{i}", 0]
        drafted[i] = result.stats.accepted
    assert drafted[1] > drafted[0] and drafted[3] > drafted[2]
    assert engine.forget_pools("me") == 2, "with the answers of the base go those of its adapters"


def test_the_policy_estimates_by_adapter() -> None:
    engine = make_engine(adapted("llama"), speculation={"policy": "goodput"}, warmup=False)
    for request, adapter in drafting("greedy", "ngram"):
        ask(engine, request, adapter)
    drain(engine)
    known: Any = engine.policy.default.state()
    assert {name.partition(", adapter ")[2] for name in known if name} == set(NAMES)


def test_what_is_written_goes_on_under_its_adapter() -> None:
    """As after the loss of a process, which the message for the rest has to know."""
    (request, adapter), truth = requests_of("seeded")[1], alone("seeded")["q1"]
    progress = RequestProgress(Add("q1", request.prompt, request.params, adapter=adapter))
    progress._begun = True
    progress.written[0] += truth[:7]
    rest = progress.rest()
    assert (rest.adapter, rest.written) == ("one", {0: truth[:7]})
    engine = make_engine(adapted("llama"))
    engine.add_request(rest.prompt, rest.params, None, "q1", rest.written, adapter=rest.adapter)
    assert truth[:7] + drain(engine)["q1", 0].tokens == truth


# drafters


@pytest.fixture
def draft() -> Iterator[None]:
    use_draft(tiny_target("llama"))
    yield


def test_a_draft_model_under_an_adapted_target(draft: None) -> None:
    """The draft model is the base itself, so the base accepts all of its drafts, and an adapter some."""
    engine = make_engine(adapted("llama"), speculation=DRAFT)
    for request, adapter in drafting("greedy", "draft_model"):
        ask(engine, request, adapter)
    results = {name: result for (name, _), result in drain(engine).items()}
    assert texts_of(results) == alone("greedy")
    totals = engine.counters.totals
    rates = {name: totals.accepted_under[name] / totals.drafted_under[name] for name in ("one", "two")}
    drafted = sum(totals.drafted_at.values()) - totals.drafted_under.total()
    rates[""] = (totals.accepted - totals.accepted_under.total()) / drafted
    assert rates[""] > 0.95 and all(0 <= rates[name] < 0.7 for name in ("one", "two")), rates
    assert drafted and totals.drafted_under.keys() == {"one", "two"}


# names


def test_an_unknown_adapter_is_refused_by_name() -> None:
    engine = make_engine(adapted("llama"))
    with pytest.raises(
        UnknownModel, match=r"adapter = 'three': this model has the adapters 'one', 'two'$"
    ) as caught:
        ask(engine, requests_of("greedy")[0][0], "three")
    assert caught.value.feature == "adapters"
    with pytest.raises(UnknownModel, match=r"adapter = 'one': this model has no adapters$"):
        ask(make_engine(tiny_target("llama")), requests_of("greedy")[0][0], "one")


def test_a_target_without_adapters_has_no_wrapped_product() -> None:
    for target, wrapped in ((tiny_target("llama"), False), (adapted("llama"), True)):
        products = [block.attention.qkv for block in fused_blocks(target.model)]
        assert products and all(isinstance(product, Adapted) == wrapped for product in products)


def test_memory_counts_the_adapters(tmp_path: Path) -> None:
    target, base = adapted("llama"), tiny_target("llama")
    own = sum(adapter.num_bytes for adapter in target.adapters.values())
    assert own > 0 and target.num_bytes == base.num_bytes + own
    assert target.needs(1, 1).bytes_fixed == base.needs(1, 1).bytes_fixed + own
