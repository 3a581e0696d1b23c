"""Warm-up before the first request: up to two seconds of rounds, to warm kernels and measure costs.

Only what steps and proposals cost is kept of it: no output, no count, no page, no acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING

from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import InvalidRequest
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.prediction import NAME as PREDICTION

if TYPE_CHECKING:
    from speculon.engine.engine import Engine

SECONDS = 2.0  # guess: what matters most comes first
BATCHES = (1, 8, 4)  # sequences at once
DRAFTS = (4, 1)
SHORT, LONG = 4, 48  # tokens of a prompt for steps, and for proposals, which read it
ROUNDS = 6  # that a sequence takes at least
FORCED = 100.0  # logit bias beyond which no other token is written
NAME = "warm-up"  # of its requests


def warm_up(engine: Engine) -> None:
    """Asks each method for drafts, in batches of several sizes, for `SECONDS` and a round at most."""
    end = perf_counter() + SECONDS
    try:
        for batch in batches(engine):
            run(engine, batch, end)
            if perf_counter() >= end:
                break
    except InvalidRequest:
        pass  # the model is too small for these prompts: its first requests give the costs
    finally:
        engine.policy.keep_costs_alone()


def run(engine: Engine, batch: list[Sequence], end: float) -> None:
    """Rounds of these sequences, none of them counted, until all have ended or the time is over."""
    for seq in batch:
        engine.scheduler.add([seq])
    try:
        while engine.has_work and perf_counter() < end:
            spans = engine.scheduler.plan()
            engine.scheduler.free_ended(engine.round(spans, counted=False))
    finally:
        engine.scheduler.abort(NAME)
        for seq in batch:
            engine.proposers.release(seq)
            engine.policy.forget(seq)


def batches(engine: Engine) -> Iterator[list[Sequence]]:
    """What is tried, and in which order: of each batch size the target's steps, then models' proposals.

    Lookups are not asked: their price is next to nothing, and their first calls tell it.
    """
    methods = engine.proposers.methods_of((), engine.proposers.default)
    lookups = engine.proposers.lookups(methods)
    models = [method for method in methods if method not in lookups]
    for size in dict.fromkeys(min(size, engine.config.max_num_seqs) for size in BATCHES):
        yield steps(engine, size)
        for k, method in product(DRAFTS, models):
            yield proposals(engine, size, method, k)


def steps(engine: Engine, size: int) -> list[Sequence]:
    """Rounds with drafts, then plain ones: all write one token, which a prediction knows up to its end."""
    most, token = DRAFTS[0], 1
    # after the prompt's token: two rounds of most drafts and a bonus, one of a single draft, three without
    prediction = (token,) * (1 + 2 * (most + 1) + 1)
    params = SamplingParams(
        temperature=0.0, max_tokens=len(prediction) + 4, ignore_eos=True, logit_bias={token: FORCED}
    )
    asked = RequestSpeculation(
        method=PREDICTION, num_speculative_tokens=most, policy="fixed", pool="", prediction=prediction
    )
    return admitted(engine, size, SHORT, params, asked)


def proposals(engine: Engine, size: int, method: str, k: int) -> list[Sequence]:
    """Rounds in which a method drafts so many tokens for each sequence."""
    max_tokens = ROUNDS * (1 + DRAFTS[0])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=ROUNDS, ignore_eos=True)
    asked = RequestSpeculation(method=method, num_speculative_tokens=k, policy="fixed", pool="")
    return admitted(engine, size, LONG, params, asked)


def admitted(
    engine: Engine, size: int, length: int, params: SamplingParams, asked: RequestSpeculation
) -> list[Sequence]:
    """So many sequences with prompts of that length, no two alike."""
    seqs: list[Sequence] = []
    for number in range(size):
        prompt = [(number * 7919 + place) % engine.runtime.facts.vocab_size for place in range(length)]
        seqs += engine.admission.admit(NAME, prompt, params, asked, prefix_cache=False)
    return seqs
