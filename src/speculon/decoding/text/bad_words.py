"""Which tokens complete a string that must not be written, in any tokenisation. No torch.

Strings and tokens are compared as bytes: the text so far, the prompt's end included, may end with a beginning
of a word, and a token that begins with the rest completes it. A token that contains a word always does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BETWEEN = b"\xff"  # a byte that no text has


class Spellings:
    """What each token of a vocabulary writes, in an order in which beginnings are found."""

    def __init__(self, written: Seq[bytes]):
        self.written = written
        self._ordered = sorted(range(len(written)), key=written.__getitem__)
        self._in_order = [written[token] for token in self._ordered]
        self._all = BETWEEN.join(written)
        # of each token in it
        self._starts = list(accumulate((len(text) + 1 for text in written), initial=0))

    def beginning_with(self, part: bytes) -> list[int]:
        after = part[:-1] + bytes([part[-1] + 1])
        return self._ordered[bisect_left(self._in_order, part) : bisect_left(self._in_order, after)]

    def containing(self, word: bytes) -> Iterator[int]:
        at = self._all.find(word)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            yield token
            at = self._all.find(word, self._starts[token + 1])


@dataclass(slots=True, eq=False)
class TokenSet:
    ids: list[int]
    index: Tensor | None = None  # the same on the device where it was last used


class BadWords:
    """The words of one request; `hidden` tokens are not part of its text."""

    def __init__(self, words: Iterable[str], spellings: Spellings, hidden: Iterable[int] = ()):
        self._spellings, self._hidden = spellings, frozenset(hidden)
        texts = [word.encode() for word in words]
        self._endings: dict[bytes, list[bytes]] = {}  # beginning of a word -> what completes it
        for text in texts:
            for cut in range(1, len(text)):
                self._endings.setdefault(text[:cut], []).append(text[cut:])
        self._longest = max(map(len, self._endings), default=0)
        self._always = TokenSet(sorted({token for text in texts for token in spellings.containing(text)}))
        self._after: dict[bytes, TokenSet] = {}

    def completing(self, tokens: Seq[int], drafts: Seq[int] = ()) -> list[TokenSet]:
        """The tokens that complete a word after these."""
        text = self._text_end(tokens, drafts)
        ends = (text[start:] for start in range(len(text)))
        return [self._always, *(self._completing(end) for end in ends if end in self._endings)]

    def _completing(self, beginning: bytes) -> TokenSet:
        if beginning not in self._after:
            endings = self._endings[beginning]
            completing = {token for end in endings for token in self._spellings.beginning_with(end)}
            self._after[beginning] = TokenSet(sorted(completing - self._hidden))
        return self._after[beginning]

    def _text_end(self, tokens: Seq[int], drafts: Seq[int]) -> bytes:
        """As many bytes of the text's end as a beginning may have."""
        text, written = b"", self._spellings.written
        for part in (drafts, tokens):
            for token in reversed(part):
                if len(text) >= self._longest:
                    return text[len(text) - self._longest :]
                if token not in self._hidden and token < len(written):
                    text = written[token] + text
        return text[max(0, len(text) - self._longest) :]
