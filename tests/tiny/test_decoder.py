"""The decoder of model objects: rounds add up to the plain text, figures are measured, no state is left."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from speculon import SamplingParams, SpeculativeDecoder
from speculon.core.telemetry import RequestStats
from speculon.core.types import SpanOutcome
from speculon.engine import decoder as decoder_module
from speculon.speculation.control.adaptive import Adaptive, AdaptiveLookahead
from tests.builders import spread
from tests.tiny.conftest import CONTEXT, VOCAB, tiny_model
from tests.tiny.scripted import assert_nothing_held, proposer_of, store_of

K = 4
PROMPT = [7, 30, 31, 32, 50, 51, 52, 30, 31, 32, 60, 61, 62, 63, 64, 65, 66, 67, 68, 30, 31]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=30, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    seed=4,
    min_tokens=9,
    max_tokens=30,
    logit_bias={2: 9.0},
)
MODES = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(SEEDED, id="seeded"),
    pytest.param(PENALISED, id="penalised"),
]
SAME, OTHER = ("draft_model", 0), ("draft_model", 1)  # (method, seed of the draft's weights)
DRAFTERS = [SAME, OTHER, ("auto", 1), ("ngram", None), ("off", None)]


def make(drafter: tuple[str, int | None] = SAME, **settings: Any) -> SpeculativeDecoder:
    method, seed = drafter
    draft = None if seed is None else tiny_model("llama", seed)
    settings = {"block_size": 4, "policy": "fixed", "num_speculative_tokens": K, **settings}
    return SpeculativeDecoder(tiny_model("llama"), draft, method=method, **settings)


def plain(params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    return list(_plain(params.model_dump_json(), tuple(prompt)))


@cache
def _plain(params: str, prompt: tuple[int, ...]) -> list[int]:
    return make(("off", None)).generate([*prompt], SamplingParams.model_validate_json(params)).token_ids


def by_steps(decoder: SpeculativeDecoder, params: SamplingParams) -> list[int]:
    """The output of one text, round by round."""
    text = list(PROMPT)
    while True:
        result = decoder.step(text, params, prompt_len=len(PROMPT))
        text += result.emitted_tokens
        if result.verdict.finish:
            return text[len(PROMPT) :]


# the same text


SETTINGS: list[dict[str, Any]] = [
    {},
    {"block_size": 1},
    {"prefix_cache": False},
    {"max_batch_tokens": 3},
]


@pytest.mark.parametrize(
    ("drafter", "settings", "params"), spread(DRAFTERS, SETTINGS, (GREEDY, SEEDED, PENALISED))
)
def test_rounds_and_whole_outputs_are_the_plain_output(
    drafter: tuple[str, int | None], settings: dict[str, Any], params: SamplingParams
) -> None:
    truth, decoder = plain(params), make(drafter, **settings)
    assert by_steps(decoder, params) == truth
    assert decoder.generate(PROMPT, params).token_ids == truth
    assert_nothing_held(decoder.engine)


@pytest.mark.parametrize("params", MODES)
def test_by_default_the_output_is_the_plain_one(params: SamplingParams) -> None:
    """Nobody names a policy, a method or K."""
    for draft in (None, tiny_model("llama", 0), tiny_model("llama", 1)):
        decoder = SpeculativeDecoder(tiny_model("llama"), draft)
        assert (decoder.config.speculation.policy, decoder.config.speculation.method) == ("goodput", "auto")
        for _ in range(2):
            assert by_steps(decoder, params) == decoder.generate(PROMPT, params).token_ids == plain(params)
            assert_nothing_held(decoder.engine)


def test_the_plain_output_is_that_of_the_stock_model() -> None:
    ids = torch.tensor([PROMPT])
    limit = {"max_new_tokens": GREEDY.max_tokens, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    stock = (
        tiny_model("llama")
        .generate(ids, attention_mask=torch.ones_like(ids), **limit)[0, len(PROMPT) :]
        .tolist()
    )
    assert plain(GREEDY) == stock == by_steps(make(), GREEDY)


def test_a_spoiled_page_is_seen() -> None:
    truth = plain(GREEDY)
    decoder = make()
    decoder.step(PROMPT, GREEDY)
    for keys in store_of(decoder.engine).k:
        keys.zero_()
    assert by_steps(decoder, GREEDY) != truth


# acceptance


@pytest.mark.parametrize("params", MODES[:2])
def test_the_target_as_its_own_draft_is_always_accepted(params: SamplingParams) -> None:
    decoder = make(SAME)
    decoder.generate(PROMPT, params)
    assert decoder.acceptance_rate == 1.0 and decoder.stats.drafted > 0
    decoder.reset_stats()
    by_steps(decoder, params)
    assert decoder.acceptance_rate == 1.0 and decoder.stats.rounds == 6
    assert decoder.tokens_per_target_call == K + 1


def lie(token: int) -> int:
    return (token + 1) % VOCAB


def judged(decoder: SpeculativeDecoder, params: SamplingParams) -> list[tuple[int, tuple[int, ...]]]:
    """For drafts that are true up to 0..K: how many were accepted, and what the verdict emits."""
    truth, found = plain(params), []
    for true in range(K + 1):
        drafts = [*truth[:true], *map(lie, truth[true:K])]
        verdict = decoder.verify(PROMPT, drafts, params)
        found.append((verdict.accepted, verdict.tokens))
    return found


@pytest.mark.parametrize("params", MODES)
def test_verify_accepts_every_length_and_corrects(params: SamplingParams) -> None:
    truth, decoder = plain(params), make()
    assert judged(decoder, params) == [(true, tuple(truth[: true + 1])) for true in range(K + 1)]
    outcomes = [decoder.verify(PROMPT, [*truth[:n], lie(truth[n])], params).outcome for n in (0, 1)]
    assert (
        outcomes == [SpanOutcome.TAIL, SpanOutcome.TAIL]
        and decoder.verify(PROMPT, truth[:2], params).outcome is SpanOutcome.FULL
    )
    assert decoder.verify(PROMPT, [], params).tokens == (truth[0],)
    assert decoder.verify([*PROMPT, *truth[:5]], truth[5:7], params, prompt_len=len(PROMPT)).tokens == tuple(
        truth[5:8]
    )
    assert_nothing_held(decoder.engine)


def test_a_verdict_one_position_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, decoder = plain(GREEDY), make()
    forward = decoder.engine.runtime.target.forward

    def shifted(batch: Any, view: Any) -> Any:
        out = forward(batch, view)
        out.logits.copy_(out.logits.roll(1, 0))
        return out

    monkeypatch.setattr(decoder.engine.runtime.target, "forward", shifted)
    assert judged(decoder, GREEDY) != [(true, tuple(truth[: true + 1])) for true in range(K + 1)]


def test_a_verdict_ends_the_sequence_inside_the_drafts() -> None:
    truth = plain(GREEDY)
    at = next(i for i in range(1, K) if truth[i] not in truth[:i])
    stopping = GREEDY.model_copy(update={"stop_token_ids": (truth[at],)})
    verdict = make().verify(PROMPT, truth[:K], stopping)
    assert verdict.tokens == tuple(truth[:at]) and verdict.finish and verdict.finish.matched == truth[at]


def test_drafts_with_q_are_judged_with_it_when_no_seed_is_given() -> None:
    decoder, params = make(OTHER), SamplingParams(temperature=1.0, ignore_eos=True)
    draft = decoder.draft(PROMPT, params=params)
    assert draft.probs is not None and draft.probs.shape == (K, VOCAB)
    verdict = decoder.verify(PROMPT, draft, params)
    assert (
        1 <= len(verdict.tokens) == verdict.accepted + 1
        and verdict.tokens[:-1] == draft.tokens[: verdict.accepted]
    )


# no trace


def account(decoder: SpeculativeDecoder) -> tuple[Any, ...]:
    return (
        decoder.stats,
        decoder.acceptance_rate,
        decoder.tokens_per_target_call,
        decoder._tokens,
        decoder._ms,
    )


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_draft_and_verify_leave_no_trace(drafter: tuple[str, int | None]) -> None:
    decoder, alone = make(drafter), make(drafter)
    decoder.step(PROMPT, GREEDY)
    before, text = account(decoder), [*PROMPT, *plain(GREEDY)[:8]]
    drafts = [decoder.draft(text, params=GREEDY).tokens for _ in range(2)]
    verdicts = [decoder.verify(text, [lie(1)] * 3, GREEDY) for _ in range(2)]
    assert account(decoder) == before and drafts[0] == drafts[1] and verdicts[0] == verdicts[1]
    assert_nothing_held(decoder.engine)
    now, fresh = decoder.step(text, GREEDY), alone.step(text, GREEDY)
    assert (now.draft_tokens, now.verdict, now.reason) == (fresh.draft_tokens, fresh.verdict, fresh.reason)
    assert drafts[0] == now.draft_tokens, "step() drafts what draft() returned"


def test_draft_takes_k() -> None:
    decoder = make()
    assert [len(decoder.draft(PROMPT, k, GREEDY).tokens) for k in (0, 1, 7, None)] == [0, 1, 7, K]
    assert decoder.draft(PROMPT, 7, GREEDY).tokens == tuple(plain(GREEDY)[:7])
    assert decoder.draft(PROMPT, 7, GREEDY.model_copy(update={"max_tokens": 3})).tokens == tuple(
        plain(GREEDY)[:2]
    )


def rows_of_steps(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The most rows that target and draft compute in one round after the first."""
    rows: dict[str, int] = {"target": 0, "draft": 0}

    def count(name: str, model: Any) -> None:
        forward = model.forward

        def counted(batch: Any, view: Any) -> Any:
            rows[name] = max(rows[name], batch.input_ids.shape[1])
            return forward(batch, view)

        monkeypatch.setattr(model, "forward", counted)

    text = [*PROMPT, *decoder.step(PROMPT, GREEDY).emitted_tokens]
    count("target", decoder.engine.runtime.target)
    count("draft", proposer_of(decoder.engine, "draft_model").model)
    for _ in range(4):
        text += decoder.step(text, GREEDY, prompt_len=len(PROMPT)).emitted_tokens
    return rows["target"], rows["draft"]


