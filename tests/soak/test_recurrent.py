"""Recurrent targets of every architecture: plain texts are those of transformers' generate, and after drafts
of every accepted length, rows are those of a full forward.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.core.config import SamplingParams
from speculon.engine.engine import Engine
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.states import StateStep
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.target import TargetOutput
from tests.tiny.recurrent import (
    RECURRENT,
    TIE,
    TWO,
    recurrent_model,
    recurrent_target,
)
from tests.tiny.requests import accepted_lengths, gap, scored_spans
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, script

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

LENGTHS = (2, 70, 9, 33, 66, 5, 18, 90)  # of prompts: some exceed chunks of 64 rows, windows and batches
TOKENS, LONGEST = 24, 6
Texts = dict[Key, list[int]]


@cache
def requests() -> tuple[Request, ...]:
    """Half of them greedy, half sampled with a seed; every prompt repeats a part of itself."""
    chance, found = random.Random(11), []
    for i, length in enumerate(LENGTHS):
        part = [chance.randrange(3, 96) for _ in range(-(-length // 3))]
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "top_k": 30, "seed": i}
        params = SamplingParams(max_tokens=TOKENS - i, ignore_eos=True, **sampling)
        found.append(Request((part * 3)[:length], params, {"method": "off"}, f"q{i}"))
    return tuple(found)


def run(engine: Engine, wanted: Iterable[Request]) -> dict[Key, Result]:
    for request in wanted:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


@cache
def plain(name: str) -> Texts:
    """Each request alone, without drafts."""
    engine, texts = make_engine(recurrent_target(name), max_num_seqs=1), {}
    for request in requests():
        texts.update({key: result.tokens for key, result in run(engine, [request]).items()})
    return texts


def drafted(name: str) -> tuple[dict[Key, Result], list[float]]:
    """All requests in one engine with few pages, where drafts are wrong at times; and the errors of rows."""
    script(plain(name))
    engine = make_engine(recurrent_target(name), max_num_seqs=8, max_batch_tokens=40, num_blocks=64)
    way = {"method": "scripted", "num_speculative_tokens": LONGEST}
    with rows_compared(engine, recurrent_model(name)) as errors:
        return run(engine, [replace(request, speculation=way) for request in requests()]), errors


def differing(name: str, results: dict[Key, Result], truth: Texts) -> list[tuple[Key, int, float]]:
    """Texts that differ where the model's choice is not tied: where, and by how many nat."""
    found = []
    for request in requests():
        key = request.id, 0
        if key in truth and results[key].tokens != truth[key]:
            pairs = zip(results[key].tokens, truth[key], strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(truth[key]))
            nat = gap(request, truth[key][:at], model=recurrent_model(name))
            found += [(key, at, nat)] if nat >= TIE else []
    return found


@contextmanager
def rows_compared(engine: Engine, model: PreTrainedModel) -> Iterator[list[float]]:
    """Adds the error of each scored row of each step to a list: over the largest logit of the same rows in a
    full forward of the stock model.
    """
    forward, errors = engine.runtime.target.forward, []

    def compared(batch: Batch, view: View) -> TargetOutput:
        out = forward(batch, view)
        for one, rows in scored_spans(batch):
            text = [*one.seq.tokens[: one.span.end], *one.draft.tokens]
            errors.append(row_error(model, text, out.logits[rows]))
        return out

    engine.runtime.target.forward = compared  # type: ignore[method-assign]
    try:
        yield errors
    finally:
        del engine.runtime.target.forward


def row_error(model: PreTrainedModel, text: list[int], ours: Tensor) -> float:
    stock = model(torch.tensor([text])).logits[0, -len(ours) :]
    return float((ours - stock).abs().max() / stock.abs().max())


@pytest.mark.parametrize("name", RECURRENT)
def test_plain_greedy_texts_are_those_of_generate(name: str) -> None:
    model, found = recurrent_model(name), {}
    for request in requests()[1::2]:
        ids = torch.tensor([request.prompt])
        limit = {"max_new_tokens": request.params.max_tokens, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limit)
        found[request.id, 0] = out[0, ids.shape[1] :].tolist()
    ours = {key: Result(tokens=tokens) for key, tokens in plain(name).items()}
    assert len(found) == 4 and not differing(name, ours, found)


@pytest.mark.parametrize("name", RECURRENT)
def test_rows_after_every_accepted_length(name: str) -> None:
    results, errors = drafted(name)
    assert not differing(name, results, plain(name))
    assert accepted_lengths(results) >= set(range(LONGEST + 1))
    assert any(result.stats.preemptions for result in results.values())
    assert len(errors) > 50 and max(errors) < 1e-4


@pytest.mark.parametrize("name", TWO)
def test_states_that_are_not_restored_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(name)  # the load would see the error, too
    monkeypatch.setattr(StateStep, "roll_back", lambda step, kept: False)
    results, errors = drafted(name)
    assert max(errors) > 1e-3 and differing(name, results, plain(name))
