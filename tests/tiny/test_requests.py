"""Where a text ends, what is counted, who shares pages, and why a round was not speculative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from speculon.core.config import SamplingParams, SpeculationConfig
from speculon.core.types import Ask, Decision, Draft, Finish, Load, SpanOutcome
from speculon.decoding import rounds
from speculon.decoding.rounds import Budget
from speculon.decoding.text.tokenizer import Tokenizer, final_text
from speculon.speculation.proposers.registry import register
from tests.tiny.account import check_account
from tests.tiny.conftest import tiny_target
from tests.tiny.requests import drafting, plain, requests_of
from tests.tiny.scripted import (
    Letters,
    Request,
    Result,
    Scripted,
    drain,
    make_engine,
    run,
    script,
    spell,
)

K = 6
PROMPT = [42, 58, 67, 89, 48, 70, 44]
LAST = 24  # tokens of the known text


def request(speculation: dict[str, Any] | None = None, **params: Any) -> Request:
    settings = {"temperature": 0.0, "max_tokens": LAST, "ignore_eos": True} | params
    return Request(
        PROMPT, SamplingParams(**settings), speculation or {"method": "scripted", "num_speculative_tokens": K}
    )


@cache
def text() -> list[int]:
    """The known text; its first tokens are all different."""
    tokens = run(tiny_target("llama"), [request({"method": "off"})])["r", 0].tokens
    assert len(set(tokens[:12])) == 12 and len(tokens) == LAST
    return tokens


def one(lies: set[int] = frozenset(), target: Any = None, **params: Any) -> Result:  # type: ignore[assignment]
    """Runs the request with true drafts but for `lies`; the first round drafts output tokens 1..6."""
    script({("r", 0): text()}, lies.__contains__)
    result = run(target or tiny_target("llama"), [request(**params)])["r", 0]
    check_account(result)
    return result


# (place of the stop, position of the stop in the output, lies, span kind, drafts accepted and kept)
PLACES = [
    pytest.param(1, set(), SpanOutcome.STOP, 0, id="the first draft"),
    pytest.param(4, set(), SpanOutcome.STOP, 3, id="an accepted draft"),
    pytest.param(6, set(), SpanOutcome.STOP, 5, id="the last draft"),
    pytest.param(7, set(), SpanOutcome.FULL, 6, id="the bonus"),
    pytest.param(1, {1}, SpanOutcome.EARLY_STOP, 0, id="the first correction"),
    pytest.param(4, {4}, SpanOutcome.EARLY_STOP, 3, id="a correction"),
    pytest.param(4, {4, 5, 6}, SpanOutcome.EARLY_STOP, 3, id="a correction before other lies"),
    pytest.param(6, {6}, SpanOutcome.EARLY_STOP, 5, id="the last correction"),
    pytest.param(4, {6}, SpanOutcome.STOP, 3, id="an accepted draft before a lie"),
]


@pytest.mark.parametrize(("at", "lies", "outcome", "accepted"), PLACES)
def test_a_stop_token_inside_a_span_ends_the_sequence_there(
    at: int, lies: set[int], outcome: SpanOutcome, accepted: int
) -> None:
    result = one(lies, stop_token_ids=(text()[at], text()[at + 1]))
    assert result.tokens == text()[:at]
    assert result.finish == Finish("stop", text()[at])
    assert dict(result.stats.outcomes) == {outcome: 1} and result.stats.accepted == accepted


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(("at", "lies", "outcome", "accepted"), PLACES)
def test_a_stop_string_inside_a_span_ends_the_sequence_there(
    at: int, lies: set[int], outcome: SpanOutcome, accepted: int, length: int
) -> None:
    stop = spell(text()[at + 1 - length : at + 1])
    result = one(lies, stop=("no such text", spell(text()[at + 1 : at + 3]), stop))
    assert result.tokens == text()[: at + 1]  # the token that completes it is kept
    assert result.finish == Finish("stop", stop)
    assert final_text(Tokenizer(Letters()), result.tokens, stop, SamplingParams()) == spell(
        text()[: at + 1 - length]
    )
    kept = accepted + (outcome is SpanOutcome.STOP)
    assert dict(result.stats.outcomes) == {outcome: 1} and result.stats.accepted == kept


@pytest.mark.parametrize(
    ("lies", "limit", "outcome", "accepted"),
    [
        pytest.param(set(), 8, SpanOutcome.FULL, 6, id="all accepted"),
        pytest.param({6}, 8, SpanOutcome.TAIL, 5, id="all but the last"),
        pytest.param({5}, 8, SpanOutcome.EARLY, 4, id="all but the last two"),
        pytest.param({1, 2, 3, 4, 5, 6}, 8, SpanOutcome.EARLY, 0, id="none"),
        pytest.param({1}, 3, SpanOutcome.TAIL, 0, id="none of one"),
    ],
)
def test_a_span_is_named_by_how_it_ended(
    lies: set[int], limit: int, outcome: SpanOutcome, accepted: int
) -> None:
    script({("r", 0): text()}, lies.__contains__)
    engine = make_engine(tiny_target("llama"))
    single = request(max_tokens=limit)
    engine.add_request(single.prompt, single.params, single.speculation, "r")
    engine.step()
    (seq,) = engine.scheduler.running
    engine.step()
    assert dict(seq.stats.outcomes) == {outcome: 1} and seq.stats.accepted == accepted
    assert seq.tokens[len(PROMPT) :] == text()[: accepted + 2]


def test_a_stop_string_does_not_begin_in_the_prompt() -> None:
    result = one(stop=(spell([PROMPT[-1], text()[0]]),))
    assert result.tokens == text() and result.finish == Finish("length")


def test_the_earliest_of_several_causes_wins() -> None:
    t = text()
    assert one(stop=(spell(t[3:5]),), stop_token_ids=(t[5],)).finish == Finish("stop", spell(t[3:5]))
    assert one(stop=(spell(t[5:7]),), stop_token_ids=(t[5],)).finish == Finish("stop", t[5])
    assert one(stop=(spell(t[4:6]),), stop_token_ids=(t[5],)).finish == Finish("stop", t[5])
    assert one(stop=(spell(t[4:6]),), max_tokens=5).finish == Finish("length")
    assert one(stop=(spell(t[3:5]),), max_tokens=5).finish == Finish("stop", spell(t[3:5]))


@pytest.mark.parametrize("limit", [0, 1, 2, 7])
def test_max_tokens_is_never_passed(limit: int) -> None:
    result = one(max_tokens=limit)
    assert (result.tokens, result.finish) == (text()[:limit], Finish("length"))
    # no draft for the first token, none for the last
    assert result.stats.drafted_at.total() <= max(0, limit - 2)


@pytest.mark.parametrize("limit", [1, 4, 9])
def test_max_tokens_is_kept_by_the_cut_alone(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that drafts beyond the limit."""
    engine = make_engine(tiny_target("llama"))
    monkeypatch.setattr(rounds, "wanted_drafts", lambda seq, end: {"scripted": K})

    def decide(budgets: list[Budget], load: Load) -> list[Decision]:
        return [Decision.of([Ask("scripted", K)]) for _ in budgets]

    monkeypatch.setattr(engine.policy, "decide", decide)
    script({("r", 0): text()}, lambda position: False)
    single = request(max_tokens=limit)
    engine.add_request(single.prompt, single.params, single.speculation, "r")
    result = drain(engine)["r", 0]
    check_account(result)
    assert (result.tokens, result.finish) == (text()[:limit], Finish("length"))


