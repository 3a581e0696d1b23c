"""The drafts and times behind an advice: its rounds are the engine's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from speculon import LLM
from speculon.advise.maths import Fit, total, walk
from speculon.advise.measure import (
    CYCLES,
    HALF,
    PLAIN,
    RUNS,
    ks_to_time,
    record_drafts,
    request_at,
    time_rounds,
)
from speculon.advise.plan import AdvisePlan
from speculon.advise.run import advise, cascades_of
from speculon.bench.measure import measure
from speculon.bench.workloads import Case
from speculon.control.acceptance import Acceptance
from speculon.control.policies import Policies
from speculon.errors import BenchError, NeverFits, TooLong
from speculon.proposers import registry
from speculon.proposers.compose import Proposers
from tests.tiny.advise.plans import K, cases, split
from tests.tiny.scripted import Scripted


def engine_rounds(llm: LLM, some: list[Case], method: str, k: int) -> tuple[int, int, int]:
    """(decoding calls, drafts, accepted drafts) of the engine itself, over all sequences of a batch."""
    stats = measure(llm, some, request_at(method, k)).stats
    calls = stats.target_calls - len(some)  # the first token came with the prompt
    return calls, stats.drafted_at.total(), stats.accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rounds_walked_are_those_of_the_engine(strange: LLM, own: LLM, temperature: float) -> None:
    """Every method, chained or not, and every K, from one plain pass: equal calls, drafts and acceptance."""
    for llm in (strange, own):
        some = cases(llm, temperature, max_tokens=24)
        cascades, _ = cascades_of(llm, AdvisePlan(k=K))
        assert [cascade.methods for cascade in cascades] == [
            ("suffix",),
            ("ngram",),
            ("draft_model",),
            ("suffix", "draft_model"),
        ]
        written = record_drafts(llm, some, ["suffix", "ngram", "draft_model"], K, 3, lambda n: None)
        for cascade in cascades:
            for k in (1, 3, K):
                done = total(walk(one.trace, cascade.methods, k, Acceptance(fade=1.0)) for one in written)
                found = engine_rounds(llm, some, cascade.name, k)
                assert (done.rounds, done.drafts, done.accepted) == found, (cascade, k)
                assert done.drafts > 0 or cascade.name in ("suffix", "ngram")


def test_a_walk_at_another_k_is_found_out(own: LLM) -> None:
    """The twin: a walk for another K than the engine's does not give its counts."""
    written = record_drafts(own, cases(own), ["draft_model"], K, 4, lambda n: None)
    wrong = total(walk(one.trace, ("draft_model",), K - 1, Acceptance(fade=1.0)) for one in written)
    assert (wrong.rounds, wrong.drafts) != engine_rounds(own, cases(own), "draft_model", K)[:2]


def test_measuring_leaves_no_trace(own: LLM) -> None:
    before = [measure(own, [case], {"method": "off"}).token_ids for case in cases(own)]
    looked = record_drafts(own, cases(own), ["suffix", "draft_model"], K, 2, lambda n: None)
    time_rounds(own, cases(own), ["suffix", "draft_model"], [1, 2], [1, 2], lambda n: None)
    assert type(own.engine.policy) is Policies and type(own.engine.proposers) is Proposers
    own.engine.check_integrity()
    assert own.engine.pool.available == own.engine.pool.num_blocks
    assert [measure(own, [case], request_at("draft_model", K)).token_ids for case in cases(own)] == before
    assert [text.tokens for text in looked] == [len(tokens) for (tokens,) in before]


def test_every_round_is_timed_as_often_as_announced(own: LLM) -> None:
    ks, batches, runs = ks_to_time(K), (1, 3), RUNS * CYCLES
    timed = time_rounds(own, cases(own), ["suffix", "draft_model"], ks, batches, lambda n: None)
    found = Counter((one.sequences, one.drafting, one.rows) for one in timed)
    for batch in batches:
        assert found[batch, 0, 0] == PLAIN * runs
        assert [found[batch, batch, batch * k] for k in ks[1:]] == [runs] * (len(ks) - 1)
        assert found[batch, batch, batch * ks[0]] == runs + 2 * RUNS  # and the first proposal of each method
    assert sum(n for (batch, drafting, _), n in found.items() if 0 < drafting < batch) == HALF * runs
    calls = [call for one in timed for name, call in one.proposals.items() if name == "draft_model"]
    assert min(call.ms for call in calls) > 0 and min(one.ms for one in timed) > 0
    # a whole batch of prompts
    assert max(call.unread for call in calls) > 3 * min(len(case.prompt) for case in cases(own)) - 3
    fit = Fit.of(timed, Random(0))
    assert fit.readers == {"draft_model"} and fit.misfit(timed) < 0.5


def test_what_cannot_be_timed_is_refused(folder: Path, own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    small = LLM(str(folder), prefix_cache=False, num_blocks=6)
    with pytest.raises(NeverFits, match=r"4 sequences need \d+ KV pages, the pool has 6"):
        time_rounds(small, cases(small), ["suffix"], [1], [4], lambda n: None)
    short = LLM(str(folder), prefix_cache=False, max_context=16)
    with pytest.raises(TooLong, match="the context is 16: lower K"):
        time_rounds(short, cases(short), ["suffix"], [1], [1], lambda n: None)


def test_a_method_that_fails_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Scripted):
        def propose(self, *_: Any) -> Any:
            raise ZeroDivisionError

    monkeypatch.setattr(registry, "_registered", {"broken": lambda config, target: Broken({})})
    llm = LLM(str(folder), prefix_cache=False)
    with pytest.raises(BenchError, match="one of suffix, ngram, broken failed"):
        advise(llm, split(llm), AdvisePlan((1,), k=2, method="broken", repeats=0))
