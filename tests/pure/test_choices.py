"""What `auto` learns of drafts that it chose itself, and when it does not choose anew."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.control.auto import AGAIN, Auto
from speculon.control.estimate import Share, grades_of
from speculon.control.known import KEPT_TOKENS, WANTED, Method
from speculon.control.timing import Timing
from speculon.core import Draft, Load, Reason, Sequence, Span, Verdict
from tests.builders import make_sequence


@pytest.mark.parametrize("confidence", [None, (0.8,) * 3], ids=["says nothing", "is confident"])
def test_drafts_of_fixed_modes_are_a_beginning_that_ones_own_soon_outweigh(confidence: tuple[float, ...] | None) -> None:
    """A fixed mode drafts copies, too, which look-ups would have had; what they have nothing for is harder to guess."""
    model, three, one = Method(), grades_of(confidence, 3), grades_of(confidence, 1)
    for _ in range(200):
        model.of_others("greedy").observe(three, 3)
    before = model.of("greedy").survival(0, 3)
    assert before == pytest.approx(model.of_others("greedy").survival(0, 3)) and before[0] > 0.95, "nothing of its own yet"
    for _ in range(20):
        model.of("greedy").observe(one, 0)
        model.of_others("greedy").observe(three, 3)
    assert model.of("greedy").survival(0, 1)[0] < 0.3 and model.of_others("greedy").survival(0, 1)[0] > 0.95


def test_where_nothing_is_its_own_it_is_told_at_once_what_others_have_seen() -> None:
    model = Method()
    before = model.of("greedy").survival(0, 1)[0]
    for _ in range(50):
        model.of_others("greedy").observe([0], 0)
    assert model.of("greedy").survival(0, 1)[0] < 0.1 < before


@pytest.mark.parametrize("costly", [True, False])
def test_of_whom_a_draft_was_decides_what_it_tells_where_choice_makes_a_difference(costly: bool) -> None:
    auto, mine, other = Auto(), make_sequence([1], method="model"), make_sequence([1], method="model")
    auto.costs.restore([4.0, 0.5, 0.1, 0.2])
    auto._know("model").cost.restore([9.0 if costly else 0.01, 0.0, 0.0, 0.0])
    auto.decide([mine], Load(2, 0, 9))
    spans = [Span(seq, 0, 1, Draft((1,), ("model",))) for seq in (mine, other)]
    auto.observe(spans, [Verdict((1,), 0), Verdict((1, 1), 1)], Timing(9.0, {}, 0.0))
    model = auto.methods["model"]
    seen = [one.state()["seen"] for one in (model.of(""), model.of_others(""), model.acceptance)]
    assert seen == ([1, 1, 2] if costly else [2, 0, 2])
    auto.costs_alone()
    assert not auto.methods["model"].of("").state()["seen"]


def test_reading_is_shared_by_the_drafts_that_texts_really_want() -> None:
    model = Method()
    assert model.comes("code") == 1.0
    model.ended("code", Share(0.0, WANTED))
    assert model.comes("code") == 0.5 and model.comes("prose") == 1.0
    for _ in range(50):
        model.ended("code", Share(30.0, 10.0))
    assert model.comes("code") == 1.0


@pytest.mark.parametrize("asked", [False, True])
def test_what_texts_wanted_is_held_against_the_price_of_reading_the_next_one_and_no_other(asked: bool) -> None:
    auto, seq = Auto(), make_sequence([1] * 300, max_tokens=64, method="model", k=4)
    auto.costs.restore([4.0, 0.5, 0.1, 0.2])
    model = auto._know("model")
    model.cost.restore([1.0, 1.0, 0.0, 0.02])
    auto.decide([seq], Load(1, 0, 9))
    text = auto._texts[seq.id]
    if asked:
        text.ask("model", model, 40.0)
    ((*_, before),) = auto._kinds("model", [(seq, text)], [4])
    for _ in range(50):  # of the other texts each wanted two drafts, where 20 were believed
        model.ended("", Share(2.0, 20.0))
    ((*_, after),) = auto._kinds("model", [(seq, text)], [4])
    assert after == before if asked else after > 4 * before > 0


def test_a_text_that_has_ended_tells_how_many_drafts_it_wanted() -> None:
    auto, seq = Auto(), make_sequence([1], method="model", k=4)
    auto.costs.restore([4.0, 0.5, 0.1, 0.2])
    model = auto._know("model")
    auto.decide([seq], Load(1, 0, 9))
    for _ in range(2):
        auto._texts[seq.id].ask("model", model, 40.0)
    auto.forget(seq)
    assert model.came[""].hits == 2 and model.came[""].tries > 10


def test_a_promise_broken_to_one_text_weighs_more_than_the_same_to_one_of_many() -> None:
    model = Method()
    for texts in (1, 8):
        model.keep(texts, 0.0, KEPT_TOKENS)
    assert model.keeps(1) == 0.5 and model.keeps(8) > 0.85


def test_probes_are_of_texts_for_which_look_ups_have_nothing() -> None:
    auto, seqs = Auto(), [make_sequence([1], max_tokens=99, method="model", k=4) for _ in range(2)]
    auto.costs.restore([4.0, 0.5, 0.1, 0.2])
    auto._know("model").cost.restore([9.0, 9.0, 0.0, 0.0])
    auto.decide(seqs, Load(2, 0, 9))
    auto.methods["model"].saved_ms = 1e9
    auto._texts[seqs[1].id].bare = 1
    plain, probe = auto.decide([*seqs, make_sequence([1], method="model", k=4)], Load(3, 0, 9))[:2]
    assert (plain.k, probe.k) == (0, 2)


class Counting(Auto):
    begun = 0

    def _begin(self, seqs: list[Sequence]) -> Any:
        self.begun += 1
        return super()._begin(seqs)


class Careless(Counting):
    """Planted: every round goes on as the last one."""

    def _goes_on(self, ids: list[int]) -> bool:
        return self.begun > 0


def looking(rounds: int, max_tokens: int = 2000, policy: type[Counting] = Counting) -> tuple[Counting, list[int]]:
    """A text whose look-ups always find one token that stands; how much it asked for in each round."""
    auto, seq, asked = policy(), make_sequence([1], max_tokens=max_tokens, method="suffix", k=8), []
    auto.costs.restore([4.0, 0.5, 0.1, 0.3])
    auto._know("suffix").cost.restore([0.05, 0.0, 0.0, 0.0])
    for _ in range(rounds):
        (decision,) = auto.decide([seq], Load(1, 0, 9))
        asked.append(decision.k)
        assert decision.k < seq.room
        draft = auto.trim(seq, "suffix", Draft((1,), ("suffix",))) if decision.k else Draft()
        span = Span(seq, len(seq.tokens) - 1, 1, draft)
        wrote = (1,) * (1 + len(draft.tokens))
        auto.observe([span], [Verdict(wrote, len(draft.tokens))], Timing(4.9, {}, 0.05))
        seq.tokens += wrote
    return auto, asked


def test_a_round_that_asks_like_the_last_one_is_not_decided_anew() -> None:
    auto, asked = looking(40)
    assert set(asked) == {8} and 40 / AGAIN <= auto.begun <= 40 / AGAIN + 8


def test_where_a_text_nears_its_end_each_round_is_decided_anew() -> None:
    auto, asked = looking(5, max_tokens=12)
    assert asked == [8, 8, 7, 5, 3] and auto.begun == 4
    with pytest.raises(AssertionError):
        looking(5, max_tokens=12, policy=Careless)


def test_what_texts_add_is_known_of_in_rounds_that_go_on() -> None:
    auto, _ = looking(AGAIN + 2)
    (text,) = auto._texts.values()
    now = auto._round
    before, now.hoped[1], now.kept_tokens = now.tokens, ("suffix", 1.0, 1.0, 1.0), 2.0
    now.passed.add(1)
    text.cheap.tokens += 1.0
    now.again([text])
    assert now.tokens > before + 0.9 and not (now.hoped or now.passed or now.kept_tokens)


def test_a_text_whose_method_failed_is_asked_no_more() -> None:
    auto, seq = Counting(), make_sequence([1], max_tokens=2000, method="suffix", k=8)
    auto.costs.restore([4.0, 0.5, 0.1, 0.3])
    auto._know("suffix").cost.restore([0.05, 0.0, 0.0, 0.0])
    while auto.begun == 0 or auto.decide([seq], Load(1, 0, 9))[0].k == 0:
        auto.decide([seq], Load(1, 0, 9))
    seq.methods, seq.off = (), Reason.ERROR
    (decision,) = auto.decide([seq], Load(1, 0, 9))
    assert (decision.k, decision.reason) == (0, Reason.ERROR)
