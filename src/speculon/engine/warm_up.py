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
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.engine.engine import Engine

SECONDS = 2.0  # guess: what matters most comes first
BATCHES = (1, 8, 4)  # sequences at once
DRAFTS = (4, 1)
PROMPT, ROUNDS = 48, 6  # tokens of a prompt, and those that a sequence generates at least
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
    """What is tried, and in which order: all methods with one sequence first."""
    methods = engine.proposers.methods_of((), engine.proposers.default)
    modes = [(OFF, 0), *((method, k) for k, method in product(DRAFTS, methods))]
    max_tokens = ROUNDS * (1 + DRAFTS[0])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=ROUNDS, ignore_eos=True)
    sizes = dict.fromkeys(min(size, engine.config.max_num_seqs) for size in BATCHES)
    for size, (method, k) in product(sizes, modes):
        speculation = RequestSpeculation(method=method, num_speculative_tokens=k, policy="fixed", pool="")
        seqs: list[Sequence] = []
        for number in range(size):
            prompt = [(number * 7919 + place) % engine.runtime.facts.vocab_size for place in range(PROMPT)]
            seqs += engine.admission.admit(NAME, prompt, params, speculation, prefix_cache=False)
        yield seqs
