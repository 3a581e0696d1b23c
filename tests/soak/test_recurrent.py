"""Recurrent targets: every architecture with methods, K, batch sizes and few pages mixed by chance.

Texts, greedy and seeded, are the plain ones and those of transformers' generate. Rows are those of a full
forward.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from speculon.core.config import SamplingParams
from speculon.decoding.batch import Batch
from speculon.decoding.kv.states import StateStep
from speculon.decoding.kv.store import View
from speculon.engine.engine import Engine
from speculon.target import recurrent
from speculon.target.target import Output
from tests.tiny.conftest import tiny_model
from tests.tiny.recurrent import (
    RECURRENT,
    ROW_BY_ROW,
    TIE,
    TWO,
    recurrent_model,
    recurrent_target,
)
from tests.tiny.requests import accepted_lengths, gap
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, script

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

METHODS = ("suffix", "ngram", "draft_model", "scripted", "scripted", "off")
LENGTHS = (2, 70, 9, 33, 66, 5, 18, 90)  # of prompts: some exceed chunks of 64 rows, windows and batches
TOKENS, LONGEST = 24, 6
Texts = dict[Key, list[int]]


@dataclass(frozen=True)
class Case:
    """The settings of one engine, the largest K of its requests, and how spans continue a state."""

    sequences: int
    batch_tokens: int
    pages: int
    k: int
    by_row: int | None = None  # rows of a span that are one call each; None: as measured
    kept_bytes: int = recurrent.KEPT_BYTES


CASES = (
    Case(sequences=1, batch_tokens=512, pages=200, k=LONGEST),
    Case(sequences=3, batch_tokens=24, pages=200, k=LONGEST, by_row=2),
    Case(sequences=8, batch_tokens=40, pages=64, k=4),
    Case(sequences=8, batch_tokens=512, pages=400, k=16, kept_bytes=0),
)


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


def by_chance(case: Case, seed: int) -> list[Request]:
    """The requests in another order, with a method and K of their own."""
    chance, found = random.Random(seed), []
    for request in requests():
        way = {"method": chance.choice(METHODS), "num_speculative_tokens": chance.randint(1, case.k)}
        found.append(replace(request, speculation=way))
    chance.shuffle(found)
    return found


def engine_of(name: str, case: Case) -> Engine:
    draft = {"draft": {"draft_model": tiny_model("llama")}, "method": "off"}
    return make_engine(
        recurrent_target(name),
        max_num_seqs=case.sequences,
        max_batch_tokens=case.batch_tokens,
        num_blocks=case.pages,
        speculation=draft,
    )


def run(engine: Engine, wanted: list[Request]) -> dict[Key, Result]:
    for request in wanted:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


@cache
def plain(name: str) -> Texts:
    """Each request alone, without drafts."""
    engine, texts = engine_of(name, CASES[0]), {}
    for request in requests():
        texts.update({key: result.tokens for key, result in run(engine, [request]).items()})
    return texts


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
    forward, errors = engine.target.forward, []

    def compared(batch: Batch, view: View) -> Output:
        out, ids = forward(batch, view), batch.input_ids[0].tolist()
        for span in batch.spans:
            if span.score:
                text = [*span.seq.tokens[: span.start], *ids[span.row : span.row + span.rows]]
                errors.append(row_error(model, text, out.logits[span.score.start : span.score.stop]))
        return out

    engine.target.forward = compared  # type: ignore[method-assign]
    try:
        yield errors
    finally:
        del engine.target.forward


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


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_texts_do_not_depend_on_what_runs_beside_them(
    name: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(plain(name))
    monkeypatch.setattr(recurrent, "KEPT_BYTES", case.kept_bytes)
    for mixer in recurrent_target(name).mixers:
        if case.by_row is not None and name not in ROW_BY_ROW:
            monkeypatch.setattr(mixer, "by_row", case.by_row)
            monkeypatch.setattr(mixer, "alone", None)
    engine = engine_of(name, case)
    accepted, preempted = set(), 0
    for turn in range(2):
        results = run(engine, by_chance(case, CASES.index(case) + 10 * turn))
        assert results.keys() == plain(name).keys() and not differing(name, results, plain(name))
        engine.check_integrity()
        accepted |= accepted_lengths(results)
        preempted += sum(result.stats.preemptions for result in results.values())
    assert len(accepted) > 3 and (case.pages > 64 or preempted)


@pytest.mark.parametrize("name", RECURRENT)
def test_rows_after_every_accepted_length(name: str) -> None:
    script(plain(name))
    engine = engine_of(name, CASES[2])
    way = {"method": "scripted", "num_speculative_tokens": LONGEST}
    with rows_compared(engine, recurrent_model(name)) as errors:
        results = run(engine, [replace(request, speculation=way) for request in requests()])
    assert accepted_lengths(results) >= set(range(LONGEST + 1))
    assert len(errors) > 50 and max(errors) < 1e-4


@pytest.mark.parametrize("name", TWO)
def test_states_that_are_not_restored_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script(plain(name))
    engine = engine_of(name, CASES[2])
    monkeypatch.setattr(StateStep, "roll_back", lambda step, kept: False)
    with rows_compared(engine, recurrent_model(name)) as errors:
        results = run(engine, by_chance(CASES[2], 2))
    assert max(errors) > 1e-3 and differing(name, results, plain(name))
