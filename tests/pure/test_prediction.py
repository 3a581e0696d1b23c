"""The cursor over a prediction: it follows any edit, finds its place within two rounds, and drafts nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.config import MAX_PREDICTION, RequestSpeculation, SpeculationConfig
from speculon.core.errors import InvalidParameter
from speculon.core.telemetry import RequestStats
from speculon.core.types import Draft, Verdict
from speculon.engine.admission import read_prediction
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.prediction import FIRST, Cursor, PredictionLookup, common, spell
from tests.builders import make_sequence

K = 16
FOREIGN = 1000  # ids from here on stand in no prediction


@dataclass(frozen=True)
class Round:
    start: int  # position in the text
    draft: tuple[int, ...]
    accepted: int


def rounds(prediction: list[int], text: list[int], k: int = K) -> Iterator[Round]:
    """The rounds in which the target writes `text`; its first token comes with the prompt, undrafted."""
    cursor, at = Cursor(spell(prediction)), min(1, len(text))
    cursor.follow(text[:at])
    while at < len(text):
        draft = cursor.draft(min(k, len(text) - at - 1))
        accepted = common(spell(draft), spell(text[at:]))
        yield Round(at, draft, accepted)
        written = text[at : at + accepted + 1]
        cursor.follow(written)
        at += len(written)


# checks, which planted errors have to break


@dataclass(frozen=True)
class Edited:
    """A text made of runs of the prediction, given as (first, last + 1), and of foreign tokens, given as
    None.
    """

    prediction: list[int]
    parts: list[tuple[int, int] | None]

    def runs(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The text, and where in it each run of the prediction lies."""
        text: list[int] = []
        places = []
        for i, part in enumerate(self.parts):
            if part is None:
                text.append(FOREIGN + i)
            else:
                places.append((len(text), len(text) + part[1] - part[0]))
                text += self.prediction[part[0] : part[1]]
        return text, places


def check_alignment(edited: Edited) -> None:
    """At most two rounds that begin inside a run go without a right draft."""
    text, places = edited.runs()
    found = list(rounds(edited.prediction, text))
    for begin, end in places:
        lost = [r for r in found if begin <= r.start < end - 1 and not r.accepted]
        assert len(lost) <= 2, (text, begin, end, lost)


def check_piece(prediction: list[int], text: list[int]) -> None:
    """Every draft is a piece of the prediction and no longer than asked for, and the rounds add up to the
    text.
    """
    whole, at = spell(prediction), min(1, len(text))
    for r in rounds(prediction, text):
        assert spell(r.draft) in whole and len(r.draft) <= min(K, len(text) - r.start - 1)
        assert r.start == at
        at += r.accepted + 1
    assert at >= len(text)


def check_repeated_lines() -> None:
    """Lines that all look alike, but for a number: one is replaced, the next lines are drafted, not others
    like them.
    """
    line = [1, 2, 3, 4, 5]
    prediction = [token for i in range(40) for token in [100 + i, *line]]
    text = [*prediction[:120], FOREIGN, *line, *prediction[126:]]
    after = [r for r in rounds(prediction, text) if r.start > 120]
    # the replaced token; then two of the next line
    assert after[0].accepted == 0 and after[1].accepted >= 5, after[:3]
    assert sum(len(r.draft) - r.accepted for r in after) <= 2 * FIRST


def distinct(size: int) -> list[int]:
    return list(range(1, size + 1))


@st.composite
def edits(draw: st.DrawFn) -> Edited:
    """Insertions, deletions, replacements, repetitions and reordering of a prediction without repeated
    tokens.
    """
    size = draw(st.integers(4, 120))
    piece = st.tuples(st.integers(0, size - 1), st.integers(1, 40)).map(
        lambda p: (p[0], min(size, p[0] + p[1]))
    )
    return Edited(distinct(size), draw(st.lists(st.one_of(st.none(), piece), min_size=1, max_size=12)))


@given(edits())
def test_it_finds_its_place_within_two_rounds(edited: Edited) -> None:
    check_alignment(edited)


@given(st.lists(st.integers(1, 3), max_size=60), st.lists(st.integers(1, 4), max_size=60))
def test_drafts_are_pieces_of_the_prediction_whatever_the_text(
    prediction: list[int], text: list[int]
) -> None:
    check_piece(prediction, text)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=200))
def test_a_right_prediction_is_accepted_whole_in_ever_longer_drafts(text: list[int]) -> None:
    found = list(rounds(text, text, k=64))
    assert all(r.accepted == len(r.draft) for r in found)
    assert len(found) <= 4 + len(text) // 64


@pytest.mark.parametrize(
    ("k", "found"),
    [
        pytest.param(32, [23], id="a short answer in one round"),
        pytest.param(16, [16, 6], id="as far as the limit goes"),
    ],
)
def test_a_right_prediction_is_drafted_whole_at_once(k: int, found: list[int]) -> None:
    assert [len(r.draft) for r in rounds(distinct(25), distinct(25), k)] == found


