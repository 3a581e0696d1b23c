"""Predicted outputs: the client says what the text will be, mostly. A cursor follows it and finds its place
again.

Prediction and text are strings of one character per token, so that a search for a place is `str.find`: there
is no index to build, and no place is missed. docs/decisions/011 has the rules' figures.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from copy import copy

from speculon.core.config import MAX_DRAFTS, SpeculationConfig
from speculon.core.types import Draft, Stop, no_draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import Lookup, TargetFacts

NAME = "prediction"
NO_MATCH = no_draft(Stop.NO_MATCH)
LONGEST = 32  # guess: tokens of the text's end that are searched for
# tokens beyond home where one equal token counts; never: 7 % fewer tokens per second on renames, 64: no more
NEAR = 16
# drafts after a deviation, doubled while all agrees; 32 at once: 14 % slower on edited files, 2: 10 % on
# renames
FIRST = 8


def spell(tokens: Iterable[int]) -> str:
    """One character per token id; no vocabulary reaches the 0x110000 that there are."""
    return "".join(map(chr, tokens))


class Cursor:
    """The place in a prediction that a growing text has come to."""

    def __init__(self, prediction: str):
        self.at: int | None = 0  # of the token expected next; None while lost
        self.seen = 0  # tokens of the text followed so far
        self.prediction = prediction
        self.home = 0  # where the text last agreed; a place that was only found may be the wrong one
        self.window = MAX_DRAFTS  # it may be right from beginning to end
        self.tail = ""  # the text's end
        # tokens of that end, LONGEST at most, that stand before `at`: nowhere in the prediction do more of
        # them
        self.match = 0

    def follow(self, written: list[int]) -> None:
        """Moves on over new tokens; where they are not the expected ones, to the place whose past is most
        like theirs.
        """
        new = spell(written)
        agreed = 0
        if self.at is not None and (agreed := common(new, self.prediction[self.at : self.at + len(new)])):
            self.home = self.at = self.at + agreed
            match = self.match + agreed
            self.match = match if match < LONGEST else LONGEST
        self.seen += len(new)
        self.tail = (self.tail + new)[-LONGEST:]
        if agreed < len(new):
            self.at, self.window = self._find(len(new) - agreed), FIRST
        else:
            self.window = min(2 * self.window, MAX_DRAFTS)

    def draft(self, k: int) -> tuple[int, ...]:
        """What comes next, up to `k` tokens and the window; nothing while lost or at the prediction's end."""
        return (
            ()
            if self.at is None
            else tuple(map(ord, self.prediction[self.at : self.at + min(k, self.window)]))
        )

    def _find(self, new: int) -> int | None:
        """The place after the longest end of the text that stands in the prediction: the first beyond home,
        else the last.
        """
        text, tail = self.prediction, self.tail
        longest = min(self.match + new, len(tail))  # a longer match would have been one before
        self.match = n = bisect(range(1, longest + 1), False, key=lambda n: tail[-n:] not in text)
        at = text.find(tail[-n:], max(0, self.home - n))
        if n == 0 or (n == 1 and not 0 <= at < self.home + NEAR):
            return None
        return (at if at >= 0 else text.rfind(tail[-n:])) + n


def common(a: str, b: str) -> int:
    """Length of their common beginning."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PredictionLookup(Lookup):
    """Drafts from `Sequence.prediction`."""

    def __init__(self) -> None:
        self.cursors: dict[int, Cursor] = {}
        self._latest: tuple[tuple[int, ...], str] = ((), "")  # the samples of a request share one spelling

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> PredictionLookup:
        return cls()

    def admit(self, seq: Sequence) -> None:
        if self._latest[0] is not seq.request.prediction:
            self._latest = seq.request.prediction, spell(seq.request.prediction)
        self.cursors[seq.id] = Cursor(self._latest[1])

    def release(self, seq: Sequence) -> None:
        self.cursors.pop(seq.id, None)

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        cursor = self.cursors[seq.id]
        cursor.follow(seq.tokens[seq.request.prompt_len + cursor.seen :])
        if ahead:
            cursor = copy(cursor)
            cursor.follow([*ahead])
        tokens = cursor.draft(k)
        if not tokens:
            return NO_MATCH if cursor.at is None else no_draft(Stop.SOURCE_END, cursor.match)
        n = len(tokens)
        stop = Stop.LIMIT if n == k else Stop.WINDOW if n == cursor.window else Stop.SOURCE_END
        return Draft(tokens, (NAME,) * n, None, None, cursor.match, stop)
