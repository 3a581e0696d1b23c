"""What an advice computes, without a model: rounds walked over drafts, costs, thresholds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.advise.maths import (
    Cascade,
    DraftTrace,
    Fit,
    RecordedDraft,
    TimedRound,
    Walk,
    best,
    bootstrap_fits,
    break_even,
    by_position,
    dearest_draft,
    estimate,
    speed,
    total,
    walk,
)
from speculon.advise.plan import AdvisePlan
from speculon.control.acceptance import FADE, Acceptance
from speculon.core import Proposal
from speculon.errors import InvalidParameter

DRAFT, LOOK = Cascade("draft_model", ("draft_model",)), Cascade("suffix", ("suffix",))
BOTH = Cascade("auto", ("suffix", "draft_model"))
KS = (1, 2, 3, 4, 6, 8)
BATCHES = (1, 2, 4, 8)
PROMPT = 20

Drafts = list[dict[str, RecordedDraft]]


def rounds_of(
    draft: float,
    row: float = 0.05,
    more: float = 0.3,
    batches: Sequence[int] = BATCHES,
    read: float = 0.0,
    also: Sequence[str] = (),
) -> list[TimedRound]:
    """A plain step of one sequence takes 10 ms; a draft, a row, a sequence more and a token read cost shares
    of it. No noise.
    """
    found = []
    for batch, k, stride in [
        (b, k, s) for b in batches for k in (0, 0, *KS) for s in (1, 2) if s == 1 or k and b > 1
    ]:
        n = batch // stride * bool(k)
        calls = {"draft_model": Proposal(n, k, 10 * draft * k), "suffix": Proposal(n, k, 0.01)} if k else {}
        calls |= {name: calls["draft_model" if name == "liar" else "suffix"] for name in also if k}
        found += [TimedRound(batch, n, n * k, 10 * (1 + more * (batch - 1)) + 10 * row * n * k, calls)] * 3
    first = {"draft_model": Proposal(1, 1, 10 * draft + 10 * read * PROMPT, PROMPT)}
    return found + [TimedRound(1, 1, 1, 10 * (1 + row), first)] * (6 * bool(read))


def fit_of(draft: float, **more: float) -> Fit:
    return Fit.of(rounds_of(draft, **more), random.Random(0))


def texts_of(
    acceptance: float, method: str = "draft_model", texts: int = 6, length: int = 200, k: int = 8
) -> list[Drafts]:
    """Whether the draft of a position is right depends on that position alone."""
    rng = random.Random(1)
    found: list[Drafts] = []
    for _ in range(texts):
        right = [rng.random() < acceptance for _ in range(length)]
        found.append([{method: draft_at(right[at : at + k])} for at in range(length)])
    return found


def draft_at(right: list[bool]) -> RecordedDraft:
    return RecordedDraft(len(right), (right + [False]).index(False))


def estimates(drafts: list[Drafts], cascades: list[Cascade], ks: Sequence[int], rounds: list[TimedRound]):
    return estimate([DraftTrace(PROMPT, text) for text in drafts], cascades, ks, [1], bootstrap_fits(rounds))


def walked(drafts: Drafts, chain: Sequence[str], k: int) -> Walk:
    return walk(DraftTrace(PROMPT, drafts), chain, k, Acceptance(fade=1.0))


# rounds


def test_a_walk_goes_over_what_is_accepted_and_one_token_more() -> None:
    text: Drafts = [{"a": RecordedDraft(3, 2)}, {}, {}, {"a": RecordedDraft(4, 4)}, {}, {}, {}, {}, {}]
    acceptance = Acceptance(fade=1.0)
    done = walk(DraftTrace(PROMPT, text), ["a"], 4, acceptance)
    assert done == Walk(
        rounds=3, tokens=9, drafting=2, drafts=7, accepted=6, calls=(3,), unread=(PROMPT + 1,)
    )
    assert by_position(acceptance) == [1, 1, 0.5, 1] and acceptance.rate() == 6 / 7
    assert done.tokens_per_call == 3


def test_the_end_of_a_text_judges_nothing_beyond_it() -> None:
    acceptance = Acceptance(fade=1.0)
    walk(DraftTrace(PROMPT, [{"a": RecordedDraft(4, 2)}, {}]), ["a"], 4, acceptance)
    assert by_position(acceptance) == [1, 1]


def test_a_chain_asks_the_next_where_the_first_has_nothing() -> None:
    text: Drafts = [
        {"b": RecordedDraft(2, 1)},
        {"a": RecordedDraft(1, 1), "b": RecordedDraft(2, 2)},
        {"a": RecordedDraft(2, 0), "b": RecordedDraft(2, 2)},
        {},
    ]
    done = walked(text, ["a", "b"], 2)
    assert (done.rounds, done.tokens, done.calls) == (3, 4, (3, 2))
    whole = total([done, done])
    assert (whole.rounds, whole.tokens, whole.calls, whole.unread) == (
        6,
        8,
        (6, 4),
        tuple(2 * n for n in done.unread),
    )


def test_a_drafter_reads_the_prompt_and_what_others_drafted() -> None:
    """A lookup has the draft at the second token: the drafter reads the three tokens of that round when it is
    next asked.
    """
    text: Drafts = [
        {"b": RecordedDraft(2, 0)},
        {"a": RecordedDraft(2, 2)},
        {},
        {},
        {"b": RecordedDraft(2, 0)},
    ]
    assert walked(text, ["a", "b"], 2).unread[1] == PROMPT + 3
    every_time: Drafts = [{"b": RecordedDraft(2, 0)}] * 5
    assert walked(every_time, ["b"], 2).unread == (PROMPT,)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=40))
def test_a_walk_counts_every_token_once(k: int, drafts: list[tuple[int, int]]) -> None:
    left = len(drafts)
    text = [
        {"a": RecordedDraft(n, min(n, right, left - i))} if n else {} for i, (n, right) in enumerate(drafts)
    ]
    done = walked(text, ["a"], k)
    assert done.tokens == left and 1 <= done.rounds <= left
    assert done.tokens - done.rounds <= done.accepted <= done.drafts and done.drafting <= done.rounds


def test_a_mean_over_all_positions_is_too_high() -> None:
    """The twin of walking: half of the text is hard, and rounds begin mostly in that half."""
    hard = {"a": RecordedDraft(4, 0)}
    text = [{"a": RecordedDraft(4, min(4, max(0, 50 - i)))} if i < 50 else hard for i in range(100)]
    naive = mean(1 + here["a"].accepted for here in text)
    assert walked(text, ["a"], 4).tokens_per_call < 0.6 * naive


def test_nothing_is_discounted_in_an_advice() -> None:
    kept, fading = Acceptance(fade=1.0), Acceptance()
    for hits in (1,) * 100 + (0,) * 100:
        for one in (kept, fading):
            one.observe(1, hits)
    assert kept.rate() == 0.5 and fading.rate() < FADE**99


# costs


def test_the_fit_is_what_was_measured() -> None:
    fit = fit_of(draft=0.1)
    for batch in BATCHES:
        assert fit.costs.step(batch) == pytest.approx(10 * (1 + 0.3 * (batch - 1)), rel=0.02)
        assert fit.full_round(["draft_model"], batch, 4) == pytest.approx(
            fit.costs.step(batch) + 2 * batch + 4, rel=0.02
        )
    assert fit.misfit(rounds_of(0.1)) < 0.01 and fit.misfit(rounds_of(0.1, row=0.5)) > 0.1


def test_the_speed_is_tokens_times_plain_over_drafting_and_verification() -> None:
    fit = fit_of(draft=0.1)
    done = total(walked(text, DRAFT.methods, 4) for text in texts_of(0.8))
    found = speed(done, DRAFT, 4, 1, fit)
    assert found.plain_ms == pytest.approx(10, rel=0.01)
    assert found.verify_ms == pytest.approx(10 + 0.5 * done.drafts / done.rounds, rel=0.01)
    assert found.draft_ms == pytest.approx(4, rel=0.02) and found.read_ms == 0
    assert found.ratio == found.tokens_per_call * found.plain_ms / found.round_ms
    assert done.tokens_per_call == pytest.approx(expected_tokens(0.8, 4), rel=0.05)


def test_reading_the_prompt_has_its_price() -> None:
    rounds = rounds_of(draft=0.1, read=0.01)
    done = total(walked(text, DRAFT.methods, 4) for text in texts_of(0.8, length=20))
    found = speed(done, DRAFT, 4, 1, Fit.of(rounds, random.Random(0)))
    assert found.read_ms == pytest.approx(0.1 * done.unread[0] / done.rounds, rel=0.1) and found.read_ms > 0.2


def test_of_many_sequences_few_ask_a_drafter_that_comes_second() -> None:
    fit = fit_of(draft=0.2)
    alone, rarely = fit.proposal_ms("draft_model", 1.0, 8, 4), fit.proposal_ms("draft_model", 0.05, 8, 4)
    assert alone == pytest.approx(8, rel=0.02) and rarely == pytest.approx(8 * (1 - 0.95**8), rel=0.05)
    assert fit.proposal_ms("draft_model", 0.0, 8, 4) == 0


def test_a_step_is_a_mean_over_who_drafts() -> None:
    fit = fit_of(draft=0.2)
    drafting = Walk(rounds=100, tokens=200, drafting=50, drafts=200, accepted=100, calls=(100,), unread=(0,))
    # 4 sequences, 2 rows of each on average
    assert fit.step_ms(4, drafting) == pytest.approx(19 + 0.5 * 4 * 2, rel=0.02)
    assert fit.step_ms(4, drafting._replace(drafting=0, drafts=0)) == fit.costs.step(4)


# thresholds

round_costs = st.lists(st.floats(0.01, 3), min_size=1, max_size=8).map(
    lambda more: [1 + sum(more[: i + 1]) for i in range(len(more))]
)


def expected_tokens(acceptance: float, k: int) -> float:
    """E = sum_{i=0..K} a^i."""
    return sum(acceptance**i for i in range(k + 1))


def pays(a: float, costs: list[float]) -> bool:
    return any(expected_tokens(a, k) > cost for k, cost in enumerate(costs, 1))


@given(round_costs)
def test_break_even_lies_between_what_does_not_pay_and_what_does(costs: list[float]) -> None:
    found = break_even(costs)
    if found is None:
        assert not pays(1.0, costs)
        return
    a, k = found
    assert not pays(max(0.0, a - 1e-6), costs)
    if a < 1 - 1e-6:
        assert pays(a + 1e-6, costs) and expected_tokens(a + 1e-6, k) > costs[k - 1] * (1 - 1e-9)


@pytest.mark.parametrize("draft", [0.1, 0.3])
def test_a_draft_may_cost_what_makes_the_speed_one(draft: float) -> None:
    """At that cost speculation is as fast as plain: a little cheaper pays, a little dearer does not."""
    texts = texts_of(0.7)
    most = dearest_draft(estimates(texts, [DRAFT], KS, rounds_of(draft)))
    assert 0.1 < most < 1
    for cost, faster in ((most * 0.97, True), (most * 1.03, False)):
        assert (best(estimates(texts, [DRAFT], KS, rounds_of(cost))).ratio > 1) == faster


def test_among_equals_the_smallest_k_is_best() -> None:
    one = estimates(texts_of(0.5, texts=2), [DRAFT], [1], rounds_of(0.1))[0]
    assert best([replace(one, k=2), one]).k == 1


def test_the_interval_is_wide_where_texts_differ() -> None:
    alike = best(estimates(texts_of(0.7), [DRAFT], [4], rounds_of(0.1)))
    mixed = best(estimates([*texts_of(0.4, texts=3), *texts_of(1.0, texts=3)], [DRAFT], [4], rounds_of(0.1)))
    assert mixed.high - mixed.low > 2 * (alike.high - alike.low) > 0


def test_the_interval_is_wide_where_times_are_noisy() -> None:
    rng = random.Random(0)
    noisy = [one._replace(ms=one.ms * rng.uniform(0.6, 1.4)) for one in rounds_of(0.1)]
    quiet, loud = (best(estimates(texts_of(1.0), [DRAFT], [4], rounds)) for rounds in (rounds_of(0.1), noisy))
    assert loud.high - loud.low > 2 * (quiet.high - quiet.low)


@pytest.mark.parametrize(
    "options, name",
    [({"at_once": 3}, "at_once"), ({"k": 0}, "num_speculative_tokens"), ({"k": 65}, "num_speculative_tokens"),
     ({"concurrency": (0,)}, "concurrency"), ({"repeats": -1}, "repeats")],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(options: dict, name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name} = "):
        AdvisePlan(**options)
