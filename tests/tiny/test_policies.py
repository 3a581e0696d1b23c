"""Whatever the policy, the text is the plain one: each policy of the table is held to it, a new one by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from time import sleep
from typing import Any

import pytest

from speculon import SpeculativeDecoder
from speculon.core.config import USUAL_DRAFTS, EngineConfig, SamplingParams
from speculon.core.errors import InvalidParameter
from speculon.core.telemetry import RequestStats
from speculon.core.types import Reason
from speculon.decoding.sequence import Sequence, Span
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.engine.warm_up import warm_up
from speculon.speculation.control.policies import POLICIES
from tests.builders import spread
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft
from tests.tiny.requests import MODES, accepted_lengths, assert_same, plain, requests_of
from tests.tiny.scripted import Key, Letters, Request, Result, drain, make_engine, run, script, texts_of

LLAMA = "llama"
# where a model's draft ends before K
CHAINED = {"separate": {}, "chained": {"chained_drafts": True, "draft_min_confidence": 0.02}}
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few pages": {"num_blocks": 40},
    "chunked": {"max_batch_tokens": 7},
}
NAMES = list(POLICIES)
CHOSEN, CHOSEN_CHAINED = spread(NAMES, MODES, SETTINGS), spread(NAMES, MODES, CHAINED)
ALONE = list(zip(NAMES, cycle(MODES), strict=False))


def under(policy: str | list[str], mode: str, method: str | None = None) -> list[Request]:
    """The requests with one policy, or with these in turn; methods alternate where none is named."""
    names = [policy] if isinstance(policy, str) else policy
    methods = [method] if method else ["scripted", "ngram", "suffix", "auto"]
    return [
        replace(r, speculation={"method": methods[i % len(methods)], "policy": names[i % len(names)]})
        for i, r in enumerate(requests_of(mode))
    ]


def unknown_to(engine: Engine) -> bool:
    """Whether no policy remembers a text."""
    kept: dict[str, Callable[[Any], list[dict[int, Any]]]] = {
        "adaptive": lambda policy: [policy.lookaheads],
        "shadow": lambda policy: [policy.shadow._texts],
        "goodput": lambda policy: [policy._running],
    }
    made = engine.policy._made
    return not any(remembered for name in made if name in kept for remembered in kept[name](made[name]))


def test_both_tables_have_the_same_policies() -> None:
    assert NAMES == list(USUAL_DRAFTS)
    assert {"fixed", "adaptive", "solo", "shadow", "goodput"} <= set(NAMES)


def check_batch(policy: str, mode: str, setting: str) -> None:
    script(plain(mode))
    engine = make_engine(tiny_target(LLAMA), **SETTINGS[setting])
    for request in under(policy, mode):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results = drain(engine)
    assert_same(requests_of(mode), results, plain(mode))
    assert all(result.stats.rounds + result.stats.reasons.total() > 0 for result in results.values())
    assert unknown_to(engine)


@pytest.mark.parametrize(("policy", "mode", "setting"), CHOSEN)
def test_a_batch_writes_the_plain_outputs(policy: str, mode: str, setting: str) -> None:
    check_batch(policy, mode, setting)


def check_alone(policy: str, mode: str) -> None:
    script(plain(mode))
    results: dict[Key, Result] = {}
    for request in under(policy, mode, "scripted"):
        results |= run(tiny_target(LLAMA), [request])
    assert_same(requests_of(mode), results, plain(mode))


@pytest.mark.parametrize(("policy", "mode"), ALONE)
def test_sequences_alone_are_the_plain_ones(policy: str, mode: str) -> None:
    check_alone(policy, mode)


@pytest.mark.parametrize("mode", MODES)
def test_sequences_of_different_policies_share_a_batch(mode: str) -> None:
    script(plain(mode))
    for turn in range(len(NAMES)):
        results = run(tiny_target(LLAMA), under(NAMES[turn:] + NAMES[:turn], mode))
        assert_same(requests_of(mode), results, plain(mode))


def check_draft_model(policy: str, mode: str, chained: str) -> None:
    noisy_draft()
    engine = make_engine(tiny_target(LLAMA), speculation={**DRAFT, "policy": policy, **CHAINED[chained]})
    for request in under(policy, mode, "auto"):
        engine.add_request(request.prompt, request.params, {"method": "auto"}, request.id)
    assert texts_of(drain(engine)) == plain(mode)


@pytest.mark.parametrize(("policy", "mode", "chained"), CHOSEN_CHAINED)
def test_a_draft_model_stays_right_under_every_policy(policy: str, mode: str, chained: str) -> None:
    check_draft_model(policy, mode, chained)


@pytest.mark.parametrize("mode", MODES)
def test_each_request_may_say_its_own_policy(mode: str) -> None:
    """One engine, one text after the other, each under another policy than the engine's."""
    script(plain(mode))
    engine = make_engine(tiny_target(LLAMA), speculation={"policy": "shadow"})
    results: dict[Key, Result] = {}
    for i, request in enumerate(under(NAMES, mode, "scripted")):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
        results |= drain(engine)
        assert ("shadow" in results[request.id, 0].stats.reasons) == (NAMES[i % len(NAMES)] == "shadow")
    assert_same(requests_of(mode), results, plain(mode))


def test_a_policy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        InvalidParameter, match="policy = 'reckless': known are fixed, adaptive, solo, shadow, goodput"
    ):
        make_engine(tiny_target(LLAMA)).add_request([5], SamplingParams(), {"policy": "reckless"})


