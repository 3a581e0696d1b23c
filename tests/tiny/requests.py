"""Eight requests, what is plainly written for them, and how a text may differ from that."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.core.config import SamplingParams
from speculon.decoding.rounds import Drafted
from speculon.decoding.sampling import ScoredRow, row_key, sample, uniform
from speculon.decoding.sequence import Rules
from speculon.engine.engine import Engine
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.target import TargetOutput
from tests.builders import make_sequence
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.scripted import Key, Request, Result, drain, run, script

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

    def draw(shaped: Tensor, rows: list[ScoredRow]) -> Tensor:
        low, high = torch.tensor(row_key(seq.request.seed, number, seq.num_output), dtype=torch.int32)
        v = uniform(low, high, torch.arange(shaped.shape[1], dtype=torch.int32))
        scores.append(shaped[0] - torch.log(-torch.log1p(-v)))
        return shaped.argmax(-1)

    sample(logits, [ScoredRow(seq, rules)], draw)
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


def scored_spans(batch: Batch) -> Iterator[tuple[Drafted, list[int]]]:
    """The spans with scored rows, and which of the scored rows are theirs; of a batch without adapters."""
    for place, rows in zip(batch.placed, batch.scored, strict=True):
        if rows:
            yield place.drafted, [*rows]


def row_error(
    name: str, engine: Engine, requests: list[Request], model: PreTrainedModel | None = None
) -> float:
    """The largest difference of any scored row of any step from the stock model's forward over the same
    tokens. The stock model is that of the name unless given.
    """
    forward, worst, whole = engine.runtime.target.forward, 0.0, model or tiny_model(name)

    def checked(batch: Batch, view: View) -> TargetOutput:
        nonlocal worst
        out = forward(batch, view)
        for one, rows in scored_spans(batch):
            text = [*one.seq.tokens[: one.span.end], *one.draft.tokens]
            stock = whole(torch.tensor([text])).logits[0, -len(rows) :]
            worst = max(worst, float((out.logits[rows].cpu() - stock).abs().max()))
        return out

    try:
        engine.runtime.target.forward = checked  # type: ignore[method-assign]
        for request in requests:
            engine.add_request(request.prompt, request.params, request.speculation, request.id)
        results = drain(engine)
    finally:
        del engine.runtime.target.forward
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
