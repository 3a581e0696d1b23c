"""Acceptance estimates: what was judged is believed, and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from speculon.speculation.control.acceptance import PRIOR, Acceptance, SequenceAcceptance


def learned(truth: float, rounds: int = 400, k: int = 8, seed: int = 1) -> Acceptance:
    random, known = Random(seed), Acceptance()
    for _ in range(rounds):
        accepted = next((i for i in range(k) if random.random() >= truth), k)
        known.observe(min(accepted + 1, k), accepted)
    return known


def test_what_was_never_judged_counts_for_nothing() -> None:
    known, blind = Acceptance(), Acceptance()
    for _ in range(50):
        known.observe(3, 2)
        blind.observe(8, 2)  # planted: what follows the first rejected draft counts as rejected
    assert known.chance(5) == pytest.approx(known.chance(15)) and known.chance(5) > blind.chance(5) + 0.3
    assert known.chance(0) > 0.9 and known.chance(2) < 0.1


def test_an_accepted_draft_lengthens_the_match_of_the_next() -> None:
    """So the second draft after a match of two, and the first one after three, are one place."""
    known, long = Acceptance(), Acceptance()
    for _ in range(60):
        known.observe(2, 1, match=2)
        long.observe(1, 1, match=40)
    assert known.chances(1, match=3) == [known.chances(2, match=2)[1]]
    assert known.chances(1, match=3)[0] < 0.1 < 0.9 < known.chances(1, match=2)[0]
    assert long.chances(16, match=63) == long.chances(16, match=40), "a long match has one place"


def test_optimism_ends_with_experience() -> None:
    first, known = Acceptance().survival()[0], learned(0.5, 4000, k=1)
    assert first > PRIOR + 0.1, "nothing is known: it is tried"
    assert known.survival()[0] == pytest.approx(known.chance(0), abs=0.01)


def test_survival_is_the_product_of_the_chances() -> None:
    known = learned(0.8, 4000)
    survival = known.survival()
    assert list(survival) == sorted(survival, reverse=True)
    assert survival[1] == pytest.approx(known.chance(0) * known.chance(1), rel=0.05)


def test_a_class_begins_with_what_is_known_of_all() -> None:
    wider = learned(0.2)
    inner = Acceptance(wider)
    assert inner.chance(0) == pytest.approx(wider.chance())
    for _ in range(300):
        inner.observe(1, 1)
    assert inner.chance(0) > 0.9 and wider.chance(0) > 0.8, "the class tells all of them, too"


def test_a_sequence_that_departs_from_its_class_is_found_out() -> None:
    known, good, bad = learned(0.8, 1000), SequenceAcceptance(), SequenceAcceptance()
    for number in range(60):
        bad.observe(known.chances(1), int(number % 5 == 4))
        good.observe(known.chances(4), 4)
    assert bad.shift < 0 < good.shift
    assert known.chances(1, shift=bad.shift)[0] < 0.5 < 0.85 < known.chances(1, shift=good.shift)[0]
    assert known.chances(1, shift=SequenceAcceptance().shift)[0] == known.chance(0)


def test_one_draft_of_a_sequence_hardly_moves_it() -> None:
    one = SequenceAcceptance()
    one.observe(learned(0.8).chances(1), 0)
    assert -1 <= one.shift <= 0


def test_acceptance_outlives_a_process() -> None:
    known, again = learned(0.7), Acceptance()
    again.restore(known.state())
    assert [again.chance(i) for i in range(8)] == pytest.approx([known.chance(i) for i in range(8)], abs=0.02)
    assert again.survival()[0] < Acceptance().survival()[0] + 0.1