# a planted error: a policy that keeps what it should not


def test_a_trim_that_spoils_a_draft_costs_no_token_and_one_that_spoils_the_output_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a policy does with drafts cannot change a text; what it does with the text can, and parity goes
    red.
    """
    script(plain("greedy"))
    engine = make_engine(tiny_target(LLAMA))
    trim = engine.policy.trim

    def spoil_draft(method: str, span: Span) -> int:
        span.draft = replace(span.draft, tokens=tuple(token ^ 1 for token in span.draft.tokens))
        return trim(method, span)

    def spoil(method: str, span: Span) -> int:
        if len(span.seq.tokens) == span.seq.request.prompt_len + 5:
            span.seq.tokens[-1] ^= 1
        return trim(method, span)

    monkeypatch.setattr(engine.policy, "trim", spoil_draft)
    for request in under("fixed", "greedy", "scripted"):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    assert texts_of(drain(engine)) == plain("greedy")
    monkeypatch.setattr(engine.policy, "trim", spoil)
    for request in under("fixed", "greedy", "scripted"):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    assert texts_of(drain(engine)) != plain("greedy")


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


def test_the_time_of_proposals_that_led_to_nothing_is_no_plain_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else others would be said to have saved what the shadow has spent."""
    slow = script(plain("greedy"))
    propose = slow.propose
    monkeypatch.setattr(slow, "propose", lambda *args: sleep(0.2) or propose(*args))
    engine = make_engine(tiny_target(LLAMA))
    (request,) = under("shadow", "greedy", "scripted")[:1]
    engine.add_request(
        request.prompt, request.params.model_copy(update={"max_tokens": 6}), request.speculation, request.id
    )
    result = drain(engine)[request.id, 0]
    cost = engine.policy.costs.plain(1)
    assert cost is not None and cost < 150 and result.stats.draft_ms > 4 * 200
    assert result.stats.saved_ms is not None and result.stats.saved_ms < -3 * 200


# goodput, at costs that are given and not measured

METHODS = ("scripted", "ngram", "suffix", "draft_model")
NO_MORE = [0.0] * 5  # of many rows, of long sequences, and of branches
CHEAP = {"": [10.0, 0.5, 0.0, 0.05, *NO_MORE], **dict.fromkeys(METHODS, [0.01, 0.01, 0.0, 0.0])}
DEAR = {"": [1.0, 0.0, 5.0, 5.0, *NO_MORE], **dict.fromkeys(METHODS, [50.0, 1.0, 0.0, 0.0])}


def at_costs(given: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    engine = make_engine(tiny_target(LLAMA), **settings)
    engine.policy.costs.restore(given)
    monkeypatch.setattr(engine.policy.costs, "observe", lambda *_: None)
    return engine


def check_cheap(mode: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script(plain(mode))
    engine = at_costs(
        CHEAP,
        monkeypatch,
        speculation={"policy": "goodput", "num_speculative_tokens": 4},
        **SETTINGS[setting],
    )
    for request in requests_of(mode):
        engine.add_request(request.prompt, request.params, {"method": "scripted"}, request.id)
    results = drain(engine)
    assert_same(requests_of(mode), results, plain(mode))
    assert accepted_lengths(results) == set(range(5))
    assert sum(result.stats.accepted for result in results.values()) > 100 and unknown_to(engine)


CHOSEN_CHEAP = [("greedy", "chunked"), ("sampled", "roomy"), ("sampled", "few pages")]


@pytest.mark.parametrize(("mode", "setting"), CHOSEN_CHEAP)
def test_where_drafts_are_cheap_every_accepted_length_gives_the_plain_output(
    mode: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cheap(mode, setting, monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_where_drafts_are_dear_none_is_verified(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script(plain(mode))
    engine = at_costs(DEAR, monkeypatch)
    for request in under("goodput", mode):
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    results = drain(engine)
    assert_same(requests_of(mode), results, plain(mode))
    assert not any(result.stats.rounds for result in results.values()) and unknown_to(engine)


# the defaults


@pytest.mark.parametrize("costs", [None, CHEAP], ids=["measured", "cheap drafts"])
@pytest.mark.parametrize("mode", MODES)
def test_by_default_the_outputs_are_the_plain_ones(
    mode: str, costs: dict[str, list[float]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody names a policy, a method or K.

    Each prompt comes twice: the second time there is an earlier answer.
    """
    engine = Engine(tiny_target(LLAMA), Tokenizer(Letters()), EngineConfig())
    assert (engine.config.speculation.policy, engine.proposers.default) == ("goodput", "auto")
    warm_up(engine)
    assert engine.policy.costs.known
    if costs:
        engine.policy.costs.restore(costs)
        monkeypatch.setattr(engine.policy.costs, "observe", lambda *_: None)
    for _ in range(2):
        for request in requests_of(mode):
            engine.add_request(request.prompt, request.params, request_id=request.id)
        results = drain(engine)
        assert_same(requests_of(mode), results, plain(mode))
        assert unknown_to(engine) and engine.counters.proposals["suffix"] > 0
        assert not any(Reason.COLD in result.stats.reasons for result in results.values())
    if costs:
        tokens = sum(len(result.tokens) for result in results.values())
        assert sum(result.stats.accepted for result in results.values()) > tokens / 8


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
    assert unknown_to(decoder.engine) and decoder.stats == RequestStats().account()


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
