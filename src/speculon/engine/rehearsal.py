"""A rehearsal before the first request: a second or two of rounds about nothing, so that kernels are warm and
costs are known.

Nothing of it stays but what steps and proposals cost: no text, no count, no page, no belief about drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING

from speculon.config import RequestSpeculation, SamplingParams
from speculon.core import Sequence
from speculon.errors import InvalidRequest
from speculon.proposers.registry import OFF
from speculon.telemetry import EngineCounters

if TYPE_CHECKING:
    from speculon.engine.engine import Engine

SECONDS = 2.0  # guess: by then a model this slow has shown what matters most, which comes first
CROWDS = (1, 8, 4)  # texts at once
DRAFTS = (4, 1)
PROMPT, ROUNDS = 48, 6  # tokens of a text's prompt, and those it writes at least
NAME = "rehearsal"  # of its requests


def rehearse(engine: Engine) -> None:
    """Asks each method at hand for drafts, in crowds of several sizes, for `SECONDS` and a round at most."""
    began = perf_counter()
    kept = engine.counters, engine.events, engine.pool.prefix_cache
    engine.counters, engine.events, engine.pool.prefix_cache = EngineCounters(), None, False
    try:
        for crowd in crowds(engine):
            engine.scheduler.add(crowd)
            try:
                while engine.has_work and perf_counter() - began < SECONDS:
                    plan = engine.scheduler.plan()
                    engine.scheduler.settle(plan.spans, engine.round(plan, engine.stopwatch()))
            finally:
                engine.scheduler.abort(NAME)
                for seq in crowd:
                    engine.proposers.release(seq)
                    engine.policy.forget(seq)
            if perf_counter() - began >= SECONDS:
                break
    except InvalidRequest:
        pass  # it is small: its first requests will tell
    finally:
        engine.counters, engine.events, engine.pool.prefix_cache = kept
        engine.policy.keep_costs_alone()


def crowds(engine: Engine) -> Iterator[list[Sequence]]:
    """What is tried, and in which order: all methods with one text first."""
    methods = engine.proposers.methods_of((), engine.proposers.default)
    modes = [(OFF, 0), *((method, k) for k, method in product(DRAFTS, methods))]
    params = SamplingParams(
        temperature=0.0, max_tokens=ROUNDS * (1 + DRAFTS[0]), min_tokens=ROUNDS, ignore_eos=True
    )
    for texts, (method, k) in product(
        dict.fromkeys(min(texts, engine.config.max_num_seqs) for texts in CROWDS), modes
    ):
        asked = RequestSpeculation(method=method, num_speculative_tokens=k, policy="fixed", pool="")
        prompts = (
            [(text * 7919 + place) % engine.target.vocab_size for place in range(PROMPT)]
            for text in range(texts)
        )
        yield [seq for prompt in prompts for seq in engine.prepare(prompt, params, asked, NAME)]
