"""The policy `shadow` on a tiny model: what it counts is what verification would have met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from speculon.core.config import SamplingParams
from speculon.core.types import Draft
from speculon.decoding.rounds import Budget
from speculon.speculation.control import shadow as shadow_module
from tests.tiny.account import check_account, unknown_to
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft, use_draft
from tests.tiny.requests import plain
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, run, script, texts_of
from tests.tiny.test_policies import LLAMA, under


def verified(mode: str, method: str, **settings: Any) -> dict[Key, Result]:
    return run(tiny_target(LLAMA), under("fixed", mode, method), **settings)


def watched(mode: str, method: str, **settings: Any) -> dict[Key, Result]:
    return run(tiny_target(LLAMA), under("shadow", mode, method), **settings)


def difference(seen: dict[Key, Result], done: dict[Key, Result], method: str) -> list[Key]:
    """Texts whose account in the shadow is not the one that verification had."""
    wrong = []
    for key, result in done.items():
        stats, account = result.stats, seen[key].stats.speculation()
        none = {"rounds": 0, "drafted": 0, "accepted": 0, "per_position": []}
        recorded, real = account.shadow.get(method, none), stats.speculation()
        expected = (real.rounds, real.drafted, real.accepted, real.per_position)
        if (
            recorded["rounds"],
            recorded["drafted"],
            recorded["accepted"],
            recorded["per_position"],
        ) != expected:
            wrong.append(key)
    return wrong


@pytest.mark.parametrize(
    ("method", "mode"), [("ngram", "greedy"), ("suffix", "sampled"), ("draft_model", "sampled")]
)
def test_the_account_in_the_shadow_is_the_one_that_verification_has(method: str, mode: str) -> None:
    """Drafts that depend on the text alone are the same ones whether verified or watched."""
    use_draft(tiny_target(LLAMA))
    settings = {"speculation": {**DRAFT, "suffix_pools": 0}}
    seen, done = watched(mode, method, **settings), verified(mode, method, **settings)
    assert texts_of(seen) == texts_of(done) == plain(mode)
    assert difference(seen, done, method) == []
    assert sum(result.stats.rounds for result in done.values()) > 0
    for result in seen.values():
        assert (result.stats.rounds, result.stats.accepted) == (0, 0)
        assert result.stats.verified_positions == result.stats.target_calls, "nothing was verified"


def test_a_shadow_that_counts_one_position_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"speculation": {"suffix_pools": 0}}
    done = verified("greedy", "ngram", **settings)
    assert difference(watched("greedy", "ngram", **settings), done, "ngram") == []
    true = shadow_module.shared_length
    monkeypatch.setattr(shadow_module, "shared_length", lambda a, b: true(a[1:], b[1:]))
    assert difference(watched("greedy", "ngram", **settings), done, "ngram")


def test_every_method_of_a_cascade_is_measured() -> None:
    use_draft(tiny_target(LLAMA))
    prompt = [5, 6, 7, 8] * 4
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    result = run(
        tiny_target(LLAMA),
        [Request(prompt, params, {"method": "auto", "policy": "shadow"})],
        speculation=DRAFT,
    )["r", 0]
    done = result.stats.speculation()
    assert set(done.shadow) == {"suffix", "draft_model"}
    model = done.shadow["draft_model"]
    assert model["accepted"] == model["drafted"] > 30 and set(model["per_position"]) == {1.0}
    assert set(result.stats.reasons) == {"shadow", "max_tokens"} and result.stats.reasons["max_tokens"] == 1
    assert result.stats.drafted_from.total() == 0


def test_a_drafter_that_is_never_verified_lags_by_one_token() -> None:
    """Its keys and values of drafted positions go with the step, what was written is computed once."""
    model = noisy_draft(error_rate=0.5)
    made = make_engine(tiny_target(LLAMA), speculation=DRAFT)
    prompt = list(range(3, 30))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    made.add_request(prompt, params, {"method": "draft_model", "policy": "shadow"}, "r")
    while made.has_work:
        made.step()
        for seq in made.scheduler.running:
            assert made.runtime.space.of(seq).drafted.get("draft_model", 0) <= seq.committed
    assert model.calls[0] == len(prompt) + 1 and set(model.calls[1:]) == {1}
    made.check_integrity()


def test_a_sequence_that_is_stopped_or_aborted_is_accounted_for() -> None:
    truth = plain("greedy")["q0", 0]
    script({("q0", 0): truth}, lambda position: False)
    (request,) = under("shadow", "greedy", "scripted")[:1]
    engine = make_engine(tiny_target(LLAMA))
    stop = request.params.model_copy(update={"stop_token_ids": (truth[6],), "ignore_eos": True})
    engine.add_request(request.prompt, stop, request.speculation, request.id)
    result = drain(engine)[request.id, 0]
    at = truth.index(truth[6])
    done = result.stats.speculation()
    assert result.tokens == truth[:at]
    assert done.shadow["scripted"]["drafted"] == done.shadow["scripted"]["accepted"] == at - 1 - (at - 1) // 5
    assert engine.counters.totals.speculation() == done and unknown_to(engine)
    engine = make_engine(tiny_target(LLAMA))
    engine.add_request(request.prompt, request.params, request.speculation, request.id)
    for _ in range(3):
        engine.step()
    (event,) = engine.abort(request.id)
    assert event.stats and event.stats.watched_at.total() == 2, "of the first draft two tokens were written"
    assert engine.counters.totals.watched_at.total() == 2 and unknown_to(engine)


def test_a_step_that_fails_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = plain("greedy")
    script(truth, lambda position: False)
    engine = make_engine(tiny_target(LLAMA))
    (request,) = under("shadow", "greedy", "scripted")[:1]
    engine.add_request(request.prompt, request.params, request.speculation, request.id)
    forward, calls = engine.runtime.target.forward, 0

    def fail_sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise MemoryError("planted")
        return forward(*args)

    try:
        engine.runtime.target.forward = fail_sometimes  # type: ignore[method-assign]
        results: dict[Key, Result] = {}
        for _ in range(500):
            if engine.has_work:
                try:
                    for event in engine.step():
                        results.setdefault((event.request_id, event.sample), Result()).take(event)
                except MemoryError:
                    pass
    finally:
        del engine.runtime.target.forward
    script(truth, lambda position: False)
    done = run(tiny_target(LLAMA), [replace(request, speculation={**request.speculation, "policy": "fixed"})])  # type: ignore[dict-item]
    assert results[request.id, 0].tokens == truth[request.id, 0]
    assert difference(results, done, "scripted") == []
    check_account(done[request.id, 0])


def test_goodput_keeps_no_probabilities_between_rounds() -> None:
    noisy_draft()
    engine = make_engine(tiny_target(LLAMA), speculation={**DRAFT, "policy": "goodput"})
    params = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True)
    for first in range(4):
        engine.add_request([1, 5 + first, 7, 9], params, {"method": "draft_model"})
    policy, with_q = engine.policy.of("goodput"), 0
    trim = policy.trim
    probs = list[ref[Tensor]]()

    def trimmed(method: str, drafts: Mapping[Budget, Draft]) -> Any:
        probs.extend(ref(draft.probs) for draft in drafts.values() if draft.probs is not None)
        return trim(method, drafts)

    policy.trim = trimmed  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
        with_q += bool(probs)
        assert not any(kept() is not None for kept in probs)
        probs.clear()
    assert with_q