@pytest.mark.parametrize("least", [1, 3, 4, 5, 12])
def test_nothing_stops_before_min_tokens(least: int) -> None:
    """Stop tokens cannot be written before it; a stop string completed before it is passed over."""
    params = {"min_tokens": least, "stop_token_ids": (text()[3], text()[8])}
    truth = run(tiny_target("llama"), [request({"method": "off"}, **params)])["r", 0]
    assert (len(truth.tokens) >= least) and (truth.tokens == text()[:3]) == (least <= 3)
    script({("r", 0): truth.tokens}, lambda position: False)
    result = run(tiny_target("llama"), [request(**params)])["r", 0]
    assert (result.tokens, result.finish) == (truth.tokens, truth.finish)

    result = one(min_tokens=least, stop=(spell(text()[3:5]), spell(text()[10:12])))
    assert result.tokens == (text()[:5] if least <= 5 else text()[:12])


def test_samples_share_the_pages_of_their_prompt() -> None:
    engine = make_engine(tiny_target("llama"))
    prompt = list(range(20, 33))
    engine.add_request(prompt, SamplingParams(n=5, max_tokens=4, seed=1, ignore_eos=True), {"method": "off"})
    engine.step()
    engine.step()
    tables = [engine.runtime.space.of(seq).table for seq in engine.scheduler.running]
    assert len(tables) == 5 and all(table[:3] == tables[0][:3] for table in tables)
    assert len({page for table in tables for page in table}) == 3 + 5
    engine.check_integrity()
    results = drain(engine)
    assert [results["r-0", i].stats.cached_tokens for i in range(5)] == [0, 12, 12, 12, 12]


