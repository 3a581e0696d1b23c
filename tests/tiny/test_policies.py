"""Whatever the policy, the text is the plain one: each policy of the table is held to it, a new one by
itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speculon import SpeculativeDecoder
from speculon.core.config import USUAL_DRAFTS, SamplingParams
from speculon.core.errors import InvalidParameter
from speculon.core.telemetry import RequestStats
from speculon.decoding.sequence import Sequence
from speculon.engine.engine import Engine
from speculon.speculation.control.policies import POLICIES
from tests.tiny.account import unknown_to
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.requests import MODES, assert_same, plain, requests_of
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, script, texts_of

LLAMA = "llama"
NAMES = list(POLICIES)


def under(policy: str | list[str], mode: str, method: str | None = None) -> list[Request]:
    """The requests with one policy, or with these in turn; methods alternate where none is named."""
    names = [policy] if isinstance(policy, str) else policy
    methods = [method] if method else ["scripted", "ngram", "suffix", "auto"]
    return [
        replace(r, speculation={"method": methods[i % len(methods)], "policy": names[i % len(names)]})
        for i, r in enumerate(requests_of(mode))
    ]


def test_both_tables_have_the_same_policies() -> None:
    assert NAMES == list(USUAL_DRAFTS)
    assert {"fixed", "adaptive", "solo", "shadow", "goodput"} <= set(NAMES)


def test_a_policy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        InvalidParameter, match="policy = 'reckless': must be one of fixed, adaptive, solo, shadow, goodput"
    ):
        make_engine(tiny_target(LLAMA)).add_request([5], SamplingParams(), {"policy": "reckless"})


# adaptive


def test_adaptive_drafts_more_after_acceptance_and_less_after_rejection() -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompt = requests_of("greedy")[2].prompt
    truth = texts_of(run(tiny_target(LLAMA), [Request(prompt, long, {"method": "off"})]))
    request = Request(prompt, long, {"method": "scripted", "policy": "adaptive"})
    script(truth, lambda position: False)
    good = run(tiny_target(LLAMA), [request])["r", 0]
    script(truth, lambda position: True)
    bad = run(tiny_target(LLAMA), [request])["r", 0]
    assert texts_of({("r", 0): good}) == texts_of({("r", 0): bad}) == truth
    assert max(good.stats.drafted_at) + 1 > 6 and good.stats.rounds < 20
    assert max(bad.stats.drafted_at) + 1 == 5, "the first rounds draft `initial`, K or not"
    assert bad.stats.drafted_at[1] == bad.stats.rounds - 1, "never less than `min`, but for the last round"
    assert bad.stats.drafted_at[2] == 5, "the fifth observation is the first that is looked at"


def test_adaptive_settings_and_the_request_s_k_hold() -> None:
    script(plain("greedy"), lambda position: False)
    settings = {"policy": "adaptive", "adaptive_initial": 3, "adaptive_min": 3, "adaptive_max": 3}
    results = run(
        tiny_target(LLAMA),
        [replace(r, speculation={"method": "scripted"}) for r in requests_of("greedy")],
        speculation=settings,
    )
    assert {max(r.stats.drafted_at) + 1 for r in results.values()} == {3}
    speculation = {"method": "scripted", "policy": "adaptive", "num_speculative_tokens": 2}
    results = run(tiny_target(LLAMA), [replace(r, speculation=speculation) for r in requests_of("greedy")])
    assert {max(r.stats.drafted_at) + 1 for r in results.values()} == {2}


# solo


def test_solo_speculates_exactly_while_nobody_else_is_there() -> None:
    script(plain("greedy"))
    engine = make_engine(tiny_target(LLAMA), max_num_seqs=2)
    first, second, third = under("solo", "greedy", "scripted")[:3]
    results: dict[Key, Result] = {}

    def step(times: int) -> None:
        for _ in range(times):
            for event in engine.step():
                results.setdefault((event.request_id, event.sample), Result()).take(event)

    engine.add_request(first.prompt, first.params, first.speculation, first.id)
    step(4)
    seq = engine.scheduler.running[0]
    assert seq.stats.rounds == 3 and not seq.stats.reasons
    engine.add_request(
        second.prompt, second.params.model_copy(update={"max_tokens": 5}), second.speculation, second.id
    )
    step(3)
    assert seq.stats.rounds == 3 and seq.stats.reasons == {"solo": 3}
    step(2)
    assert len(engine.scheduler.running) == 1
    step(1)
    assert seq.stats.rounds == 4, "alone again"
    engine.add_request(third.prompt, third.params, third.speculation, third.id)
    drain(engine, results)
    assert results[first.id, 0].tokens == plain("greedy")[first.id, 0]
    assert results[third.id, 0].tokens == plain("greedy")[third.id, 0]


def test_solo_counts_those_who_wait() -> None:
    script(plain("greedy"))
    engine = make_engine(tiny_target(LLAMA), max_num_seqs=1)
    for request in under("solo", "greedy", "scripted")[:2]:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results = drain(engine)
    assert results["q0", 0].stats.rounds == 0 and set(results["q0", 0].stats.reasons) == {
        "solo",
        "max_tokens",
    }
    assert results["q1", 0].stats.rounds > 0 and "solo" not in results["q1", 0].stats.reasons


# goodput, at costs that are given and not measured

METHODS = ("scripted", "ngram", "suffix", "draft_model")
NO_MORE = [0.0] * 5  # of many rows, of long sequences, and of branches
DEAR = {"": [1.0, 0.0, 0.0, 5.0, 5.0, *NO_MORE], **dict.fromkeys(METHODS, [50.0, 1.0, 0.0, 0.0])}


def at_costs(given: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    engine = make_engine(tiny_target(LLAMA), **settings)
    engine.policy.costs.restore({name: (parts, 4, []) for name, parts in given.items()})
    monkeypatch.setattr(engine.policy.costs, "observe", lambda *_: None)
    return engine


@pytest.mark.parametrize("mode", MODES)
def test_where_drafts_are_dear_none_is_verified(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script(plain(mode))
    engine = at_costs(DEAR, monkeypatch)
    for request in under("goodput", mode):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results = drain(engine)
    assert_same(requests_of(mode), results, plain(mode))
    assert not any(result.stats.rounds for result in results.values()) and unknown_to(engine)


# a text that goes on step by step

STEPPED = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
REPEATED = [5, 6, 7, 8] * 4


def stepped(policy: str, **settings: Any) -> tuple[list[int], SpeculativeDecoder]:
    """A text written by `step` alone, and who wrote it."""
    options = {"block_size": 4, "method": "ngram", "suffix_pools": 0, **settings}
    decoder = SpeculativeDecoder(tiny_model(LLAMA), policy=policy, **options)
    ids, result = list(REPEATED), None
    while result is None or not result.verdict.finish:
        result = decoder.step(ids, STEPPED, prompt_len=len(REPEATED))
        ids += result.emitted_tokens
    assert unknown_to(decoder.engine)
    return ids[len(REPEATED) :], decoder


@pytest.mark.parametrize("policy", NAMES)
def test_step_by_step_the_output_is_the_plain_one(policy: str) -> None:
    text, decoder = stepped(policy)
    assert text == SpeculativeDecoder(tiny_model(LLAMA), method="off").generate(REPEATED, STEPPED).token_ids
    decoder.step(REPEATED, STEPPED)
    decoder.step([9, 9, 9], STEPPED)
    decoder.reset_stats()
    assert unknown_to(decoder.engine) and decoder.stats == RequestStats().speculation()


def test_step_by_step_the_account_in_the_shadow_is_the_one_that_verification_has() -> None:
    fixed, seen = (stepped(policy)[1].stats for policy in ("fixed", "shadow"))
    shadow = seen.shadow["ngram"]
    assert (shadow["rounds"], shadow["drafted"], shadow["accepted"]) == (
        fixed.rounds,
        fixed.drafted,
        fixed.accepted,
    )
    assert shadow["per_position"] == fixed.per_position and seen.rounds == 0


def test_step_by_step_adaptive_keeps_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest() -> int:
        settings = {"adaptive_cooldown_steps": 0, "adaptive_alpha": 1.0}
        _, decoder = stepped("adaptive", draft=tiny_model(LLAMA), method="draft_model", **settings)
        assert decoder.stats.rounds > 0
        return len(decoder.stats.per_position)

    def anew(self: SpeculativeDecoder, seq: Sequence) -> Sequence:
        assert self.adaptive
        self._forget_sequence()
        self.adaptive.reset()
        self._sequence = seq
        return seq

    assert longest() > 7
    monkeypatch.setattr(
        SpeculativeDecoder, "_continued", anew
    )  # planted: every step begins with the settings
    assert longest() == 5
