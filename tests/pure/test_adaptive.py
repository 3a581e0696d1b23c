"""The lookahead follows its formulas to the letter; the policy feeds it what a round is evidence of."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.config import EngineConfig, RequestSpeculation, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.core.types import Draft, Load, Timing, Verdict
from speculon.decoding.rounds import Judged
from speculon.decoding.sequence import Sequence
from speculon.speculation.control.adaptive import Adaptive, AdaptiveConfig, AdaptiveLookahead
from tests.builders import decisions, judged_of, make_sequence

ALONE = Load(1, 0, 100)
Rounds = list[tuple[int, int]]  # proposed, accepted


def reference(config: AdaptiveConfig, rounds: Rounds) -> list[tuple[int, float, int]]:
    """(lookahead, mean, updates) after each round, written down once more and rounded in decimals."""
    found, mean, looks, updates, lookahead = [], 0.0, config.cooldown_steps, 0, config.initial
    for number, (proposed, accepted) in enumerate(rounds):
        reached = min(proposed, accepted)
        mean = reached if number == 0 else config.alpha * reached + (1 - config.alpha) * mean
        if looks > 0:
            looks -= 1
        else:
            rounded = int(Decimal(mean + 1).quantize(Decimal(1), rounding=ROUND_HALF_UP))
            rounded = sorted((config.min, rounded, config.max))[1]
            updates, lookahead, looks = updates + (rounded != lookahead), rounded, config.cooldown_steps
        found.append((lookahead, mean, updates))
    return found


def followed(
    kind: type[AdaptiveLookahead], config: AdaptiveConfig, rounds: Rounds
) -> list[tuple[int, float, int]]:
    lookahead, found = kind(config), []
    for one in rounds:
        lookahead.observe(*one)
        found.append((lookahead.lookahead, lookahead.mean_accepted, lookahead.updates))
    return found


@st.composite
def configs(draw: st.DrawFn) -> AdaptiveConfig:
    low = draw(st.integers(1, 8))
    high = draw(st.integers(low, 20))
    alpha = draw(st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.5, 1.0]) | st.floats(0, 1))
    return AdaptiveConfig(
        initial=draw(st.integers(low, high)),
        min=low,
        max=high,
        alpha=alpha,
        cooldown_steps=draw(st.integers(0, 5)),
    )


ROUNDS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 25)), max_size=60)


@given(configs(), ROUNDS)
def test_the_formulas_hold(config: AdaptiveConfig, rounds: Rounds) -> None:
    assert followed(AdaptiveLookahead, config, rounds) == reference(config, rounds)


class Bankers(AdaptiveLookahead):
    """Planted: rounds a half to the even number."""

    def observe(self, proposed: int, accepted: int) -> None:
        before = self._cooldown
        super().observe(proposed, accepted)
        if not before:
            self.lookahead = max(self.config.min, min(self.config.max, round(self.mean_accepted + 1)))


HALVES: Rounds = [(4, 2), (4, 1), (4, 2), (4, 1)]


def test_a_planted_error_in_the_formulas_is_seen() -> None:
    config = AdaptiveConfig(initial=4, min=1, max=10, alpha=0.5, cooldown_steps=0)
    assert followed(AdaptiveLookahead, config, HALVES) == reference(config, HALVES)
    assert followed(Bankers, config, HALVES) != reference(config, HALVES)


def test_reset_is_as_new() -> None:
    follow = AdaptiveLookahead()
    assert (follow.lookahead, follow.mean_accepted, follow.observations, follow.updates) == (5, 0.0, 0, 0)
    for _ in range(9):
        follow.observe(2, 2)
    assert follow.updates == 1 and follow.mean_accepted == 2.0
    follow.reset()
    assert vars(follow) == vars(AdaptiveLookahead())
    with pytest.raises(ValueError, match="proposed = 4, accepted = -1"):
        follow.observe(4, -1)


WRONG = [
    ("min", 0, {}, "greater than or equal to 1"),
    ("max", 1, {}, "at least min, 2"),
    ("initial", 13, {}, "from min, 2, to max, 12"),
    ("alpha", 1.1, {}, "less than or equal to 1"),
    ("alpha", float("nan"), {}, "less than or equal to 1|greater than"),
    ("cooldown_steps", -1, {}, "greater than or equal to 0"),
]


@pytest.mark.parametrize(("name", "value", "more", "limit"), WRONG)
def test_a_wrong_setting_is_named_wherever_it_is_said(
    name: str, value: Any, more: dict[str, Any], limit: str
) -> None:
    with pytest.raises(InvalidParameter, match=limit) as caught:
        AdaptiveConfig(**{name: value, **more})
    assert caught.value.name == name
    settings = {f"adaptive_{key}": said for key, said in {name: value, **more}.items()}
    with pytest.raises(InvalidParameter, match=limit) as caught:
        SpeculationConfig(**settings)
    assert caught.value.name == f"adaptive_{name}"
    with pytest.raises(ConfigError, match=rf"^speculation.adaptive_{name} = "):
        EngineConfig(speculation=settings)


def test_the_settings_reach_the_policy() -> None:
    config = SpeculationConfig(
        adaptive_initial=4, adaptive_min=2, adaptive_max=10, adaptive_alpha=0.3, adaptive_cooldown_steps=2
    )
    assert config.adaptive == AdaptiveConfig(initial=4, min=2, max=10, alpha=0.3, cooldown_steps=2)
    assert SpeculationConfig().adaptive == AdaptiveConfig()
    assert (config.most("adaptive"), config.most("fixed")) == (10, 4)
    assert SpeculationConfig(policy="adaptive", num_speculative_tokens=3).most() == 3
    assert RequestSpeculation(policy="adaptive").policy == "adaptive"


# the policy


def text(k: int = 12, **fields: Any) -> Sequence:
    return make_sequence([1, 2, 3], k=k, **fields)


def told(policy: Adaptive, seq: Sequence, drafted: int, accepted: int) -> None:
    draft = Draft((0,) * drafted, ("ngram",) * drafted)
    policy.observe([judged_of(seq, draft, Verdict((0,) * (accepted + 1), accepted))], Timing())


def k_of(policy: Adaptive, seq: Sequence) -> int:
    (decision,) = decisions(policy, [seq], ALONE)
    return decision.k


def test_each_text_has_its_own_lookahead_and_is_forgotten() -> None:
    policy, good, bad = Adaptive(), text(), text()
    assert [k_of(policy, seq) for seq in (good, bad)] == [5, 5]
    for _ in range(30):
        told(policy, good, k_of(policy, good), k_of(policy, good))
        told(policy, bad, k_of(policy, bad), 0)
    assert [k_of(policy, seq) for seq in (good, bad)] == [11, 2]
    policy.forget(good)
    assert policy.lookaheads.keys() == {bad.id} and k_of(policy, good) == 5


def test_a_short_draft_that_stood_does_not_pull_the_mean_down() -> None:
    policy, seq = Adaptive(), text()
    for _ in range(20):
        told(policy, seq, k_of(policy, seq), 4)
    before = policy.lookaheads[seq.id].mean_accepted
    for _ in range(20):
        told(policy, seq, 1, 1)
    assert policy.lookaheads[seq.id].mean_accepted == before
    told(policy, seq, 1, 0)
    assert policy.lookaheads[seq.id].mean_accepted < before, (
        "a short draft that did not stand is a miss like any other"
    )


@pytest.mark.parametrize(
    ("seq", "k"),
    [
        pytest.param(text(k=3), 3, id="the K of the request"),
        pytest.param(text(k=1), 1, id="a K below the minimum"),
        pytest.param(make_sequence([1], max_tokens=3, k=12), 2, id="what max_tokens leaves"),
    ],
)
def test_other_limits_hold_beside_it(seq: Sequence, k: int) -> None:
    assert k_of(Adaptive(), seq) == k


def test_rounds_without_a_draft_leave_it_where_it_is() -> None:
    policy, seq = Adaptive(), text()
    k_of(policy, seq)
    for _ in range(50):
        told(policy, seq, 0, 0)
    assert k_of(policy, seq) == 5 and policy.lookaheads[seq.id].observations == 0
    told(policy, text(), 4, 4)
    assert policy.lookaheads.keys() == {seq.id}, "texts of other policies are none of its own"


# one controller for all sequences


def accepted_in_full(policy: Adaptive) -> None:
    """One round of two sequences; all of their drafts are accepted."""
    seqs = [text(), text()]
    ks = [k_of(policy, seq) for seq in seqs]
    policy.observe(
        [
            judged_of(seq, Draft((0,) * k, ("ngram",) * k), Verdict((0,) * (k + 1), k))
            for seq, k in zip(seqs, ks, strict=True)
        ],
        Timing(),
    )
    for seq in seqs:
        policy.forget(seq)
    assert not policy.lookaheads


def test_a_shared_controller_observes_all_sequences_and_is_kept() -> None:
    shared = AdaptiveLookahead(AdaptiveConfig(initial=3, cooldown_steps=0))
    for _ in range(2):
        accepted_in_full(Adaptive(shared=shared))
    assert (shared.observations, shared.lookahead) == (4, 4)
    own = Adaptive(shared.config)
    accepted_in_full(own)
    assert k_of(own, text()) == 3, "else each sequence has its own"


class OneByOne(Adaptive):
    """Planted: a draft is compared with the window that the sequence before it has changed."""

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        for one in judged:
            super().observe([one], timing)


@pytest.mark.parametrize(("policy", "observations"), [(Adaptive, 2), (OneByOne, 1)])
def test_a_full_draft_is_full_whatever_other_sequences_of_the_round_change(
    policy: type[Adaptive], observations: int
) -> None:
    shared = AdaptiveLookahead(AdaptiveConfig(initial=3, alpha=0.5, cooldown_steps=1))
    shared.observe(12, 8)
    accepted_in_full(policy(shared=shared))
    assert shared.observations == 1 + observations


@pytest.mark.parametrize(
    ("most", "bounds"), [(1, (1, 1, 1)), (3, (3, 2, 3)), (8, (5, 2, 8)), (64, (5, 2, 12))]
)
def test_settings_within_a_limit(most: int, bounds: tuple[int, int, int]) -> None:
    config = AdaptiveConfig(alpha=0.3, cooldown_steps=2).within(most)
    assert (config.initial, config.min, config.max) == bounds and (config.alpha, config.cooldown_steps) == (
        0.3,
        2,
    )