def test_cached_tokens_count_the_prompt_once() -> None:
    """A request that waits for pages looks its prefix up at every step; one that gives way comes back to
    more.
    """
    engine = make_engine(tiny_target("llama"), num_blocks=8)
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    prompt = list(range(3, 12))
    engine.add_request(prompt, SamplingParams(max_tokens=12, **greedy))
    drain(engine)
    engine.add_request(list(range(30, 50)), SamplingParams(max_tokens=10, **greedy), request_id="long")
    engine.step()
    engine.add_request(prompt, SamplingParams(max_tokens=20, **greedy), request_id="again")
    assert drain(engine)["again", 0].stats.cached_tokens == 0  # the long one has written over them meanwhile

    script(plain("greedy"))
    for key, result in run(tiny_target("llama"), drafting(requests_of("greedy"), 4), num_blocks=40).items():
        prompts = {r.id: len(r.prompt) for r in requests_of("greedy")}
        assert result.stats.cached_tokens < prompts[key[0]]


# reasons


@pytest.mark.parametrize(
    ("engine", "fields", "reason"),
    [
        ({"method": "ngram"}, {"method": "off"}, "off_request"),
        ({"method": "ngram"}, {"num_speculative_tokens": 0}, "off_request"),
        ({"method": "off"}, None, "off_config"),
        ({"method": "off"}, {"num_speculative_tokens": 3}, "off_config"),
        ({"method": "ngram", "num_speculative_tokens": 0}, None, "off_config"),
    ],
)
def test_no_speculation_says_who_turned_it_off(
    engine: dict[str, Any], fields: dict[str, Any] | None, reason: str
) -> None:
    result = run(tiny_target("llama"), [replace(request(), speculation=fields)], speculation=engine)["r", 0]
    assert dict(result.stats.reasons) == {reason: LAST - 1} and not result.stats.rounds
    assert result.tokens == text()


def test_a_request_overrides_the_engine() -> None:
    script({("r", 0): text()}, lambda position: False)
    off = {"method": "off", "num_speculative_tokens": 2}
    result = run(
        tiny_target("llama"), [replace(request(), speculation={"method": "scripted"})], speculation=off
    )["r", 0]
    assert set(result.stats.drafted_at) == {0, 1} and result.tokens == text()
    engine = {"method": "scripted", "num_speculative_tokens": 2}
    drafted = replace(request(), speculation={"num_speculative_tokens": 5})
    result = run(tiny_target("llama"), [drafted], speculation=engine)["r", 0]
    assert set(result.stats.drafted_at) == set(range(5)) and result.tokens == text()


@pytest.mark.parametrize(
    ("changed", "fields", "positions", "reason"),
    [
        ({"num_speculative_tokens": 3}, {}, 3, None),
        ({}, {}, 4, None),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 5}, 5, None),
        ({"method": "off"}, {}, 0, "off_config"),
        ({"method": "off"}, {"method": "scripted", "num_speculative_tokens": 2}, 2, None),
        ({"num_speculative_tokens": 0}, {}, 0, "off_config"),
    ],
)
def test_changed_defaults_count_as_those_of_the_engine(
    changed: dict[str, Any], fields: dict[str, Any], positions: int, reason: str | None
) -> None:
    """Also what a request cannot say: that K is not set."""
    script({("r", 0): text()}, lambda position: True)
    engine = {"method": "scripted", "num_speculative_tokens": 2, "policy": "fixed"}
    defaults = SpeculationConfig(**{"method": "scripted", "policy": "fixed"} | changed)
    drafted = replace(request(), speculation={**fields, "defaults": defaults})
    result = run(tiny_target("llama"), [drafted], speculation=engine)["r", 0]
    assert len(result.stats.drafted_at) == positions and result.tokens == text()
    assert reason is None or dict(result.stats.reasons) == {reason: LAST - 1}


