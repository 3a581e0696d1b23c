"""The account of a text: what adds up, what is shared out, what is said in one line."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.telemetry import EngineCounters, RequestStats, SpeculationStats, log_line
from speculon.core.types import Draft, Finish, Reason, SpanOutcome, Stop, Verdict, no_draft, reasons_in_words

OUTCOMES = {
    0: SpanOutcome.EARLY,
    1: SpanOutcome.EARLY,
    2: SpanOutcome.EARLY,
    3: SpanOutcome.TAIL,
    4: SpanOutcome.FULL,
}


# of one call of `RequestStats.record`
Call = tuple[Draft, Verdict] | tuple[Draft, Verdict, tuple[str, ...], Reason | None]


def speculative(accepted: int, k: int = 4, source: str = "ngram") -> Call:
    verdict = Verdict(tuple(range(accepted + 1)), accepted, OUTCOMES.get(accepted, SpanOutcome.FULL))
    return Draft(tuple(range(k)), (source,) * k), verdict, (source,), None


def plain(reason: Reason = Reason.NO_MATCH, method: str | None = "ngram") -> Call:
    return Draft(), Verdict((7,)), (method,) if method else (), reason


def recorded(*rounds: Call) -> RequestStats:
    stats = RequestStats()
    for one in rounds:
        for method in one[2] if len(one) > 2 else ():
            stats.propose(method, one[0])
        stats.record(*one)
    return stats


PROMPT = (Draft(), Verdict((1,)))
ROUNDS = st.lists(
    st.one_of(
        st.integers(0, 4).map(speculative),
        st.sampled_from([Reason.NO_MATCH, Reason.MAX_TOKENS, Reason.NO_PAGES, Reason.ERROR]).map(plain),
        st.just(PROMPT),
    )
)


def test_without_a_round_drafts_are_zero_and_reasons_are_there() -> None:
    stats = recorded(PROMPT, plain(), plain(Reason.MAX_TOKENS, None))
    done = stats.speculation()
    assert (done.rounds, done.drafted, done.accepted, done.target_calls, done.emitted) == (0, 0, 0, 3, 3)
    assert (done.per_position, done.by_source, done.tokens_per_target_call) == ([], {}, 1.0)
    assert stats.reasons == {"no_match": 1, "max_tokens": 1}
    assert (stats.target_calls, stats.emitted, stats.draft_calls) == (3, 3, 1)


@pytest.mark.parametrize(
    ("finish", "stop_tokens"),
    [
        (Finish("stop", 2), 1),
        (Finish("stop", 0), 1),
        (Finish("stop", "\n"), 0),
        (Finish("length"), 0),
    ],
)
def test_a_stop_token_is_generated_and_not_emitted(finish: Finish, stop_tokens: int) -> None:
    """So plain decoding has one token per target call, however its text ends."""
    last = Verdict(() if stop_tokens else (8,), finish=finish)
    stats = recorded(PROMPT, plain(), (Draft(), last, ("ngram",), Reason.NO_MATCH))
    assert (stats.emitted, stats.stop_tokens) == (3 - stop_tokens, stop_tokens)
    assert stats.tokens_per_target_call == 1.0
    drafted = recorded((Draft((5, 2), ("ngram",) * 2), Verdict((5,), 1, finish=finish), ("ngram",), None))
    assert drafted.generated_from == {"ngram": 1 + stop_tokens}


def test_each_call_of_a_method_is_a_draft_call() -> None:
    """Not each round: a lookup without a match is asked before a model, and that is two calls."""
    drafted = Draft((5, 2), ("draft_model",) * 2)
    stats = recorded(
        PROMPT,
        (drafted, Verdict((5,), 1), ("ngram", "draft_model"), None),
        (Draft(), Verdict((5,)), ("ngram", "draft_model"), Reason.NO_MATCH),
        plain(Reason.COOLDOWN, None),
    )
    done = stats.speculation()
    assert (done.rounds, done.draft_calls, done.target_calls) == (1, 4, 4)


def test_before_any_round_an_account_is_zeros() -> None:
    done = RequestStats().speculation()
    assert (done.rounds, done.drafted, done.draft_calls, done.target_calls) == (0, 0, 0, 0)
    assert (done.acceptance_rate, done.tokens_per_target_call, done.saved_ms) == (0.0, 0.0, None)


def test_the_figures_of_known_rounds() -> None:
    stats = recorded(
        PROMPT, speculative(4), speculative(0), speculative(2), plain(), speculative(1, k=1, source="other")
    )
    done = stats.speculation()
    assert (done.rounds, done.drafted, done.accepted, done.rejected) == (4, 13, 7, 6)
    assert (done.target_calls, done.draft_calls, done.emitted, done.verified_positions) == (6, 5, 13, 19)
    assert (
        done.acceptance_rate == 7 / 13
        and done.tokens_per_target_call == 13 / 6
        and done.mean_accepted_per_round == 7 / 4
    )
    assert done.per_position == [3 / 4, 2 / 3, 1 / 3, 1 / 3]
    assert done.by_source == {"ngram": {"drafted": 12, "accepted": 6}, "other": {"drafted": 1, "accepted": 1}}
    assert done.span_outcomes == {"full": 1, "early": 3}
    assert (stats.rounds_from, stats.generated_from) == ({"ngram": 3, "other": 1}, {"ngram": 9, "other": 2})
    assert set(done.to_dict()) == {field.name for field in fields(SpeculationStats)}


def by_chain(source: str | None, reason: Reason = Reason.NO_MATCH) -> Call:
    """A round in which `ngram` was asked, then `model`; `source` had the draft, or nobody."""
    methods = ("ngram", "model")
    if source is None:
        return Draft(), Verdict((7,)), methods, reason
    return Draft((1, 2), (source,) * 2), Verdict((1,), 0, SpanOutcome.EARLY), methods, None


CHANGES = [
    pytest.param([plain(), plain(), PROMPT, plain()], {}, id="plain all along"),
    pytest.param([PROMPT, speculative(4), speculative(0)], {}, id="one method all along"),
    pytest.param([speculative(4), plain(Reason.COST, None)], {("ngram", "plain", "cost"): 1}, id="given up"),
    pytest.param(
        [plain(Reason.COLD, None), plain(), speculative(1)],
        {("plain", "ngram", "no_match"): 1},
        id="taken up",
    ),
    pytest.param(
        [by_chain("ngram"), by_chain("model")], {("ngram", "model", "no_match"): 1}, id="the next in turn"
    ),
    pytest.param(
        [by_chain("model"), by_chain("ngram")], {("model", "ngram", "earlier"): 1}, id="back to the first"
    ),
    pytest.param(
        [speculative(1), speculative(1, source="other")],
        {("ngram", "other", "cost"): 1},
        id="another is asked",
    ),
    pytest.param(
        [by_chain("ngram"), by_chain(None), by_chain("ngram"), by_chain(None)],
        {("ngram", "plain", "no_match"): 2, ("plain", "ngram", "no_match"): 1},
        id="there and back",
    ),
    pytest.param(
        [by_chain("a word"), by_chain("another"), plain()],
        {("model", "plain", "no_match"): 1},
        id="a plug-in's words",
    ),
]


@pytest.mark.parametrize(("rounds", "changes"), CHANGES)
def test_changes_of_mind_are_counted_by_their_reason(
    rounds: list[Any], changes: dict[tuple[str, str, str], int]
) -> None:
    stats = recorded(*rounds)
    assert stats.changes == changes
    assert sum(one["count"] for one in stats.change_list()) == sum(changes.values())
    total = RequestStats()
    for _ in range(2):
        total.add(stats)
    assert total.changes == {change: 2 * n for change, n in changes.items()} and total.last is None


def test_a_reason_is_a_code_with_a_sentence() -> None:
    assert reasons_in_words({"no_match": 1, "cooldown": 12}) == (
        "cooldown: recent drafts gained less than they cost, so drafting is paused for a while (12 rounds); "
        "no_match: no earlier text matched (1 round)"
    )
    assert len({reason.sentence for reason in Reason}) == len(Reason)
    assert all(len(reason.sentence.split()) > 3 for reason in Reason)
    copy = pickle.loads(pickle.dumps(Reason.COST))
    assert copy is Reason.COST and copy == "cost" == copy.value and f"{copy}" == "cost"


def test_a_joined_draft_is_credited_token_by_token() -> None:
    draft = Draft((1, 2, 3, 4), ("ngram", "ngram", "model", "model"))
    stats = recorded((draft, Verdict((1, 2, 3, 9), 3, SpanOutcome.TAIL), ("ngram",), None))
    assert stats.drafted_from == {"ngram": 2, "model": 2} and stats.accepted_from == {"ngram": 2, "model": 1}


def proposals(*outcomes: tuple[str, Stop | None, int]) -> RequestStats:
    stats = RequestStats()
    for method, stop, match in outcomes:
        stats.propose(method, no_draft(stop, match))
    return stats


PROPOSALS = (
    ("suffix", Stop.LIMIT, 4),
    ("suffix", Stop.LIMIT, 9),
    ("suffix", Stop.NO_MATCH, 0),
    ("suffix", Stop.FACTOR, 4),
    ("model", Stop.LIMIT, 0),
    ("plug-in", None, 0),
    ("plug-in", None, 3),
)


def test_proposals_are_counted_by_how_they_ended_and_by_what_they_matched() -> None:
    stats = proposals(*PROPOSALS)
    assert stats.stops == {"suffix": {"limit": 2, "no_match": 1, "factor": 1}, "model": {"limit": 1}}
    assert stats.matches == {"suffix": {4: 2, 9: 1}, "plug-in": {3: 1}}
    assert stats.proposed.total() == len(PROPOSALS)
    assert {type(stop) for ended in stats.stops.values() for stop in ended} == {str}, (
        "words, as JSON has them"
    )
    total = RequestStats()
    for _ in range(2):
        total.add(stats)
    assert total.stops == {"suffix": {"limit": 4, "no_match": 2, "factor": 2}, "model": {"limit": 2}}
    assert total.matches["suffix"] == {4: 4, 9: 2} and pickle.loads(pickle.dumps(stats)) == stats


@given(ROUNDS)
def test_what_is_recorded_adds_up(rounds: list[Call]) -> None:
    stats = recorded(*rounds)
    assert stats.emitted == sum(len(verdict.tokens) for _, verdict, *_ in rounds)
    assert stats.outcomes.total() == stats.rounds
    assert (
        stats.rounds + stats.reasons.total() + sum(one == PROMPT for one in rounds)
        == stats.target_calls
        == len(rounds)
    )
    assert stats.verified_positions == stats.target_calls + stats.drafted_at.total()
    assert stats.accepted == stats.accepted_at.total() == stats.accepted_from.total()
    done = stats.speculation()
    assert done.drafted == done.accepted + done.rejected


@given(st.lists(ROUNDS, max_size=4))
def test_sums_of_accounts_are_accounts_of_all_rounds(
    parts: list[list[Call]],
) -> None:
    total = RequestStats()
    for part in parts:
        total.add(recorded(*part))
    whole = recorded(*(one for part in parts for one in part))
    assert total.changes <= whole.changes, "where one text ends and another begins nobody changes his mind"
    whole.changes = total.changes
    assert total == whole


def test_adding_leaves_the_added_alone_and_sums_the_times() -> None:
    a, b = recorded(speculative(2)), recorded(speculative(1))
    a.spend(1.0, 4.0, None)
    assert a.saved_ms is None
    b.spend(1.0, 4.0, 6.0)
    a.add(b)
    assert (a.draft_ms, a.verify_ms, a.saved_ms) == (2.0, 8.0, 1.0)
    assert b.rounds == 1 and b.accepted_at == {0: 1}


def test_the_account_of_an_engine_is_plain_data_and_does_not_move() -> None:
    totals = EngineCounters().totals
    assert totals.speculation() == RequestStats().speculation()
    totals.add(recorded(speculative(3), plain()))
    before, changes = totals.speculation(), totals.change_list()
    totals.add(recorded(speculative(3), plain()))
    after = totals.speculation()
    assert before.to_dict()["emitted"] == 5 and before.rounds == 1 and after.rounds == 2
    assert changes == [{"from": "ngram", "to": "plain", "reason": "no_match", "count": 1}]


@pytest.mark.parametrize(
    ("stats", "seconds", "line"),
    [
        (RequestStats(), 0.0, "r-1 0 tok 0.00 s 0.0 tok/s abort"),
        (
            recorded(plain(), plain(Reason.MAX_TOKENS)),
            1.0,
            "r-1 2 tok 1.00 s 2.0 tok/s abort | no_match 1 max_tokens 1",
        ),
        (
            recorded(speculative(4)),
            0.5,
            "r-1 5 tok 0.50 s 10.0 tok/s abort | ngram 100% of 4 drafts 5.00/call",
        ),
    ],
)
def test_one_line_says_it_all(stats: RequestStats, seconds: float, line: str) -> None:
    assert log_line("r-1", stats, seconds, "abort") == line