def test_a_growing_sequence_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = rows_of_steps(make(block_size=4), monkeypatch)
    assert target <= 4 + K and draft <= 4 + K + 1
    target, draft = rows_of_steps(make(prefix_cache=False), monkeypatch)
    assert target > len(PROMPT) and draft > len(PROMPT)


@pytest.mark.parametrize("call", ["step", "verify", "generate", "draft"])
def test_an_error_inside_leaves_the_pool_whole(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    decoder = make(prefix_cache=False)
    calls = 0

    def failing(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("out of memory")

    long = (
        (PROMPT, [1, 2], GREEDY)
        if call == "verify"
        else (PROMPT, K, GREEDY)
        if call == "draft"
        else (PROMPT, GREEDY)
    )
    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.runtime.target, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            getattr(decoder, call)(*long)
    assert calls == 1
    assert_nothing_held(decoder.engine)
    assert by_steps(decoder, GREEDY) == plain(GREEDY)


# accounts


def test_a_step_says_what_it_did() -> None:
    truth, decoder = plain(GREEDY), make(SAME)
    result = decoder.step(PROMPT, GREEDY)
    assert result.draft_tokens == result.accepted_tokens == tuple(
        truth[:K]
    ) and result.emitted_tokens == tuple(truth[: K + 1])
    assert result.acceptance_rate == 1.0 and result.reason is None
    assert result.draft_ms > 0 and result.verify_ms > 0
    nothing = make(("ngram", None)).step([5, 6, 7], GREEDY)
    assert (nothing.draft_tokens, nothing.acceptance_rate, nothing.reason) == ((), 0.0, "no_match")
    assert nothing.verify_ms > 0 and len(nothing.emitted_tokens) == 1


def test_before_any_round_and_after_a_reset_there_is_nothing() -> None:
    decoder = make()
    none = (RequestStats().speculation(), 0.0, 0.0, 1.0)

    def figures() -> tuple[Any, ...]:
        rates = decoder.acceptance_rate, decoder.tokens_per_target_call
        return decoder.stats, *rates, decoder.speedup_estimate

    assert figures() == none
    by_steps(decoder, GREEDY)
    assert not any(now == then for now, then in zip(figures(), none, strict=True))
    decoder.reset_stats()
    assert figures() == none
    assert by_steps(decoder, GREEDY) == plain(GREEDY)


class Clock:
    """A target call costs 10 ms and 1 ms per row, a draft call 2 ms; nothing else takes time."""

    def __init__(self, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch):
        self.now, self.plain_calls = 0.0, 0
        monkeypatch.setattr(decoder_module, "perf_counter", lambda: self.now)
        draft = proposer_of(decoder.engine, "draft_model").model
        self.charge(decoder.engine.runtime.target, lambda rows: 10 + rows, monkeypatch)
        self.charge(draft, lambda rows: 2, monkeypatch)

    def charge(self, model: Any, cost: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        forward = model.forward

        def charged(batch: Any, view: Any) -> Any:
            rows = batch.input_ids.shape[1]
            self.now += cost(rows) / 1e3
            self.plain_calls += rows == 1 and cost(1) > 2
            return forward(batch, view)

        monkeypatch.setattr(model, "forward", charged)


@pytest.mark.parametrize("way", ["generate", "step"])
def test_the_speedup_is_the_measured_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make(SAME, block_size=1)
    clock = Clock(decoder, monkeypatch)
    params = GREEDY.model_copy(update={"max_tokens": 26 if way == "generate" else 25})
    if way == "generate":
        decoder.generate(PROMPT, params)
    else:
        assert len(by_steps(decoder, params)) == 25
    round_ms = K * 2 + 10 + K + 1  # brings K + 1 tokens
    assert decoder.speedup_estimate == pytest.approx(11 * (K + 1) / round_ms)
    calls = clock.plain_calls
    assert calls == 1 + 8 and decoder.speedup_estimate and clock.plain_calls == calls, "remembered"
    decoder.reset_stats()
    decoder.generate(PROMPT, params)
    calls = clock.plain_calls
    assert decoder.speedup_estimate and clock.plain_calls == calls + 1 + 8, "and forgotten with the rest"


def test_the_plain_cost_can_be_measured_at_the_end_of_the_context_and_of_the_pages() -> None:
    full = [int(i) % 90 + 3 for i in range(CONTEXT - 3)]
    for settings in ({}, {"max_context": CONTEXT - 3 + 1}, {"num_blocks": 32}):
        decoder = make(**settings)
        assert decoder.step(full, SamplingParams(temperature=0)).emitted_tokens
        assert decoder.speedup_estimate and decoder.speedup_estimate > 0
        assert_nothing_held(decoder.engine)
    tiny = make(max_context=2)
    assert tiny.step([5], SamplingParams(temperature=0)).emitted_tokens and tiny.speedup_estimate


# how many drafts

QUICK = {"adaptive_initial": 3, "adaptive_min": 1, "adaptive_max": 9, "adaptive_alpha": 0.5}


def adaptive(drafter: tuple[str, int | None] = SAME, cooldown: int = 0) -> SpeculativeDecoder:
    settings = {**QUICK, "adaptive_cooldown_steps": cooldown}
    return make(drafter, policy="adaptive", num_speculative_tokens=None, **settings)


def follows_the_rules(decoder: SpeculativeDecoder) -> bool:
    """Whether each step drafts what a controller says that observes the rounds by the rules of `adaptive`."""
    text, controller = list(PROMPT), decoder.adaptive
    assert controller is not None
    reference = AdaptiveLookahead(controller.config)
    while True:
        if (decoder.lookahead, controller.observations) != (reference.lookahead, reference.observations):
            return False
        result = decoder.step(text, SEEDED, prompt_len=len(PROMPT))
        text += result.emitted_tokens
        drafted, accepted = len(result.draft_tokens), len(result.accepted_tokens)
        cut_short = accepted == drafted < reference.lookahead
        if drafted and not (cut_short and accepted < reference.mean_accepted):
            reference.observe(drafted, accepted)
        if result.verdict.finish:
            return text[len(PROMPT) :] == plain(SEEDED)


@pytest.mark.parametrize("cooldown", [0, 2])
@pytest.mark.parametrize("drafter", [SAME, OTHER, ("ngram", None)], ids=str)
def test_each_step_drafts_what_the_controller_says_and_reports_to_it(
    drafter: tuple[str, int | None], cooldown: int
) -> None:
    decoder = adaptive(drafter, cooldown)
    assert follows_the_rules(decoder) and decoder.adaptive and decoder.adaptive.observations > 0
    assert_nothing_held(decoder.engine)


def test_a_controller_that_observes_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adaptive, "observe", lambda *_: None)
    assert not follows_the_rules(adaptive())


def test_the_controller_goes_on_with_the_next_text_until_a_reset() -> None:
    decoder = adaptive()
    controller = decoder.adaptive
    assert controller and decoder.generate(PROMPT, GREEDY).token_ids == plain(GREEDY)
    grown = controller.lookahead
    assert grown == decoder.lookahead > 3
    assert len(decoder.draft([9, 8, 7], params=GREEDY).tokens) == grown
    assert len(decoder.step([9, 8, 7], GREEDY, k=2).draft_tokens) == 2
    decoder.reset_stats()
    assert decoder.adaptive is controller and (controller.lookahead, controller.observations) == (3, 0)


def test_without_policy_adaptive_there_is_no_controller() -> None:
    assert make().adaptive is None and make().lookahead == K
    assert make(policy="adaptive", num_speculative_tokens=0).adaptive is None
    assert make(policy="adaptive", num_speculative_tokens=3).lookahead == 3
