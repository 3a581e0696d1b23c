"""What `auto` believes of a round before it decides: what costly methods promise, what steps cost, what may be tried."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any

import pytest

from speculon.control import auto as policy
from speculon.control import known
from speculon.control.auto import PROBE_SHARE, SELDOM, Auto
from speculon.control.estimate import Acceptance, Own, ProposalCost, Share, StepCost
from speculon.control.simulate import Way, World, play
from speculon.control.timing import Timing
from speculon.core import Draft, Load, Proposal, Span, Verdict
from tests.builders import make_sequence
from tests.pure.test_control import MODEL, STEP, plain, world


class Weighing(Auto):
    """Counts how often costly methods are weighed."""

    weighed = 0

    def _offer(self, method: str, group: Any) -> Any:
        self.weighed += 1
        return super()._offer(method, group)


def taught() -> Weighing:
    auto = Weighing()
    play(auto, world(lambda *_: 0.9), 500)
    auto.weighed = 0
    return auto


def test_a_promise_is_believed_for_four_rounds_of_the_same_texts_and_never_beyond_their_room() -> None:
    auto, seq, other = taught(), make_sequence([1], max_tokens=9, method="model", k=8), make_sequence([1], method="model")
    drafts = []
    for _ in range(8):
        (decision,) = auto.decide([seq], Load(1, 0, 9))
        drafts.append(decision.k)
        assert decision.k < seq.room
        seq.tokens.append(1)
    assert auto.weighed == 2 and drafts[0] > drafts[-1], drafts
    auto.decide([seq, other], Load(2, 0, 9))
    assert auto.weighed == 3, "another crowd"


def test_a_method_that_has_become_cheap_is_asked_once() -> None:
    auto, seq = taught(), make_sequence([1], method="model", k=8)
    (before,) = auto.decide([seq], Load(1, 0, 9))
    auto.methods["model"].cost.restore([0.001, 0.0, 0.0, 0.0])
    (after,) = auto.decide([seq], Load(1, 0, 9))
    assert [ask.method for ask in before.asks] == [ask.method for ask in after.asks] == ["model"]


def crooked(texts: int, drafting: int) -> float:
    """Kernels for single rows are faster than any straight line says, and one row more needs the others."""
    return 4.0 + 0.5 * texts - (1.0 if texts == 4 and not drafting else 0.0) + 0.1 * drafting


@pytest.mark.parametrize("drafting", [0, 1, 4])
def test_steps_that_no_sum_fits_are_known_by_themselves(drafting: int) -> None:
    costs = StepCost()
    for i in range(400):
        texts = (1, 4, 8)[i % 3]
        some = (0, min(1, texts), texts)[i // 3 % 3]
        costs.observe(texts, some, 2 * some, crooked(texts, some))
    straight = costs._fit.at((1.0, 4, 0, 0))
    assert costs.at(4, drafting, 2 * drafting) == pytest.approx(crooked(4, drafting), rel=0.03)
    assert straight == pytest.approx(crooked(4, 0) + 0.6, abs=0.4), "a sum alone does not tell"
    assert costs.first(4) + 2 * costs.row == pytest.approx((crooked(4, 4) - crooked(4, 0)) / 4, rel=0.3)


@pytest.mark.parametrize("methods", [("model",), ("model", "head")])
def test_time_for_probes_is_saved_in_rounds_of_its_own_texts_alone_for_all_methods_together(methods: tuple[str, ...]) -> None:
    auto, mine, other = Auto(), make_sequence([1], method="model"), make_sequence([1], method="model")
    mine.methods = methods
    auto.costs.observe(1, 0, 0, 5.0)
    for name in ("model", "head", "of another request"):
        auto._know(name).cost.restore([1.0, 1.0, 0.0, 0.0])
    timing = Timing(10.0, {}, 0.0)
    auto.observe([Span(other, 0, 1)], [Verdict((1,))], timing)
    assert not any(known.saved_ms for known in auto.methods.values())
    auto.decide([mine], Load(1, 0, 9))
    auto.observe([Span(mine, 0, 1)], [Verdict((1,))], timing)
    saved = [auto.methods[name].saved_ms for name in methods]
    assert saved == pytest.approx([10.0 * PROBE_SHARE / len(methods)] * len(methods))
    assert auto.methods["of another request"].saved_ms == 0.0


@pytest.mark.parametrize("beside", [0, 1])
def test_what_drafts_cost_is_followed_in_rounds_of_its_own_texts_alone(beside: int) -> None:
    """A fixed mode may draft alike for all texts and in every round, which is less work."""
    auto, mine, other = Auto(), make_sequence([1], method="model"), make_sequence([1], method="model")
    auto.costs.restore([4.0, 0.5, 0.1, 0.2])
    auto._know("model").cost.restore([1.0, 1.0, 0.0, 0.0])
    auto.decide([mine], Load(1 + beside, 0, 9))
    draft, timing = Draft((1,), ("model",)), Timing(9.0, {"model": Proposal(1 + beside, 1, 4.0)}, 0.0)
    spans = [Span(mine, 0, 1, draft), Span(other, 0, 1, draft)][: 1 + beside]
    auto.observe(spans, [Verdict((1,), 0)] * len(spans), timing)
    assert (auto.costs._beside.get(1 + beside, 1.0) > 1.01) is not beside
    assert (auto.methods["model"].cost._beside.get(1 + beside, 1.0) > 1.01) is not beside


def test_a_text_that_ends_before_its_first_draft_has_kept_nothing() -> None:
    auto, seq = taught(), make_sequence([1], max_tokens=9, method="model", k=8)
    (decision,) = auto.decide([seq], Load(1, 0, 9))
    assert auto.confirm("model", [seq], [decision.k]) != [0]
    kept = auto.methods["model"].kept[1]
    hits, tries = kept.hits, kept.tries
    auto.observe([Span(seq, 0, 1, Draft((1,), ("model",)))], [Verdict((), 0)], Timing(9.0, {"model": Proposal(1, 1, 1.0)}, 0.0))
    assert kept.hits <= hits and kept.tries > tries


def test_a_stall_of_some_calls_is_forgotten() -> None:
    cost = ProposalCost()
    for _ in range(100):
        cost.observe(4, 3, 5.0)
    for _ in range(3):
        cost.observe(4, 3, 25.0)
    assert cost.at(4, 3) < 6.0, "another process took the core"
    for _ in range(200):
        cost.observe(1, 3, 4.0)
    assert cost._beside[4] == pytest.approx(1.0, abs=0.01)


def steady(costs: StepCost, texts: int, drafting: int, ms: float, count: int = 300) -> None:
    for _ in range(count):
        costs.observe(texts, drafting, drafting, ms)


@pytest.mark.parametrize("before, after", [(50.0, 5.0), (5.0, 14.0)], ids=["a cold first step", "a machine that is slower now"])
def test_what_a_plain_step_takes_is_found_again(before: float, after: float) -> None:
    costs = StepCost()
    steady(costs, 1, 0, before, 1 if before > after else 300)
    steady(costs, 1, 0, after)
    assert costs.at(1, 0, 0) == pytest.approx(after, rel=0.05)


def test_what_is_not_measured_for_long_goes_back_to_the_sum() -> None:
    costs = StepCost()
    steady(costs, 1, 0, 9.0)
    steady(costs, 1, 1, 10.0)
    steady(costs, 1, 1, 6.0, 1000)  # twice as fast now, and nothing plain to tell
    assert costs.at(1, 0, 0) < 7.0


def test_a_noisy_cost_is_believed_to_be_its_mean() -> None:
    random, cost = Random(1), ProposalCost()
    taken = [4.0 * random.lognormvariate(0, 0.3) for _ in range(3000)]
    believed = [cost.at(4, 3) for ms in taken if not cost.observe(4, 3, ms)]
    # relative to what was measured, which is what gives slow calls less weight, it would be 12 % less
    assert mean(believed[1000:]) == pytest.approx(mean(taken), rel=0.05)


def test_what_ones_own_calls_of_a_size_take_is_followed_whatever_others_calls_take() -> None:
    """Others draft in every round, as many for each text; a policy that drafts seldom pays more for the same call."""
    cost, blind = ProposalCost(), ProposalCost()
    for number in range(600):
        mine = number % 20 == 0
        for each, own in ((cost, mine), (blind, False)):
            each.observe(4, 3, 6.0 if mine else 4.9, own=own)
    assert cost.at(4, 3) == pytest.approx(6.0, rel=0.05) and blind.at(4, 3) < 5.2


class Credulous(Acceptance):
    """Planted: what a text shows of itself is never taken for luck."""

    trust = 1.0  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Acceptance, Credulous])
def test_luck_of_texts_that_do_not_differ_is_told_from_a_kind_of_their_own(kind: type[Acceptance]) -> None:
    random, of_all = Random(1), kind()
    shifts, texts = [], [Own() for _ in range(16)]
    for number in range(200):
        for own in texts:
            accepted = next((i for i in range(3) if random.random() >= 0.6), 3)
            grades = [0] * min(accepted + 1, 3)
            own.observe(of_all, grades, accepted)
            of_all.observe(grades, accepted)
            shifts += [abs(own.kind(of_all))] * (number > 100)
    assert (mean(shifts) < 0.1) is (kind is Acceptance), mean(shifts)


def test_a_first_call_that_read_much_does_not_make_the_others_cheap() -> None:
    cost = ProposalCost()
    cost.observe(1, 4, 20.0, 3000)
    for _ in range(8):
        cost.observe(1, 4, 12.0)
    assert cost.at(1, 4) > 10


def test_a_drafter_believed_to_be_poor_that_becomes_good_is_news() -> None:
    auto = play(Auto(), world(lambda number, _: 0.3 if number < 2000 else 0.95, lambda _: 8), 4000)
    assert sum(map(bool, auto.drafted[1500:2000])) < 50, "it does not pay"
    assert all(auto.drafted[3000:]), "nobody noticed"


@pytest.mark.parametrize(("debt", "fair"), [(policy.PROBE_DEBT, True), (0.0, False)])
def test_probes_pay_for_what_they_read(debt: float, fair: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 300 unread tokens, one after the other: to try a method on one takes 12 ms of reading."""
    monkeypatch.setattr(policy, "PROBE_DEBT", debt)
    way = Way(lambda *_: 0.0, MODEL, 0.02)
    played = play(Auto(), World(STEP, {"model": way}, lambda _: 4, length=300), 6000)
    assert (sum(map(bool, played.drafted[1000:])) < 25) is fair
    assert played.rate(1000) > 0.97 * plain(4)


