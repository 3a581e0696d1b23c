"""What the policy `goodput` expects of lookups."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from speculon.core.types import Draft, Estimate, Load, Timing
from speculon.decoding.rounds import Judged
from speculon.speculation.control import acceptance
from speculon.speculation.control import goodput as module
from speculon.speculation.control.cost import Costs
from speculon.speculation.control.goodput import Goodput
from tests.builders import budget_of, make_sequence
from tests.pure.test_goodput import LOOKUP, STEP, run
from tests.simulate import SimulatedMethod, SimulatedSequence, SyntheticEnvironment


def test_a_sequence_begins_with_the_mean_of_its_class() -> None:
    """Not with the last rounds of those before it, in which more was copied."""
    policy, (first, second) = Goodput(Costs()), (make_sequence([1], seed=seed) for seed in range(2))
    one = policy._stats(budget_of(first))
    for gained in (*(0.0,) * 30, *(8.0,) * 10):
        one.book(module.Added(tokens=gained, gain=gained))
    assert one.added.tokens > 5.0
    policy.forget(first)
    assert policy._stats(budget_of(second)).added.tokens == pytest.approx(2.0)


def drafted_after_a_full_batch() -> int:
    """Of 30 rounds, in the worst of 4 seeds: a sequence whose drafts were rejected beside seven good ones is
    alone, and copies.
    """

    def accept(number: int, text: int) -> float:
        return 0.95 if text else 0.8 * (number >= 80)

    lookup = SimulatedMethod(accept, LOOKUP, lookup=True)
    scene = SyntheticEnvironment(STEP, {"lookup": lookup}, lambda number: 8 if number < 80 else 1)
    return min(sum(map(bool, run(scene, 110, seed).drafted[80:])) for seed in range(4))


class Realised(Goodput):
    """Planted: a lookup gains what its drafts brought in the end, so a rejected one begins a back-off."""

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        super().observe([realised(one) for one in judged], timing)


def realised(judged: Judged) -> Judged:
    if (estimate := judged.drafted.estimate) is None:
        return judged
    brought = Estimate(judged.verdict.accepted, 8 * estimate.price)
    return replace(judged, drafted=replace(judged.drafted, estimate=brought))


def test_rejected_drafts_beside_others_do_not_keep_lookups_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drafted_after_a_full_batch() > 20
    monkeypatch.setattr("tests.pure.test_goodput.Goodput", Realised)
    assert drafted_after_a_full_batch() < 20, "they stay in back-off"


class Matched(SyntheticEnvironment):
    """Drafts of long matches are accepted, those of short ones are not."""

    def draft(self, number: int, text: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
        long = (number + text.id) % 2
        fate = tuple(int(random.random() < (0.95 if long else 0.05)) for _ in range(k))
        return Draft(fate, (method,) * k, match=20 if long else 2)


def test_drafts_of_long_and_short_matches_are_learned_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = SimulatedMethod(lambda *_: 0.0, LOOKUP, lookup=True)
    separate = run(Matched(STEP, {"lookup": lookup}, lambda _: 8), 600).rate(200)
    monkeypatch.setattr(acceptance, "PLACES", (0,) * 48)
    assert separate > 1.05 * run(Matched(STEP, {"lookup": lookup}, lambda _: 8), 600).rate(200)


class Bringing(SyntheticEnvironment):
    """Its sequences have brought along what the lookup drafts."""

    def _sequence(self, number: int) -> SimulatedSequence:
        seq = super()._sequence(number)
        seq.from_request = ("lookup",)
        return seq


@pytest.mark.parametrize("batch", [1, 32])
def test_what_a_request_brings_is_tried_whole_at_once(batch: int) -> None:
    """In its first round with known costs; in a full batch what is always rejected is not tried so again."""
    for accept in (1.0, 0.0):
        lookup = SimulatedMethod(lambda *_, accept=accept: accept, LOOKUP, lookup=True)
        brought = run(Bringing(STEP, {"lookup": lookup}, lambda _: batch, most=12), 60)
        first = next(drafts.total() for drafts in brought.drafted if drafts)
        assert first == 12 * batch
        if not accept and batch > 1:
            assert sum(drafts.total() for drafts in brought.drafted[30:]) < 30 * batch


def known_costs(parts: tuple[float, ...]) -> Costs:
    """T = a + b B + c_0 [M > 0] + c M + d N."""
    costs = Costs()
    costs._step.begin((*parts, 0.0, 0.0, 0.0, 0.0, 0.0), spread=0.1)
    return costs


def verified(costs: Costs, sequences: int, drafting: int, accept: float) -> int:
    """Of `drafting` lookups' drafts of one token, each accepted with this probability."""
    policy = Goodput(costs)
    seqs = [
        make_sequence([1], methods=("lookup",), k=1, lookups=frozenset({"lookup"}), policy="goodput")
        for _ in range(sequences)
    ]
    budgets = [budget_of(seq) for seq in seqs]
    policy.decide(budgets, Load(sequences, 0, 9))
    for budget in budgets:
        for number in range(400):
            policy._running[budget.seq.id].learn("lookup", 1, int(37 * number % 100 < 100 * accept), match=8)
    draft = Draft((1,), ("lookup",), match=8)
    return sum(one.drafts for one in policy.trim("lookup", dict.fromkeys(budgets[:drafting], draft)).values())


@pytest.mark.parametrize(("once", "drafting", "expected"), [(2.0, 1, 0), (2.0, 4, 4), (0.0, 1, 1)])
def test_drafts_of_a_round_bring_what_the_first_one_costs(once: float, drafting: int, expected: int) -> None:
    """Each gains 0.9 - 0.54 tokens, and the first one of a step costs 0.8."""
    assert verified(known_costs((4.0, 2.0, once, 0.0, 1.0)), 8, drafting, 0.9) == expected


@pytest.mark.parametrize(
    ("sequences", "row_ms", "caution", "expected"),
    [(1, 2.4, 0.4, 1), (8, 1.0, 0.4, 0), (8, 1.0, 0.0, 1)],
)
def test_a_draft_that_only_just_pays_is_verified_alone(
    sequences: int, row_ms: float, caution: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is accepted with 0.47, and its row costs 0.4 tokens."""
    monkeypatch.setattr(module, "CAUTION", caution)
    assert verified(known_costs((4.0, 2.0, 0.0, 0.0, row_ms)), sequences, 1, 0.47) == expected
