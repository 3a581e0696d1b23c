"""Speculation changes no token: any method, any K, alone or batched, chunked, preempted, from the prefix
cache.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.core.config import SamplingParams
from speculon.decoding.batch import Batch
from speculon.decoding.kv.store import View
from speculon.decoding.sampling import Row, row_key, sample, uniform
from speculon.decoding.sequence import Rules
from speculon.engine.engine import Engine
from speculon.target.target import Output
from tests.builders import make_sequence, spread
from tests.tiny.conftest import TINY, tiny_model, tiny_target
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, script, store_of

TIE = 1e-4  # nat
DRAFTS = (1, 4, 16)
OFF = {"method": "off"}
GREEDY: dict[str, Any] = {"temperature": 0.0}
FILTERED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
PENALISED: dict[str, Any] = {
    "temperature": 0.8,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}
MODES = {"greedy": [GREEDY, GREEDY], "sampled": [FILTERED, PENALISED]}
Texts = dict[Key, list[int]]


@cache
def requests_of(mode: str, shared: int = 0) -> tuple[Request, ...]:
    """Eight requests of different lengths, the first `shared` prompt tokens alike."""
    chance = random.Random(5)
    common = [chance.randrange(3, 96) for _ in range(shared)]
    requests = []
    for i, length in enumerate((5, 31, 1, 17, 8, 24, 40, 12)):
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        params = SamplingParams(
            max_tokens=44 - 2 * i, seed=100 + i // 2, ignore_eos=True, **MODES[mode][i % 2]
        )
        requests.append(Request(prompt, params, OFF, f"q{i}"))
    return tuple(requests)


@cache
def plain(mode: str, shared: int = 0) -> Texts:
    """What the engine writes for each of the requests alone and without speculation."""
    texts = {}
    for request in requests_of(mode, shared):
        texts |= {key: result.tokens for key, result in run(tiny_target("llama"), [request]).items()}
    return texts


def gap(
    request: Request,
    output: list[int],
    number: int = 0,
    name: str = "llama",
    model: PreTrainedModel | None = None,
) -> float:
    """How far the stock model's best next token is ahead of the second, noise included; nat. The stock model
    is that of the name unless given.
    """
    seq = make_sequence(
        request.prompt, output=output, params=request.params, sample=number, seed=request.params.seed or 0
    )
    rules = Rules.of(request.params)
    with torch.inference_mode():
        logits = (model or tiny_model(name))(torch.tensor([seq.tokens])).logits[0, -1:].log_softmax(-1)
    if request.params.greedy:
        best = logits[0].topk(2).values
        return float(best[0] - best[1])
    scores = []

    def draw(shaped: Tensor, rows: list[Row]) -> Tensor:
        low, high = torch.tensor(row_key(seq.request.seed, number, seq.num_output), dtype=torch.int32)
        v = uniform(low, high, torch.arange(shaped.shape[1], dtype=torch.int32))
        scores.append(shaped[0] - torch.log(-torch.log1p(-v)))
        return shaped.argmax(-1)

    sample(logits, [Row(seq, rules)], draw)
    best = scores[0].topk(2).values
    return float(best[0] - best[1])


def differences(
    requests: tuple[Request, ...], ours: dict[Key, Result], truth: Texts
) -> list[tuple[Key, int, float]]:
    """Every text that is not the true one: where it first differs, and how close the target's choice was
    there.
    """
    found = []
    for request in requests:
        for key in (key for key in truth if key[0] == request.id):
            ours_, true = ours[key].tokens, truth[key]
            if ours_ != true:
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours_, true, strict=False)) if a != b),
                    min(len(ours_), len(true)),
                )
                found.append((key, at, gap(request, true[:at], key[1])))
    return found


def assert_same(requests: tuple[Request, ...], ours: dict[Key, Result], truth: Texts) -> None:
    assert ours.keys() == truth.keys()
    wrong = [(key, at, nat) for key, at, nat in differences(requests, ours, truth) if nat >= TIE]
    assert not wrong, wrong


def accepted_lengths(results: dict[Key, Result]) -> set[int]:
    """How many drafts were accepted in some round."""
    at: Counter[int] = Counter()
    rounds = 0
    for result in results.values():
        at.update(result.stats.accepted_at)
        rounds += result.stats.rounds
    longest = max(at, default=-1) + 1
    counts = [rounds, *(at[i] for i in range(longest)), 0]
    return {i for i in range(longest + 1) if counts[i] > counts[i + 1]}


def drafting(requests: tuple[Request, ...], k: int) -> list[Request]:
    return [replace(r, speculation={"method": "scripted", "num_speculative_tokens": k}) for r in requests]


def mixed(requests: tuple[Request, ...], k: int) -> list[Request]:
    """A different method and K for each, half of them the scripted one."""
    methods = ["scripted", "ngram", "scripted", "off", "scripted", "synthetic", "scripted", "scripted"]
    ks = [k, 4, 3, 0, 40, 5, k, 1]
    speculations = [{"method": m, "num_speculative_tokens": n} for m, n in zip(methods, ks, strict=True)]
    return [replace(r, speculation=s) for r, s in zip(requests, speculations, strict=True)]


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_batch_tokens": 7},
    "few pages": {"num_blocks": 40},
    "no prefix cache": {"prefix_cache": False, "max_num_seqs": 3},
}
CHOSEN = spread(MODES, SETTINGS, DRAFTS)


@pytest.mark.parametrize("k", DRAFTS)
@pytest.mark.parametrize("mode", MODES)
def test_alone_every_accepted_length_gives_the_plain_output(mode: str, k: int) -> None:
    truth = plain(mode)
    script(truth)
    results: dict[Key, Result] = {}
    for request in drafting(requests_of(mode), k):
        results |= run(tiny_target("llama"), [request])
    assert_same(requests_of(mode), results, truth)
    assert accepted_lengths(results) >= set(range(k + 1))


def check_lengths(mode: str, setting: str, k: int) -> None:
    truth = plain(mode)
    script(truth)
    results = run(tiny_target("llama"), drafting(requests_of(mode), k), **SETTINGS[setting])
    assert_same(requests_of(mode), results, truth)
    scarce = setting == "few pages"  # where K shrinks, too
    assert accepted_lengths(results) >= set(range((min(k, 4) if scarce else k) + 1))
    assert (sum(r.stats.preemptions for r in results.values()) > 0) == scarce


@pytest.mark.parametrize(("mode", "setting", "k"), CHOSEN)
def test_in_a_batch_every_accepted_length_gives_the_plain_output(mode: str, setting: str, k: int) -> None:
    check_lengths(mode, setting, k)


def check_methods(mode: str, setting: str, k: int) -> None:
    truth = plain(mode)
    script(truth)
    results = run(tiny_target("llama"), mixed(requests_of(mode), k), **SETTINGS[setting])
    assert_same(requests_of(mode), results, truth)
    assert {source for r in results.values() for source in r.stats.drafted_from} >= {"scripted", "ngram"}


@pytest.mark.parametrize(("mode", "setting", "k"), CHOSEN)
def test_a_batch_of_different_methods_and_lengths_gives_the_plain_output(
    mode: str, setting: str, k: int
) -> None:
    check_methods(mode, setting, k)


@pytest.mark.parametrize("mode", MODES)
def test_pages_found_again_give_the_plain_output(mode: str) -> None:
    truth = plain(mode, shared=14)
    script(truth)
    engine = make_engine(tiny_target("llama"))
    for k in DRAFTS:
        for request in mixed(requests_of(mode, shared=14), k):
            engine.add_request(request.prompt, request.params, request.speculation, request.id)
        results = drain(engine)
        assert_same(requests_of(mode, shared=14), results, truth)
        cached = {key: result.stats.cached_tokens for key, result in results.items()}
        for request in requests_of(mode, shared=14):
            whole = (len(request.prompt) - 1) // 4 * 4
            assert cached[request.id, 0] == whole if k > 1 else cached[request.id, 0] in (0, 12), cached


@pytest.mark.parametrize("mode", MODES)
def test_same_seed_same_output_for_all_samples(mode: str) -> None:
    """Off, ngram, synthetic (twice, so that it knows the text) and scripted; alone and in a batch."""
    target = tiny_target("llama")
    (request,) = (replace(r, params=r.params.model_copy(update={"n": 4})) for r in requests_of(mode)[3:4])
    truth = {key: result.tokens for key, result in run(target, [request]).items()}
    assert len(truth) == 4 and (len({tuple(t) for t in truth.values()}) == 1) == (mode == "greedy")
    script(truth)
    others = requests_of(mode)[:2] + requests_of(mode)[5:7]
    for method in ("off", "ngram", "synthetic", "synthetic", "scripted"):
        drafted = replace(request, speculation={"method": method})
        assert_same((request,), run(target, [drafted]), truth)
        results = run(target, [*others[:2], drafted, *others[2:]])
        assert_same((request,), {key: r for key, r in results.items() if key[0] == request.id}, truth)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "gpt2"])
def test_greedy_plain_output_is_that_of_generate(name: str) -> None:
    for request in requests_of("greedy")[:4]:
        ids = torch.tensor([request.prompt])
        limit = {
            "max_new_tokens": request.params.max_tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
            "do_sample": False,
        }
        stock = (
            tiny_model(name)
            .generate(ids, attention_mask=torch.ones_like(ids), **limit)[0, ids.shape[1] :]
            .tolist()
        )
        ours = run(tiny_target(name), [request])[request.id, 0].tokens
        at = next((i for i, (a, b) in enumerate(zip(ours, stock, strict=True)) if a != b), None)
        assert at is None or gap(request, stock[:at], name=name) < TIE


# the logits of verify rows


def row_error(
    name: str, engine: Engine, requests: list[Request], model: PreTrainedModel | None = None
) -> float:
    """The largest difference of any scored row of any step from the stock model's forward over the same
    tokens. The stock model is that of the name unless given.
    """
    forward, worst, whole = engine.target.forward, 0.0, model or tiny_model(name)

    def checked(batch: Batch, view: View) -> Output:
        nonlocal worst
        out, ids = forward(batch, view), batch.input_ids[0].tolist()
        for span in batch.spans:
            if span.score:
                text = [*span.seq.tokens[: span.start], *ids[span.row : span.row + span.rows]]
                stock = whole(torch.tensor([text])).logits[0, -len(span.score) :]
                worst = max(
                    worst, float((out.logits[span.score.start : span.score.stop].cpu() - stock).abs().max())
                )
        return out

    try:
        engine.target.forward = checked  # type: ignore[method-assign]
        for request in requests:
            engine.add_request(request.prompt, request.params, request.speculation, request.id)
        results = drain(engine)
    finally:
        del engine.target.forward
    if worst < TIE:
        assert accepted_lengths(results) >= set(range(5)), name
    return worst


def short_requests(name: str) -> list[Request]:
    """Four texts with K = 4 whose truth is known."""
    requests = [
        replace(r, params=r.params.model_copy(update={"max_tokens": 28})) for r in requests_of("greedy")[:4]
    ]
    results = run(tiny_target(name), requests)
    script({key: result.tokens for key, result in results.items()})
    return drafting(tuple(requests), 4)


@pytest.mark.parametrize("name", TINY)
def test_logits_of_verify_rows_are_the_stock_models(name: str) -> None:
    requests = short_requests(name)
    assert row_error(name, make_engine(tiny_target(name), max_batch_tokens=24), requests) < 1e-4


# planted errors


def spoil_page(engine: Engine, step: int) -> None:
    """One committed page loses its keys."""
    if step == 6:
        seq = engine.scheduler.running[0]
        store = store_of(engine)
        store.k[0][seq.table[0] * store.block_size :][: store.block_size] = 0


def exchange_pages(engine: Engine, step: int) -> None:
    """Two sequences read each other's first page."""
    if step == 6:
        a, b = (seq.table for seq in engine.scheduler.running[:2])
        a[0], b[0] = b[0], a[0]