@pytest.mark.parametrize("decide_ms", [0.03, 5.0])
def test_look_ups_in_vain_are_rarer_where_being_awake_is_dear_but_never_rarer_than_said(decide_ms: float) -> None:
    auto, seq = Auto(), make_sequence([1], max_tokens=2000, method="suffix", k=8)
    auto.costs.restore([4.0, 0.5, 0.1, 0.3])
    auto._know("suffix").cost.restore([0.05, 0.0, 0.0, 0.0])
    looked = []
    for number in range(400):
        (decision,) = auto.decide([seq], Load(1, 0, 9))
        looked += [number] * bool(decision.k)
        auto.observe([Span(seq, len(seq.tokens) - 1, 1)], [Verdict((1,))], Timing(4.5, {}, decide_ms * (1 + number % 3 / 10)))
        seq.tokens.append(1)
    gaps = [b - a for a, b in pairwise(number for number in looked if number > 200)]
    assert set(gaps) == {SELDOM[decide_ms > 1]}, gaps


def test_a_method_that_broke_its_promises_is_believed_less_until_that_is_forgiven() -> None:
    auto, scene = Auto(), world(lambda *_: 0.9)
    play(auto, scene, 500)
    model = auto.methods["model"]
    assert model.kept[1].tries > 100 and model.keeps(1) > 0.9, "it kept them"
    model.kept[1] = Share(0.0, 1000.0)
    played = play(auto, scene, 4000)
    assert sum(map(bool, played.drafted[:100])) < 10 and all(played.drafted[3900:])
    assert model.keeps(2) == 1.0, "in another crowd nothing was promised"


@pytest.mark.parametrize(("prior", "minds"), [(known.KEPT_TOKENS, True), (1e9, False)])
def test_promises_that_are_always_too_great_are_taken_up_more_seldom(
    prior: float, minds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Acceptance.survival
    monkeypatch.setattr(Acceptance, "survival", lambda *asked: [min(0.99, 2 * chance) for chance in truth(*asked)])
    monkeypatch.setattr(known, "KEPT_TOKENS", prior)
    auto = Auto()
    played = play(auto, world(lambda *_: 0.35, lambda _: 8), 3000)
    assert (sum(map(bool, played.drafted[500:])) < 700) is minds and (auto.methods["model"].keeps(8) < 0.9) is minds
