"""Suffix decoding equals counting by brute force, and looks no further than it is allowed to."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.types import Stop
from speculon.speculation.proposers import pools as store
from speculon.speculation.proposers import suffix
from speculon.speculation.proposers.pools import END, LONGEST, LOOKS, SEED, Trail, key_of
from speculon.speculation.proposers.suffix import Cutoffs, Suffix
from tests.builders import make_sequence
from tests.pure.test_pools import make

Outcome = tuple[list[int], list[float], int, Stop]  # tokens, confidences, tokens matched, why it ended


# the same by brute force


def brute(own: list[int], answers: list[list[int]], k: int, cutoffs: Cutoffs) -> Outcome:
    """Reads every text from every place, the newest first, as often as it likes."""
    places = [(own, at) for at in range(len(own) - 1, 0, -1)]
    places += [(text, at) for text in reversed(answers) for at in range(len(text) - 1, 0, -1)]
    longest = 0
    for length in range(min(LONGEST, len(own)), SEED - 1, -1):
        after = [
            ((text[at:] * k)[:k] if text is own else text[at : at + k])
            for text, at in places
            if at >= length and text[at - length : at] == own[-length:]
        ]
        first = [what[0] for what in after]
        longest = longest or length * bool(after)
        if first and max(map(first.count, first)) >= cutoffs.min_hits:
            return most_frequent(after, length, k, cutoffs)
    return [], [], longest, Stop.MIN_HITS if longest else Stop.NO_MATCH


def most_frequent(after: list[list[int]], length: int, k: int, cutoffs: Cutoffs) -> Outcome:
    draft: list[int] = []
    confidence = []
    while True:
        i = len(draft)
        if i in (k, max(1, int(cutoffs.factor * length))):
            stop = Stop.LIMIT if i == k else Stop.FACTOR
            break
        nexts = [what[i] for what in after if what[:i] == draft and len(what) > i]
        best = max(nexts, key=nexts.count, default=END)
        if best == END or nexts.count(best) < max(cutoffs.min_hits, cutoffs.min_probability * len(after)):
            rare = Stop.MIN_HITS if nexts.count(best) < cutoffs.min_hits else Stop.MIN_PROBABILITY
            stop = Stop.SOURCE_END if best == END else rare
            break
        draft.append(best)
        confidence.append(nexts.count(best) / (len(nexts) + 1 / (length + i)))
    return draft, confidence, length, stop


def propose(
    own: list[int], answers: list[list[int]], k: int, cutoffs: Cutoffs, cuts: list[int] | None = None
) -> Outcome:
    """By the proposer, for a text that has grown in pieces which end at `cuts`."""
    proposer = Suffix(cutoffs, make(tokens=1000))
    for answer in answers:
        proposer.pools.add(str(key_of("me", [])), answer)
    seq = make_sequence(own[:1], max_tokens=100, pool="me")
    proposer.admit(seq)
    for cut in sorted({1, *(cuts or ()), len(own)}):
        seq.tokens = own[:cut]
        (draft,) = proposer.propose([seq], [k])
    assert set(draft.sources) <= {"suffix"}
    assert draft.stop is not None
    return list(draft.tokens), list(draft.confidence or ()), draft.match, draft.stop


texts = st.lists(st.integers(1, 4), min_size=1, max_size=30)
cutoffs = st.builds(
    Cutoffs, st.sampled_from([0.4, 1.0, 2.5]), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(1, 3)
)


@given(
    texts,
    st.lists(texts, max_size=3).filter(lambda found: sum(map(len, found)) < LOOKS - 4),
    st.integers(1, 9),
    cutoffs,
    st.data(),
)
def test_it_drafts_what_counting_by_brute_force_does(
    own: list[int], answers: list[list[int]], k: int, cutoffs: Cutoffs, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(1, len(own)), max_size=4))
    assert propose(own, answers, k, cutoffs, cuts) == brute(own, answers, k, cutoffs)


def check_long_texts(seed: int) -> None:
    chance = random.Random(seed)
    own, *answers = ([chance.choice([1, 1, 2, 3]) for _ in range(chance.randrange(20, 90))] for _ in range(4))
    for end in range(2, len(own), 3):
        for some in (Cutoffs(), Cutoffs(8.0, 0.3), Cutoffs(1.0, 0.0, 2)):
            assert propose(own[:end], answers, 8, some) == brute(own[:end], answers, 8, some)


@pytest.mark.parametrize("seed", range(3))
def test_long_texts_whose_every_place_is_looked_at(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOOKS", 10**6)
    check_long_texts(seed)


@pytest.mark.parametrize(
    ("own", "answers", "expected"),
    [
        pytest.param([1, 2, 8, 1, 2, 9, 1, 2], [], [9, 1, 2, 9], id="the newest among equals"),
        pytest.param(
            [1, 2, 8, 1, 2, 8, 1, 2, 9, 1, 2], [], [8, 1, 2, 9], id="most often wins over the newest"
        ),
        pytest.param(
            [5, 1, 2, 8, 1, 2, 9, 5, 1, 2], [], [8, 1, 2, 9, 5, 1], id="longest wins over most often"
        ),
        pytest.param([1, 2], [[1, 2], [3, 4]], [], id="not beyond an answer's end"),
        pytest.param([2, 3], [[1, 2], [3, 4]], [], id="nor across it"),
        pytest.param([1, 2, 3, 1, 2], [[1, 2, 4], [1, 2, 4]], [4], id="answers outvote the text"),
    ],
)
def test_what_is_drafted(own: list[int], answers: list[list[int]], expected: list[int]) -> None:
    assert propose(own, answers, 8, Cutoffs(2.0))[0] == expected == brute(own, answers, 8, Cutoffs(2.0))[0]


def shortest(found: Any, min_hits: int) -> Any:
    return min(length for length, _ in found) if found else 0, [what for _, what in found]


def oldest(following: Any, i: int) -> Any:
    return COUNT(following[::-1], i)


def across(trail: Trail, at: int, k: int, ahead: Any = ()) -> Any:
    return [token for token in trail.tokens[at:] if token != END][:k]


def late(trail: Trail, tokens: Any) -> None:
    EXTEND(trail, tokens[1:] if trail.end else tokens)


COUNT, EXTEND = suffix.count, Trail.extend


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (suffix, "choose", shortest),
        (suffix, "count", oldest),
        (Trail, "_from", across),
        (Trail, "extend", late),
        (store, "LOOKS", 3),
    ],
)
def test_another_way_to_choose_is_found_out(
    where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOOKS", 10**6)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((AssertionError, IndexError)):
        check_long_texts(0)


def test_a_search_looks_at_so_many_places_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    trail = Trail(10_000)
    trail.extend([1, 2, 3] * 1000)
    assert len(trail.after([1, 2], 4)) == LOOKS
    assert len(Trail(4).after([1, 2], 4)) == len(trail.after([1], 4)) == len(trail.after([], 4)) == 0
