"""Drafts that are only watched: each is judged once, as verification would have, and the account is the one
it would have had.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.cli.screen import account
from speculon.core.telemetry import EngineCounters, RequestStats, log_line
from speculon.core.types import NO_DRAFT, Draft, Finish, Load, Reason, SpanOutcome, Timing, Verdict
from speculon.decoding.sequence import Sequence
from speculon.speculation.control import shadow as shadow_module
from speculon.speculation.control.policy import Trimmed
from speculon.speculation.control.shadow import WATCHED, Shadow, ShadowPolicy, WatchedDraft
from tests.builders import budget_of, decisions, judged_of, make_sequence

A, B, C, X = 1, 2, 3, 9  # X is never written


def write(shadow: Shadow, seq: Sequence, *tokens: int) -> list[WatchedDraft]:
    """The text goes on by single tokens, as it does where nothing is verified."""
    found = []
    for token in tokens:
        seq.tokens.append(token)
        found += shadow.judge(seq)
    return found


@pytest.mark.parametrize(
    ("draft", "written", "drafted", "accepted", "judged"),
    [
        pytest.param((A, B, C), (A, B, C), 3, 3, 3, id="all accepted"),
        pytest.param((A, B, X), (A, B, C), 3, 2, 3, id="the last differs"),
        pytest.param((X, B, C), (A,), 3, 0, 1, id="the first differs: what follows it was never asked"),
        pytest.param((X, B, C), (A, B, C), 3, 0, 1, id="what agrees behind a difference counts for nothing"),
        pytest.param((A, B, C), (A, B, X), 3, 2, 3, id="the text differs"),
    ],
)
def test_the_fate_of_a_draft(
    draft: tuple[int, ...], written: tuple[int, ...], drafted: int, accepted: int, judged: int
) -> None:
    shadow, seq = Shadow(), make_sequence([A, B])
    shadow.watch(seq, "any", draft)
    assert write(shadow, seq, *written) == [WatchedDraft("any", drafted, accepted, judged, False)]
    assert len(shadow) == 0 and shadow.judge(seq, ended=True) == [], "it is told once"


def test_a_text_that_ends_early_censors_the_rest() -> None:
    shadow, seq = Shadow(), make_sequence([7])
    shadow.watch(seq, "any", (A, B, C))
    assert write(shadow, seq, A, B) == []
    assert shadow.judge(seq, ended=True) == [WatchedDraft("any", 2, 2, 2, False)]


def test_a_draft_of_which_nothing_is_known_is_no_draft() -> None:
    shadow, seq = Shadow(), make_sequence([7])
    shadow.watch(seq, "any", (A, B, C))
    shadow.watch(seq, "any", ())
    assert shadow.judge(seq, ended=True) == [] and len(shadow) == 0


def test_drafts_that_overlap_are_all_judged_and_told_apart() -> None:
    """A draft is accepted at positions 1 to 3; verification would continue at 5, after the bonus token."""
    shadow, seq, truth = Shadow(), make_sequence([7]), [A, B, C, A, B, C, A]
    found = []
    for i in range(4):
        shadow.watch(seq, "any", tuple(truth[i : i + 3]))
        found += write(shadow, seq, truth[i])
    assert [(one.accepted, one.overlaps) for one in found] == [(3, False), (3, True)]
    shadow.watch(seq, "any", (X,))
    found = write(shadow, seq, truth[4], truth[5])
    assert [(one.accepted, one.overlaps) for one in found] == [(3, True), (0, False), (3, True)]


def test_methods_and_texts_do_not_touch_each_other() -> None:
    shadow, one, two = Shadow(), make_sequence([7]), make_sequence([8])
    shadow.watch(one, "lookup", (A, B))
    shadow.watch(one, "model", (A, X))
    shadow.watch(two, "lookup", (B,))
    found = write(shadow, one, A, B)
    assert {(j.method, j.accepted, j.overlaps) for j in found} == {("lookup", 2, False), ("model", 1, False)}
    shadow.forget(one)
    assert len(shadow) == 1 and [j.accepted for j in write(shadow, two, B)] == [1]


def test_several_tokens_at_once_are_judged_as_single_ones_do() -> None:
    shadow, seq = Shadow(), make_sequence([7])
    shadow.watch(seq, "any", (A, B, X))
    seq.tokens += [A, B, C, A]
    assert shadow.judge(seq) == [WatchedDraft("any", 3, 2, 3, False)]


def test_a_step_that_is_repeated_watches_its_draft_once() -> None:
    shadow, seq = Shadow(), make_sequence([7])
    shadow.watch(seq, "any", (A, B))
    shadow.watch(seq, "any", (A, X))
    assert write(shadow, seq, A, B) == [WatchedDraft("any", 2, 1, 2, False)]


def test_what_is_kept_of_a_text_is_bounded() -> None:
    shadow, seq = Shadow(), make_sequence([7])
    for _ in range(3 * WATCHED):  # nobody judges
        shadow.watch(seq, "any", (A,) * 64)
        seq.tokens.append(A)
    assert len(shadow) == WATCHED
    assert len(shadow.judge(seq)) == WATCHED
    for _ in range(3 * WATCHED):  # as the engine does it
        shadow.watch(seq, "any", (A,) * 8)
        write(shadow, seq, A)
        assert len(shadow) <= 8
    shadow.forget(seq)
    assert not shadow._texts


# against verification


@dataclass
class Tale:
    """A text, and what a drafter says at each of its positions."""

    truth: list[int]
    drafts: list[tuple[int, ...]]

    @property
    def verified(self) -> tuple[int, int, int]:
        """Rounds, drafted and accepted of a decoder that verifies each draft it comes to."""
        at, rounds, drafted, accepted = 0, 0, 0, 0
        while at < len(self.truth):
            draft, rest = self.drafts[at], self.truth[at:]
            stood = next((i for i, token in enumerate(draft) if token != rest[i]), len(draft))
            rounds, drafted, accepted = rounds + bool(draft), drafted + len(draft), accepted + stood
            at += stood + 1
        return rounds, drafted, accepted

    def watched(self) -> tuple[int, int, int]:
        policy, seq = ShadowPolicy(), make_sequence([7], max_tokens=len(self.truth))
        for token, draft in zip(self.truth, self.drafts, strict=True):
            if draft:
                proposed = Draft(draft, ("any",) * len(draft))
                budget = budget_of(seq)
                assert policy.trim("any", {budget: proposed}) == {budget: Trimmed(0)}
            seq.tokens.append(token)
            policy.observe([judged_of(seq, verdict=Verdict((token,)))], Timing())
        policy.forget(seq)
        assert not policy.shadow._texts
        done = seq.stats.speculation()
        assert (done.rounds, done.drafted, done.acceptance_rate) == (0, 0, 0.0)
        seen = done.shadow.get("any", {"rounds": 0, "drafted": 0, "accepted": 0})
        return seen["rounds"], seen["drafted"], seen["accepted"]


@st.composite
def tales(draw: st.DrawFn) -> Tale:
    truth = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
    chance = random.Random(draw(st.integers(0, 1000)))
    drafts = []
    for at in range(len(truth)):
        # as far as max_tokens lets a draft go
        rest = truth[at : at + chance.choice([0, 1, 3, 6])][: len(truth) - at - 1]
        drafts.append(tuple(token if chance.random() < 0.8 else 2 - token for token in rest))
    return Tale(truth, drafts)


@given(tales())
def test_the_account_is_that_of_a_decoder_that_verifies(tale: Tale) -> None:
    assert tale.watched() == tale.verified


def one_off(a: tuple[int, ...], b: list[int]) -> int:
    """Planted: compares each draft with the token after its own."""
    return next((i for i, (x, y) in enumerate(zip(a, b[1:], strict=False)) if x != y), min(len(a), len(b)))


def test_a_planted_error_of_comparing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tale = Tale([A, B, C, B, A, C], [(A, X, C), (C,), (X, B), (B, A), (), ()])
    assert tale.watched() == tale.verified
    monkeypatch.setattr(shadow_module, "shared_length", one_off)
    assert tale.watched() != tale.verified


def test_counting_every_draft_flatters_and_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: overlapping drafts counted like rounds. A run of nine counts nine times, a miss once."""
    truth = [A] * 10 + [B, C] * 5
    tale = Tale(truth, [tuple([A] * min(4, len(truth) - at - 1)) for at in range(len(truth))])
    judge = Shadow.judge
    rounds, drafted, accepted = tale.watched()
    assert (rounds, drafted, accepted) == tale.verified
    monkeypatch.setattr(
        Shadow, "judge", lambda *args, **kw: [replace(one, overlaps=False) for one in judge(*args, **kw)]
    )
    _, all_drafted, all_accepted = tale.watched()
    assert all_accepted / all_drafted > 1.2 * accepted / drafted


