"""What the policy `goodput` does to tokens per ms, and what it decides, in scenes without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from random import Random
from statistics import mean
from typing import Any

import pytest

from speculon.core.types import Ask, Decision, Draft, Load, Reason
from speculon.decoding.rounds import Budget
from speculon.speculation.control.cost import Costs, Prices
from speculon.speculation.control.fixed import Fixed
from speculon.speculation.control.goodput import Goodput
from tests.builders import budget_of, decisions, make_sequence
from tests.simulate import (
    SimulatedMethod,
    SimulatedSequence,
    SimulationResult,
    SyntheticEnvironment,
    simulate,
)

# measured with the demo pair, one thread: ms of a step, of a lookup, of two draft models
STEP: Callable[[int, int], float] = lambda texts, drafts: 4.0 + 0.55 * (texts - 1) + 0.27 * drafts  # noqa: E731
LOOKUP: Callable[[int, int], float] = lambda texts, k: 0.02 * texts  # noqa: E731
MODEL: Callable[[int, int], float] = lambda texts, k: (0.45 + 0.03 * texts) * k  # noqa: E731
DEAR: Callable[[int, int], float] = lambda texts, k: 0.2 + (1.0 + 0.22 * texts) * k  # noqa: E731
KS = (1, 2, 3, 4, 6, 8, 12, 16)  # fixed numbers of drafts
READ = 0.022  # ms of a token that the draft model has not read

Accept = Callable[[int, int], float]  # (round, sequence) -> P(a draft is accepted | those before it were)


def world(
    accept: Accept, texts: Callable[[int], int] = lambda number: 1, **more: Any
) -> SyntheticEnvironment:
    return SyntheticEnvironment(STEP, {"model": SimulatedMethod(accept, MODEL)}, texts, **more)


def run(scene: Any, rounds: int, seed: int = 0, costs: Costs | None = None) -> SimulationResult:
    """The policy in a scene, with a cost model of its own."""
    costs = costs or Costs()
    return simulate(Goodput(costs), scene, rounds, seed, costs)


def fixed(make: Callable[[int], SyntheticEnvironment], rounds: int, first: int) -> float:
    """The rate of the best fixed K of a few in a simulation."""
    return max(simulate(Fixed(), make(k), rounds).rate(first) for k in (1, 2, 4, 8))


def expected(accepts: list[float], k: int, ms: Callable[[int, int], float] = MODEL) -> float:
    """The expected rate of a fixed K for sequences whose drafts are accepted with these probabilities."""
    texts, tokens = len(accepts), sum((1 - accept ** (k + 1)) / (1 - accept) for accept in accepts)
    return tokens / (STEP(texts, texts * k) + ms(texts, k))


def best_fixed(accepts: list[float], ms: Callable[[int, int], float] = MODEL) -> float:
    return max(expected(accepts, k, ms) for k in KS)


def plain(texts: int) -> float:
    return texts / STEP(texts, 0)


def test_a_fixed_number_of_drafts_has_the_expected_rate() -> None:
    played = simulate(Fixed(), world(lambda number, text: (0.9, 0.4)[text % 2], lambda _: 4, most=6), 2000)
    assert played.rate() == pytest.approx(expected([0.9, 0.4] * 2, 6), rel=0.02)


def check_rate(accept: float, texts: int, seeds: int) -> None:
    rounds, best = 2000 if texts == 1 else 800, max(plain(texts), best_fixed([accept] * texts))
    rates = [run(world(lambda *_: accept, lambda _: texts), rounds, seed).rate(200) for seed in range(seeds)]
    assert mean(rates) > 0.95 * best and min(rates) > 0.92 * best


# the soak has the other three
@pytest.mark.parametrize(("accept", "texts"), [(0.3, 1), (0.6, 8), (0.95, 1)])
def test_it_comes_close_to_the_best_fixed_number_of_drafts(accept: float, texts: int) -> None:
    check_rate(accept, texts, seeds=2)


def test_a_useless_drafter_costs_next_to_nothing() -> None:
    assert run(world(lambda *_: 0.02), 3000).rate(200) > 0.99 * plain(1)
    harm = simulate(Fixed(), world(lambda *_: 0.02, most=4), 500).rate()
    assert harm < 0.9 * plain(1), "fixed, it does harm"


def test_a_drafter_that_collapses_is_out_soon() -> None:
    played = run(world(lambda number, _: 0.8 if number < 500 else 0.0), 800)
    assert all(played.drafted[480:500]) and sum(map(bool, played.drafted[540:])) < 15
    assert played.rate(500) > 0.93 * plain(1)


def late(seeds: range) -> list[int]:
    """Where it took more than 400 rounds: how long a drafter waited that accepts again."""
    waited = []
    for seed in seeds:
        played = run(world(lambda number, _: 0.0 if number < 1000 else 0.8), 1405, seed)
        waited.append(next((i for i in range(401) if all(played.drafted[1000 + i : 1005 + i])), 401))
    return [rounds for rounds in waited if rounds >= 400]


def test_a_drafter_that_recovers_is_used_again_within_400_rounds() -> None:
    assert not late(range(2))


def test_sequences_that_differ_are_told_apart() -> None:
    """Half of the sequences accept 0.9, half 0.2: no fixed K serves both."""
    accept: Accept = lambda number, text: 0.9 if text % 2 else 0.2  # noqa: E731
    assert run(world(accept, lambda _: 4), 2000).rate(200) > 1.1 * best_fixed([0.9, 0.2] * 2)


PHASES = {1: 2500, 64: 250}  # sequences -> rounds


def swinging(texts: Callable[[int], int]) -> SyntheticEnvironment:
    return SyntheticEnvironment(STEP, {"model": SimulatedMethod(lambda *_: 0.8, DEAR)}, texts)


def swing(first: int, seeds: int) -> list[float]:
    """Mean rate in each phase of a load that swings, over the better of plain and best fixed there."""
    phases = [first, 65 - first] * 2
    ends = list(accumulate(PHASES[texts] for texts in phases))
    scene = swinging(
        lambda number: next(texts for texts, end in zip(phases, ends, strict=True) if number < end)
    )
    runs = [run(scene, ends[-1], seed) for seed in range(seeds)]
    return [
        mean(one.rate(end - PHASES[t], end) for one in runs) / max(plain(t), best_fixed([0.8] * t, DEAR))
        for t, end in zip(phases, ends, strict=True)
    ]


def test_load_that_swings_is_followed() -> None:
    assert min(swing(first=64, seeds=1)) > 0.94  # the soak begins with one sequence, too


class OneSize(Costs):
    """Planted: whatever the batch, a step is priced as that of one sequence."""

    def step(self, sequences: int, drafting: float = 0, rows: float = 0, branches: float = 0) -> float:
        return super().step(1, int(drafting > 0), rows, branches)


def test_the_cost_of_the_wrong_batch_size_would_be_seen() -> None:
    scene = world(lambda *_: 0.8, lambda _: 8)
    best = best_fixed([0.8] * 8)
    assert run(scene, 1000, costs=OneSize()).rate(200) < 0.95 * best < run(scene, 1000).rate(200)


def bent_ms(texts: int, drafts: int) -> float:
    return 21.0 + 0.3 * texts + 0.8 * max(0, texts + drafts - 8)


def bent(texts: Callable[[int], int], most: int = 16, accept: float = 0.7) -> SyntheticEnvironment:
    """Rows are free up to 8 in all."""
    return SyntheticEnvironment(bent_ms, {"model": SimulatedMethod(lambda *_: accept, MODEL)}, texts, most)


def test_rows_that_are_free_alone_and_cost_in_a_batch_are_priced_at_both_sizes() -> None:
    """The load changes in every 60th round."""
    runs = [run(bent(lambda number: 1 if number // 60 % 2 else 8), 720, seed) for seed in range(2)]
    for texts in (1, 8):
        fastest = max(simulate(Fixed(), bent(lambda _: texts, k), 300).rate() for k in (1, 2, 4, 6))  # noqa: B023
        rounds = [one for played in runs for one in played.rates[120:] if one[0] == texts]
        rate = sum(tokens for _, tokens, _ in rounds) / sum(ms for _, _, ms in rounds)
        assert rate > 0.95 * max(texts / bent_ms(texts, 0), fastest)


def test_rows_beside_those_of_prompts_are_not_free() -> None:
    costs = Costs()
    policy = Goodput(costs)
    simulate(policy, bent(lambda number: 1 + number % 4, accept=0.3), 400, costs=costs)
    two = [make_sequence([1, 2, 3], methods=("model",), k=16) for _ in range(2)]
    alone = [max(one.k for one in decisions(policy, two, Load(2, 0, 9))) for _ in range(4)]
    beside = [decisions(policy, two[:1], Load(2, 0, 9))[0].k for _ in range(4)]
    assert 0 < max(beside) < max(alone)


def test_fewer_drafts_than_pay_are_weighed_as_they_are() -> None:
    """Not as the first nodes of a larger tree, which is deeper."""
    costs = Costs()
    policy = Goodput(costs)
    # of this seed: after other rounds a chain may seem better than a tree
    simulate(policy, world(lambda *_: 0.6), 200, seed=2, costs=costs)
    policy._running.clear()  # simulated sequences may have the same ids
    few, many = (
        budget_of(make_sequence([1], methods=("model",), k=k, branching=frozenset({"model"})))
        for k in (3, 16)
    )
    ((fewer,), (more,)) = (policy.decide([budget], Load(1, 0, 9))[0].asks for budget in (few, many))
    assert fewer.k < more.k and fewer.depth < more.depth
    assert policy.confirm("model", {many: Ask("model", fewer.k, more.depth)}) == {many: fewer}


class Inverted(Costs):
    """Planted: the sign of the price is wrong, so that rows and proposals seem to bring time."""

    def rows(self, sequences: int, beside: int, drafting: int, most: int) -> list[float]:
        return [-ms for ms in super().rows(sequences, beside, drafting, most)]

    def prices(self, method: str, sequences: int) -> Prices:
        return Prices(*(-price for price in super().prices(method, sequences)))


def test_the_wrong_sign_of_the_price_would_be_seen() -> None:
    assert run(world(lambda *_: 0.02), 1000, costs=Inverted()).rate(200) < 0.9 * plain(1)


def short(read_ms: float, most: int = 16) -> SyntheticEnvironment:
    """Eight sequences of a long prompt and 16 tokens at once, one after the other."""
    return SyntheticEnvironment(
        STEP,
        {"model": SimulatedMethod(lambda *_: 0.9, DEAR, read_ms)},
        lambda _: 8,
        most,
        prompt=256,
        length=16,
    )


def test_a_sequence_too_short_for_the_prefill_of_a_drafter_is_left_alone() -> None:
    assert run(short(READ), 1200).rate(300) > 0.98 * plain(8)
    assert fixed(lambda k: short(READ, k), 1200, 300) < 0.9 * plain(8), "fixed, it does harm"


def test_where_reading_is_free_the_same_sequences_are_drafted_for() -> None:
    best = fixed(lambda k: short(0.0, k), 1200, 300)
    assert best > 1.05 * plain(8) and run(short(0.0), 1200).rate(300) > 0.97 * best


class Patchy(SyntheticEnvironment):
    """The lookup has nothing in every other round, and much in the others."""

    def draft(self, number: int, text: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
        return (
            Draft() if method == "lookup" and number % 2 else super().draft(number, text, method, k, random)
        )


def test_a_dear_model_fills_the_gaps_of_a_lookup_only_where_that_pays() -> None:
    lookup, model = (
        SimulatedMethod(lambda *_: 0.98, LOOKUP, lookup=True),
        SimulatedMethod(lambda *_: 0.95, DEAR),
    )
    best = max(
        fixed(lambda k, ways=ways: Patchy(STEP, ways, lambda _: 1, most=k), 1500, 300)  # type: ignore[misc]
        for ways in ({"lookup": lookup, "model": model}, {"lookup": lookup})
    )
    assert run(Patchy(STEP, {"lookup": lookup, "model": model}, lambda _: 1), 1500).rate(300) > 0.97 * best


def test_lookups_that_find_nothing_are_asked_ever_more_rarely() -> None:
    calls: list[int] = []

    class Empty(SyntheticEnvironment):
        def draft(self, number: int, text: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
            calls.append(number)
            return Draft()

    played = run(
        Empty(STEP, {"lookup": SimulatedMethod(lambda *_: 0.0, LOOKUP, lookup=True)}, lambda _: 8), 1200
    )
    early, late = (len({number for number in calls if first <= number < first + 100}) for first in (0, 1000))
    assert early > 20 and 0 < late <= 100 / 12, "they are asked together, and never given up"
    assert played.rate(600) > 0.99 * plain(8)


class Gaps(SyntheticEnvironment):
    """Where the lookup has nothing the model is right, and the lookup has something behind its draft."""

    acceptance = 0.9

    def draft(self, number: int, text: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
        return Draft() if method == "lookup" else super().draft(number, text, method, min(k, 2), random)

    def chain(self, number: int, text: SimulatedSequence, draft: Draft, k: int, random: Random) -> Draft:
        fate = tuple(int(random.random() < self.acceptance) for _ in range(k))
        return draft.chain(Draft(fate, ("lookup",) * k, confidence=(0.5,) * k))


class Wrong(Gaps):
    acceptance = 0.05


def chained(scene: type[Gaps], chain: bool | None = None) -> SimulationResult:
    class Asking(scene):  # type: ignore[valid-type, misc]
        def batches(self) -> Any:
            for running in super().batches():
                for text in running:
                    text.chained = chain
                yield running

    ways = {
        "lookup": SimulatedMethod(lambda *_: 0.0, LOOKUP, lookup=True),
        "model": SimulatedMethod(lambda *_: 0.8, MODEL),
    }
    return run(Asking(STEP, ways, lambda _: 1), 1000)


def tails(played: SimulationResult) -> float:
    """Chained drafts per round that were verified."""
    return sum(drafted["lookup"] for drafted in played.drafted[200:]) / len(played.drafted[200:])


def test_drafts_are_chained_where_that_pays() -> None:
    good, never, bad = chained(Gaps), chained(Gaps, chain=False), chained(Wrong)
    assert good.rate(200) > 1.15 * never.rate(200) and tails(never) == 0 < 2 < tails(good)
    assert bad.rate(200) > 0.96 * chained(Wrong, chain=False).rate(200) and tails(bad) < 0.5


def test_a_cold_start_measures_before_it_asks_many() -> None:
    costs = Costs()
    policy, seqs = Goodput(costs), [make_sequence([1, 2, 3], methods=("model",)) for _ in range(8)]
    assert {decision.reason for decision in decisions(policy, seqs, Load(8, 0, 9))} == {Reason.COLD}
    costs.observe_step(8, 0, 0, 8.0)
    assert sum(decision.k > 0 for decision in decisions(policy, seqs, Load(8, 0, 9))) == 1, (
        "a new method is tried on one"
    )


def decide(costs: Costs, accept: float, texts: int, rounds: int = 300) -> list[Decision]:
    """What is decided for so many sequences after rounds in which drafts were accepted so."""
    policy = Goodput(costs)
    simulate(
        policy,
        SyntheticEnvironment(STEP, {"model": SimulatedMethod(lambda *_: accept, DEAR)}, lambda _: texts),
        rounds,
        costs=costs,
    )
    seqs = [make_sequence([1, 2, 3], methods=("model",)) for _ in range(texts)]
    found: list[Decision] = []
    for _ in range(40):  # probes draft now and then
        found = decisions(policy, seqs, Load(texts, 0, 9))
        if not any(one.k for one in found):
            break
    return found


@pytest.mark.parametrize(
    ("accept", "texts", "reason"),
    [
        (0.02, 1, Reason.LOW_ACCEPTANCE),
        (0.02, 8, Reason.LOW_ACCEPTANCE),
        (0.8, 64, Reason.LOAD),
        (0.8, 1, None),
    ],
)
def test_the_reason_is_the_one_that_keeps_a_model_out(
    accept: float, texts: int, reason: Reason | None
) -> None:
    assert {one.reason for one in decide(Costs(), accept, texts)} == {reason}


def test_a_model_too_dear_for_any_acceptance_is_refused_for_its_cost() -> None:
    costs = Costs()
    policy = Goodput(costs)
    simulate(
        policy,
        SyntheticEnvironment(
            STEP, {"model": SimulatedMethod(lambda *_: 1.0, lambda texts, k: 9.0 * k)}, lambda _: 1
        ),
        300,
        costs=costs,
    )
    seqs = [make_sequence([1, 2, 3], methods=("model",))]
    assert Reason.COST in {decisions(policy, seqs, Load(1, 0, 9))[0].reason for _ in range(3)}


class Noting(Goodput):
    """Notes the reasons of its plain rounds."""

    def __init__(self, costs: Costs):
        super().__init__(costs)
        self.reasons: Counter[Reason | None] = Counter()

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        decided = super().decide(budgets, load)
        self.reasons.update(decision.reason for decision in decided)
        return decided


def test_lookups_out_of_turn_are_a_cooldown() -> None:
    costs, lookup = Costs(), SimulatedMethod(lambda *_: 0.0, LOOKUP, lookup=True)
    policy = Noting(costs)
    simulate(policy, SyntheticEnvironment(STEP, {"lookup": lookup}, lambda _: 1), 300, costs=costs)
    reasons = policy.reasons
    assert set(reasons) == {None, Reason.COLD, Reason.COOLDOWN} and reasons[Reason.COLD] == 1
    assert reasons[Reason.COOLDOWN] > reasons[None] > 10


def test_what_was_learned_outlives_a_process() -> None:
    costs, scene, rates = Costs(), world(lambda *_: 0.9), list[tuple[float, float]]()
    policy = Goodput(costs)
    simulate(policy, scene, 1000, costs=costs)
    for seed in range(24):
        again_costs = Costs()
        again = Goodput(again_costs)
        again.restore(policy.state())
        again_costs.restore(costs.state())
        played, fresh = simulate(again, scene, 20, seed, again_costs), run(scene, 20, seed)
        assert all(played.drafted) and not all(fresh.drafted), "it drafts from the first round on"
        rates.append((played.rate(), fresh.rate()))
    assert mean(played for played, _ in rates) > 1.02 * mean(fresh for _, fresh in rates)
