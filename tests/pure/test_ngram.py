from __future__ import annotations

import random

import pytest

from speculon.speculation.proposers.ngram import Index, NGram
from tests.builders import make_sequence


def naive(tokens: list[int], k: int, lo: int, hi: int) -> tuple[tuple[int, ...], int]:
    """The draft, and the length of its match."""
    for order in range(min(hi, len(tokens)), lo - 1, -1):
        for at in range(len(tokens) - 1, order - 1, -1):
            if tokens[at - order : at] == tokens[-order:]:
                period = len(tokens) - at
                return tuple(tokens[at + i % period] for i in range(k)), order
    return (), 0


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([1, 2, 3, 4], (), id="nothing repeats"),
        pytest.param([1, 2, 3, 4, 1, 2], (3, 4, 1), id="what followed"),
        pytest.param([1, 2, 8, 1, 2, 9, 1, 2], (9, 1, 2), id="most recent wins"),
        pytest.param([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], (8, 1, 2), id="longest wins over most recent"),
        pytest.param([7, 7, 7], (7, 7, 7), id="a match at the end repeats itself"),
    ],
)
def test_lookup(tokens: list[int], expected: tuple[int, ...]):
    index = Index(2, 4)
    index.extend(tokens)
    assert index.lookup(tokens, 3)[0] == expected


@pytest.mark.parametrize("seed", range(4))
def test_the_index_equals_a_scan_however_the_text_grows(seed: int):
    chance = random.Random(seed)
    tokens: list[int] = []
    index = Index(1, 4)
    while len(tokens) < 200:
        tokens += [chance.randrange(4) for _ in range(chance.randrange(1, 6))]
        index.extend(tokens)
        assert index.lookup(tokens, 5) == naive(tokens, 5, 1, 4)


def test_ngram_serves_many_sequences_and_forgets_them():
    ngram = NGram(1, 3)
    a, b = make_sequence([1, 2, 1]), make_sequence([3, 4, 5])
    for seq in (a, b):
        ngram.admit(seq)
    drafts = ngram.propose([a, b], [2, 2])
    assert [d.tokens for d in drafts] == [(2, 1), ()] and drafts[0].sources == ("ngram", "ngram")
    for seq in (a, b):
        ngram.release(seq)
    assert not ngram.index


def test_a_longer_match_is_believed_more():
    ngram = NGram(1, 4)
    a, b = make_sequence([1, 2, 1]), make_sequence([1, 2, 3, 4, 1, 2, 3])
    for seq in (a, b):
        ngram.admit(seq)
    drafts = ngram.propose([a, b], [2, 1])
    assert [d.confidence for d in drafts] == [(0.5, 0.5), (0.75,)] and [d.match for d in drafts] == [1, 3]