def test_without_pages_a_draft_shrinks_and_takes_none_from_a_neighbour() -> None:
    """Two texts fill the pool to the last slot: drafts get what is left over."""
    truth = plain("greedy")
    script(truth, lambda position: True)
    requests = drafting(requests_of("greedy")[:2], 16)
    pages = sum(-(-(len(r.prompt) + 8) // 4) for r in requests)
    requests = [replace(r, params=r.params.model_copy(update={"max_tokens": 8})) for r in requests]
    results = run(tiny_target("llama"), requests, num_blocks=pages)
    assert all(r.tokens == truth[key][:8] and r.stats.preemptions == 0 for key, r in results.items())
    truth = plain("sampled")
    script(truth)
    results = run(tiny_target("llama"), drafting(requests_of("sampled"), 16), num_blocks=30)
    assert sum(r.stats.reasons["no_pages"] for r in results.values()) > 0
    assert {key: r.tokens for key, r in results.items()} == truth


@pytest.mark.parametrize(
    ("lengths", "pages", "granted"),
    [
        pytest.param((7, 7), 6, [4, 4], id="two free pages for two that want eight"),
        pytest.param((7, 5), 4, [0, 2], id="no free page, and half of an own one"),
    ],
)
def test_pages_are_shared_out_among_the_drafts(
    lengths: tuple[int, int], pages: int, granted: list[int]
) -> None:
    script({}, lambda position: True)
    engine = make_engine(tiny_target("llama"), num_blocks=pages, prefix_cache=False)
    for i, length in enumerate(lengths):
        speculation = {"method": "scripted", "num_speculative_tokens": 8}
        params = SamplingParams(temperature=0, max_tokens=9)
        engine.add_request([5 + i] * length, params, speculation, request_id=f"r{i}")
    engine.step()
    with engine.runtime.reserve(engine.scheduler.plan()) as step:
        assert [grant.drafts for grant in step.grants] == granted
    engine.check_integrity()


def test_a_draft_fits_into_pages_that_the_sequence_holds_already() -> None:
    """No page is free, but the last one held is nearly empty."""
    script({("r", 0): text()}, lambda position: False)
    result = run(tiny_target("llama"), [request(max_tokens=9)], block_size=16, num_blocks=1)["r", 0]
    assert (
        result.tokens == text()[:9]
        and result.stats.drafted_at.total() == 6
        and not result.stats.reasons["no_pages"]
    )


def broken(method: str) -> Callable[..., Any]:
    """A proposer whose `method` raises at its third call."""

    def build(config: Any, facts: Any) -> Scripted:
        proposer, calls = Scripted({}, lambda position: False), 0
        original = getattr(proposer, method)

        def fail(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= 3:
                raise RuntimeError("planted")
            return original(*args)

        setattr(proposer, method, fail)
        return proposer

    return build


def drafts_of(*drafts: Any) -> Callable[..., Any]:
    def build(config: Any, facts: Any) -> Scripted:
        proposer = Scripted({})
        proposer.propose = lambda seqs, budgets: list(drafts)  # type: ignore[method-assign]
        return proposer

    return build


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(broken("propose"), id="propose raises"),
        pytest.param(broken("observe"), id="observe raises"),
        pytest.param(drafts_of(Draft((96,), ("x",))), id="a token beyond the vocabulary"),
        pytest.param(drafts_of(Draft((-1,), ("x",))), id="a negative token"),
        pytest.param(drafts_of(Draft((1.5,), ("x",))), id="no token at all"),  # type: ignore[arg-type]
        pytest.param(drafts_of(Draft((1,), ("x",), match="3")), id="a match of letters"),  # type: ignore[arg-type]
        pytest.param(drafts_of(Draft((1,), ("x",), stop="tired")), id="a stop of its own"),  # type: ignore[arg-type]
        pytest.param(drafts_of(None), id="no draft at all"),
        pytest.param(drafts_of(), id="too few drafts"),
        pytest.param(drafts_of(Draft((1,), ("x",)), Draft((1,), ("x",))), id="too many drafts"),
    ],
)
def test_a_faulty_proposer_costs_only_speculation(
    factory: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    register("faulty", factory)
    result = run(tiny_target("llama"), [request({"method": "faulty"})])["r", 0]
    assert result.tokens == text()
    assert result.stats.reasons["error"] > 0 and "planted" in caplog.text or "faulty" in caplog.text
    check_account(result)


@pytest.mark.parametrize("method", ["admit", "release"])
def test_a_proposer_may_fail_when_a_sequence_begins_or_ends(method: str) -> None:
    register("faulty", broken(method))
    truth = plain("greedy")
    requests = [replace(r, speculation={"method": "faulty"}) for r in requests_of("greedy")]
    results = run(tiny_target("llama"), requests, max_num_seqs=2)
    assert {key: r.tokens for key, r in results.items()} == truth


# the account
