"""The synthetic proposer hits the acceptance it is asked for, from texts it has seen."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.config import SamplingParams, SpeculationConfig
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.synthetic import Synthetic
from tests.builders import make_sequence

VOCAB = 50
TEXT = [(7 * i * i + 3) % VOCAB for i in range(400)]


def build(acceptance: float) -> Synthetic:
    return Synthetic.build(SpeculationConfig(synthetic_acceptance=acceptance), TargetFacts(VOCAB, 1000))


def write(proposer: Synthetic, text: list[int], **fields: Any) -> None:
    """A text runs to its end."""
    seq = make_sequence([1, 2, 3], **fields)
    proposer.admit(seq)
    seq.tokens.extend(text)
    proposer.release(seq)


def ask(proposer: Synthetic, seq: Sequence, k: int) -> Draft:
    (draft,) = proposer.propose([seq], [k])
    return draft


def sampled(seed: int) -> dict[str, Any]:
    return {"params": SamplingParams(temperature=1.0, max_tokens=9), "seed": seed}


def test_an_unknown_text_has_no_draft() -> None:
    proposer, seq = build(1.0), make_sequence([1, 2, 3])
    proposer.admit(seq)
    assert not ask(proposer, seq, 4).tokens


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_each_position_is_true_as_often_as_wanted(acceptance: float) -> None:
    proposer = build(acceptance)
    write(proposer, TEXT)
    seq = make_sequence([1, 2, 3])
    proposer.admit(seq)
    right = [0] * 4
    for at in range(len(TEXT) - 4):
        draft = ask(proposer, seq, 4)
        assert (
            len(draft.tokens) == 4
            and set(draft.sources) == {"synthetic"}
            and all(0 <= t < VOCAB for t in draft.tokens)
        )
        right = [
            n + (token == TEXT[at + i]) for i, (n, token) in enumerate(zip(right, draft.tokens, strict=True))
        ]
        seq.tokens.append(TEXT[at])
    assert all(abs(n / (len(TEXT) - 4) - acceptance) < (0.08 if 0 < acceptance < 1 else 1e-9) for n in right)


def test_a_draft_ends_with_the_remembered_text() -> None:
    proposer = build(1.0)
    write(proposer, TEXT[:5])
    seq = make_sequence([1, 2, 3], output=TEXT[:3])
    proposer.admit(seq)
    assert ask(proposer, seq, 4).tokens == tuple(TEXT[3:5])


def test_texts_of_other_seeds_and_samples_are_other_texts() -> None:
    proposer = build(1.0)
    write(proposer, [10, 11], **sampled(1))
    write(proposer, [20, 21], **sampled(2))
    write(proposer, [30, 31], **sampled(1), sample=1)
    for fields, text in [
        (sampled(1), (10, 11)),
        (sampled(2), (20, 21)),
        (sampled(1) | {"sample": 1}, (30, 31)),
        (sampled(3), ()),
    ]:
        seq = make_sequence([1, 2, 3], **fields)
        proposer.admit(seq)
        assert ask(proposer, seq, 2).tokens == text


def test_a_greedy_text_does_not_depend_on_the_seed() -> None:
    proposer = build(1.0)
    write(proposer, [10, 11], seed=1)
    seq = make_sequence([1, 2, 3], seed=2)
    proposer.admit(seq)
    assert ask(proposer, seq, 2).tokens == (10, 11)


def test_an_aborted_text_does_not_replace_a_longer_one() -> None:
    proposer = build(1.0)
    write(proposer, TEXT[:9])
    write(proposer, TEXT[:2])
    seq = make_sequence([1, 2, 3])
    proposer.admit(seq)
    assert len(ask(proposer, seq, 9).tokens) == 9


def test_it_remembers_a_bounded_number_of_texts() -> None:
    proposer = Synthetic(1.0, VOCAB, max_texts=3)
    for seed in range(10):
        write(proposer, [seed], **sampled(seed))
    assert len(proposer.truth) == 3 and not proposer.keys
