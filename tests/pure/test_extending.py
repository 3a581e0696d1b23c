"""Chained drafts: a lookup drafts as if the draft before it were committed, and keeps no trace of it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from speculon.core.config import SpeculationConfig
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import Extending, Proposer, TargetFacts
from speculon.speculation.proposers.registry import find_factory
from tests.builders import make_sequence

LOOKUPS = ("suffix", "ngram", "prediction")
LETTERS, K = 6, 8
Made = tuple[Proposer, Sequence]


def made(name: str, text: list[int]) -> Made:
    """A new proposer that has an earlier answer, where it keeps any, and has drafted for a text."""
    proposer = find_factory(name)(SpeculationConfig(), TargetFacts(1000, 4096))
    earlier = make_sequence([1, 2], output=[3, 4, 5, 0, 1, 5, 2, 4], pool="mine")
    proposer.admit(earlier)
    proposer.release(earlier)
    seq = make_sequence(text[:12], output=text[12:], pool="mine", prediction=tuple(text[2:9] * 3))
    proposer.admit(seq)
    drafted(proposer, seq)
    return proposer, seq


def drafted(proposer: Proposer, seq: Sequence) -> tuple[int, ...]:
    return proposer.propose([seq], [K])[0].tokens


def check(name: str, extend: Callable[[Made, tuple[int, ...]], tuple[int, ...]]) -> int:
    """How many of 100 texts had a chained draft.

    Raises AssertionError where that differs from a draft of the written text.
    """
    found = 0
    for seed in range(100):
        chance = Random(seed)
        text = [chance.randrange(LETTERS) for _ in range(40)]
        # no match lies in it: none of it can be indexed
        ahead = tuple(chance.sample(range(LETTERS), chance.randint(1, 4)))
        one, twin = made(name, text), made(name, text)
        tail = extend(one, ahead)
        assert drafted(*one) == drafted(*twin), "nothing of what was ahead is kept"
        twin[1].tokens.extend(ahead)
        assert tail == drafted(*twin)
        found += bool(tail)
    return found


def ask(made: Made, ahead: tuple[int, ...]) -> tuple[int, ...]:
    proposer, seq = made
    assert isinstance(proposer, Extending)
    draft = proposer.extend(seq, ahead, K)
    assert draft.probs is None and len(draft.tokens) <= K
    return draft.tokens


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_goes_on_as_if_the_draft_were_written(name: str) -> None:
    assert check(name, ask) > 33


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_that_writes_it_down_is_found_out(name: str) -> None:
    def write(made: Made, ahead: tuple[int, ...]) -> tuple[int, ...]:
        proposer, seq = made
        seq.tokens.extend(ahead)
        tail = drafted(proposer, seq)
        del seq.tokens[-len(ahead) :]
        return tail

    with pytest.raises((AssertionError, ZeroDivisionError)):  # the index of `ngram` is then ahead of the text
        check(name, write)


def test_a_repetition_that_the_draft_completes_goes_on() -> None:
    """The match lies so near the text's end that what followed it is the draft itself."""
    for name in ("suffix", "ngram"):
        assert ask(made(name, [*range(20, 40), 1, 2]), (3, 1, 2)) == (3, 1, 2, 3, 1, 2, 3, 1)
