"""The whole engine over a runtime that has nothing in common with pages of torch."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.config import EngineConfig, SamplingParams
from speculon.engine.engine import Engine
from tests.scripted_runtime import EOS, VOCAB, ScriptedRuntime, ScriptedStep, rule
from tests.tiny.scripted import Key, Result, drain, texts_of

PROMPTS = [[1, 2, 3, 4], [7] * 30, [2, 9, 2, 9, 2, 9, 2], [21, 4]]


def make_engine(runtime: ScriptedRuntime, **settings: Any) -> Engine:
    speculation = {"method": "suffix", "policy": "fixed", "num_speculative_tokens": 5}
    speculation |= settings.pop("speculation", {})
    return Engine(runtime, None, EngineConfig(**{"max_num_seqs": 4, **settings}, speculation=speculation))


def add(engine: Engine, prompts: list[list[int]] = PROMPTS, **given: Any) -> None:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 40, **given})
        engine.add_request(prompt, params, request_id=f"r{i}")


def truth(prompts: list[list[int]] = PROMPTS, length: int = 40) -> dict[Key, list[int]]:
    """Each text token by token, without an engine."""
    texts = {}
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + length and (token := rule(tokens)) != EOS:
            tokens.append(token)
        texts[f"r{i}", 0] = tokens[len(prompt) :]
    return texts


def written(engine: Engine) -> dict[Key, Result]:
    results = drain(engine)
    assert texts_of(results) == truth()
    return results


def test_drafts_are_accepted_and_rejected_and_the_texts_are_the_rules() -> None:
    results = written(started := engine_with(PROMPTS))
    assert started.counters.totals.accepted > 10
    assert started.counters.totals.outcomes["early"] > 0, "no draft was rejected"
    assert {result.finish.reason for result in results.values() if result.finish} == {"length", "stop"}


def engine_with(prompts: list[list[int]], runtime: ScriptedRuntime | None = None, **settings: Any) -> Engine:
    engine = make_engine(runtime or ScriptedRuntime(), **settings)
    add(engine, prompts)
    return engine


def test_prompts_are_computed_in_chunks_beside_texts() -> None:
    engine = engine_with(PROMPTS, max_batch_tokens=8)
    written(engine)
    assert engine.counters.steps > 30 / 8


def test_a_later_prompt_begins_with_what_was_computed() -> None:
    engine = engine_with(PROMPTS)
    written(engine)
    engine.add_request(PROMPTS[1], SamplingParams(temperature=0, max_tokens=40), request_id="r1")
    (result,) = drain(engine).values()
    assert result.tokens == truth()["r1", 0] and result.stats.cached_tokens == len(PROMPTS[1]) - 1


def test_when_room_runs_out_the_youngest_begins_again() -> None:
    engine = engine_with(PROMPTS, ScriptedRuntime(capacity=100))
    written(engine)
    assert engine.counters.totals.preemptions > 0


def test_a_draft_never_takes_room_from_a_sequence() -> None:
    engine = engine_with(PROMPTS[:2], ScriptedRuntime(capacity=87))
    assert texts_of(drain(engine)) == truth(PROMPTS[:2])
    assert engine.counters.totals.reasons["no_pages"] > 0 and engine.counters.totals.accepted > 0


@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_failed_call_leaves_every_sequence_as_it_was(call: int) -> None:
    runtime = ScriptedRuntime()
    runtime.fails_at = call
    engine, results = engine_with(PROMPTS, runtime, max_batch_tokens=16), dict[Key, Result]()
    for _ in range(call - 1):
        for event in engine.step():
            results.setdefault((event.request_id, event.sample), Result()).take(event)
    before = {seq.id: list(seq.tokens) for seq in engine.scheduler.running}
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert before.items() <= {seq.id: seq.tokens for seq in engine.scheduler.running}.items()
    engine.check_integrity()
    assert texts_of(drain(engine, results)) == truth()


def test_costs_are_learned_anew_where_a_runtime_becomes_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a first guess from there on, which a few rounds outweigh."""
    engine = engine_with(PROMPTS)
    costs = engine.policy.costs
    for ms, rounds in ((100.0, 60), (10.0, 4)):
        for _ in range(rounds):
            costs.observe_step(1, 0, 0, ms)
    assert costs.step(1) > 25, "without the runtime's word they are slow to follow"
    for _ in range(60):
        costs.observe_step(1, 0, 0, 100.0)
    calls = iter([False, True])
    monkeypatch.setattr(engine.runtime, "between_rounds", lambda: next(calls, False))
    engine.step()
    assert costs.plain_steps()[1] > 50
    engine.step()
    assert 1 not in costs.plain_steps() and costs.known
    for _ in range(4):
        costs.observe_step(1, 0, 0, 10.0)
    assert costs.step(1) < 25


def test_an_abort_gives_everything_back() -> None:
    engine = engine_with(PROMPTS)
    for _ in range(3):
        engine.step()
    engine.abort("r1")
    engine.check_integrity()
    rest = texts_of(drain(engine))
    assert all(truth()[key][-len(tokens) :] == tokens for key, tokens in rest.items() if tokens)
    assert not engine.runtime.space.held  # type: ignore[attr-defined]


def test_sampled_texts_do_not_depend_on_drafts() -> None:
    texts = []
    for method in ("suffix", "off"):
        engine = make_engine(ScriptedRuntime(), speculation={"method": method})
        add(engine, temperature=1.0, seed=5, logprobs=2)
        texts.append(texts_of(drain(engine)))
    assert texts[0] == texts[1] != truth()


def test_what_can_never_be_served_is_refused_by_name() -> None:
    engine = make_engine(ScriptedRuntime(capacity=50))
    with pytest.raises(Exception, match="80 tokens need 80 KV pages of 1 tokens, but the pool has 50"):
        engine.add_request([1] * 40, SamplingParams(max_tokens=40))
    with pytest.raises(Exception, match=f"token ids must be from 0 to {VOCAB - 1}"):
        engine.add_request([VOCAB], SamplingParams())


def test_planted_error_a_runtime_that_keeps_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedStep, "__exit__", lambda step, *_: None)
    with pytest.raises(AssertionError, match="other tokens than the engine believes"):
        drain(engine_with(PROMPTS))