def test_after_a_deviation_drafts_are_short_again() -> None:
    text = [*distinct(10), FOREIGN, *range(11, 80)]
    assert [len(r.draft) for r in rounds(distinct(80), text, 32)][:4] == [32, 0, FIRST, 2 * FIRST]


def test_repeated_lines_do_not_mislead_it() -> None:
    check_repeated_lines()


def never(cursor: Cursor, new: int) -> None:
    return None


def anywhere(cursor: Cursor, new: int) -> int | None:
    """The first place that holds the last token."""
    return cursor.prediction.find(cursor.tail[-1:]) + 1 or None


def late(cursor: Cursor, new: int) -> int | None:
    at = FIND(cursor, new)
    return at and at + 1


def only_beyond(cursor: Cursor, new: int) -> int | None:
    at = FIND(cursor, new)
    return at if at is None or at >= cursor.home else None


def shortest(cursor: Cursor, new: int) -> int | None:
    """The place after two equal tokens, however many more would be equal elsewhere."""
    at = cursor.prediction.find(cursor.tail[-2:])
    return at + 2 if at >= 0 else None


FIND = Cursor._find
ALIGNMENT = [
    Edited(distinct(60), [(0, 30), None, (30, 60)]),
    Edited(distinct(60), [(30, 60), None, (0, 30)]),
]


@pytest.mark.parametrize("wrong", [never, late, only_beyond])
def test_a_cursor_that_loses_its_place_is_found_out(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "_find", wrong)
    with pytest.raises(AssertionError):
        for edited in ALIGNMENT:
            check_alignment(edited)


@pytest.mark.parametrize("wrong", [never, anywhere, shortest, late])
def test_a_cursor_that_repeated_lines_mislead_is_found_out(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cursor, "_find", wrong)
    with pytest.raises(AssertionError):
        check_repeated_lines()


def test_drafts_from_elsewhere_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "draft", lambda cursor, k: tuple(range(FOREIGN, FOREIGN + k)))
    with pytest.raises(AssertionError):
        check_piece(distinct(20), distinct(20))


def test_a_wrong_jump_is_forgotten_when_nothing_follows_from_it() -> None:
    """`7` near the end is jumped to, wrongly; the place beside the edit is still the nearest."""
    prediction = [*range(100, 130), 1, 2, *range(130, 150), 1, 2, 3]
    cursor = Cursor(spell(prediction))
    cursor.follow(prediction[:10])
    cursor.follow([1, 2])
    assert cursor.draft(1) == (130,)
    cursor.follow([FOREIGN, prediction[10]])
    assert cursor.draft(2) == (111, 112)


# the proposer, and what comes before and after it


def test_the_samples_of_a_request_share_a_spelling_and_keep_their_own_place() -> None:
    proposer, prediction = (
        PredictionLookup.build(SpeculationConfig(), TargetFacts(50, 100)),
        (1, 2, 3, 4, 5, 6),
    )
    a, b = (make_sequence([9], output=output, prediction=prediction) for output in ([1], [1, 2, 3]))
    for seq in (a, b):
        proposer.admit(seq)
    drafts = proposer.propose([a, b], [2, 2])
    assert [d.tokens for d in drafts] == [(2, 3), (4, 5)] and drafts[0].sources == ("prediction",) * 2
    assert proposer.cursors[a.id].prediction is proposer.cursors[b.id].prediction
    for seq in (a, b):
        proposer.release(seq)
    assert not proposer.cursors


def test_tokens_beyond_the_end_count_as_rejected() -> None:
    stats = RequestStats()
    draft = Draft((1, 2, 3, 4), ("prediction",) * 3 + ("ngram",))
    stats.record(draft, Verdict((1, 2), accepted=2), ("prediction",))
    assert (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) == (2, 1)
    assert stats.drafted_from["ngram"] == 1
    assert (RequestStats().accepted_prediction_tokens, RequestStats().rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        pytest.param("x" * (MAX_PREDICTION + 1), "at most 1048576 long", id="too much text"),
        pytest.param([1] * (MAX_PREDICTION + 1), "at most 1048576 long", id="too many ids"),
        pytest.param(5, "a string or a list of token ids", id="a number"),
        pytest.param(["a"], "a string or a list of token ids", id="strings"),
    ],
)
def test_what_is_no_prediction_is_refused(prediction: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"prediction = .*{message}"):
        RequestSpeculation(prediction=prediction)


def test_ids_need_no_tokenizer_and_text_does() -> None:
    assert read_prediction((1, 2), None, 10) == (1, 2)
    assert read_prediction(None, None, 10) == read_prediction((), None, 10) == ()
    with pytest.raises(InvalidParameter, match="prediction = 10: token ids must be from 0 to 9"):
        read_prediction((1, 10), None, 10)
    with pytest.raises(InvalidParameter, match="prediction = 'text': a string needs a tokenizer"):
        read_prediction("text", None, 10)


class Characters:
    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) for c in text]


def test_tokens_that_no_logit_stands_for_are_left_out() -> None:
    assert read_prediction("a€b", Characters(), 128) == (97, 98)  # type: ignore[arg-type]