def keep_rejected(engine: Engine, step: int) -> None:
    """One rejected draft is committed: the last token of its sequence is one slot too far."""
    if step == 6:
        seq = engine.scheduler.running[0]
        seq.tokens.insert(seq.committed, 7)
        seq.committed += 1


@pytest.mark.parametrize("plant", [spoil_page, exchange_pages, keep_rejected])
def test_a_planted_error_in_the_pages_is_seen(plant: Any) -> None:
    truth = plain("greedy")
    script(truth)
    engine = make_engine(tiny_target("llama"))
    for request in drafting(requests_of("greedy"), 4):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results: dict[Key, Result] = {}
    for step in range(500):
        plant(engine, step)
        for event in engine.step():
            results.setdefault((event.request_id, event.sample), Result()).take(event)
    assert any(nat >= TIE for _, _, nat in differences(requests_of("greedy"), results, truth))


def test_drafts_one_position_too_far_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Batch.pack

    def shifted(spans: Any, device: Any) -> Batch:
        batch = pack(spans, device)
        late = torch.cat([torch.arange(s.rows) >= s.length for s in spans]).long()
        return replace(batch, position_ids=batch.position_ids + late)

    requests = short_requests("llama")
    monkeypatch.setattr(Batch, "pack", shifted)
    assert row_error("llama", make_engine(tiny_target("llama")), requests) > 1e-2


def test_a_foreign_seed_is_seen() -> None:
    truth = plain("sampled")
    others = [replace(r, params=r.params.model_copy(update={"seed": 1})) for r in requests_of("sampled")]
    results = run(tiny_target("llama"), others)
    assert len(
        [nat for _, _, nat in differences(requests_of("sampled"), results, truth) if nat >= TIE]
    ) == len(others)