# the policy and what it tells


def test_it_asks_as_fixed_does_and_says_why_nothing_is_verified() -> None:
    policy, seq = ShadowPolicy(), make_sequence([1], methods=("suffix", "model"), max_tokens=3)
    (decision,) = decisions(policy, [seq], Load(1, 0, 9))
    assert (decision.k, decision.unused, [ask.method for ask in decision.asks]) == (
        2,
        Reason.SHADOW,
        ["suffix", "model"],
    )


def watched_stats() -> RequestStats:
    stats = RequestStats()
    stats.record(NO_DRAFT, Verdict((1,)), ("suffix",), Reason.SHADOW)
    stats.watch("suffix", 4, 3)
    stats.watch("suffix", 2, 0)
    stats.watch("model", 1, 1)
    return stats


SUFFIX = {"rounds": 2, "drafted": 6, "accepted": 3, "per_position": [0.5, 0.5, 1.0, 0.0]}
MODEL = {"rounds": 1, "drafted": 1, "accepted": 1, "per_position": [1.0]}


def test_what_was_watched_is_told_also_where_no_round_ran() -> None:
    stats = watched_stats()
    done = stats.speculation()
    assert done.shadow == {"suffix": SUFFIX, "model": MODEL} and done.rounds == 0
    assert done.to_dict()["shadow"]["suffix"] == SUFFIX
    counters = EngineCounters()
    counters.totals.add(stats)
    counters.totals.add(stats)
    total = counters.totals.speculation()
    assert total.shadow["suffix"] == {**SUFFIX, "rounds": 4, "drafted": 12, "accepted": 6}
    line = log_line("r-1", stats, 1.0, "stop")
    assert line == (
        "r-1 1 tok 1.00 s 1.0 tok/s stop | suffix in shadow 50% of 6 drafts "
        "| model in shadow 100% of 1 drafts | shadow 1"
    )


def test_the_account_in_words() -> None:
    stats = watched_stats()
    line = account(stats.speculation(), stats.reasons)
    assert line.startswith(
        "no speculation: shadow: drafts were measured, not used (1 round); "
        "suffix in shadow: 50% of 6 drafts would have been accepted, 2.50"
    )
    stats.record(Draft((1, 2), ("any",) * 2), Verdict((1, 2, 3), 2, SpanOutcome.FULL), ("suffix",))
    line = account(stats.speculation(), stats.reasons)
    assert line.startswith("any: 4 tokens in 2 target calls") and "suffix in shadow" in line
    stats.record(Draft((1, 2), ("any",) * 2), Verdict((1,), 1, finish=Finish("stop", 2)), ("suffix",))
    line = account(stats.speculation(), stats.reasons)
    assert line.startswith("any: 5 tokens and 1 stop token in 3 target calls, 2.00 per call")
    none = account(RequestStats().speculation(), {})
    assert none == "no speculation: the text ended before the first round"
