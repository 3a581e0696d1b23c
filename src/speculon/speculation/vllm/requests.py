"""The requests behind vLLM's rows: a proposer is told tokens by row, and no names."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speculon.decoding.rounds import Drafted
from speculon.decoding.sequence import Sequence

ABSENT = 32  # calls after which a request without a row counts as ended; a preempted one may be back before
NEVER = -(10**9)


@dataclass(slots=True, eq=False)
class KnownRequest:
    """A request, and when it was seen."""

    seq: Sequence
    tokens: array[int] = field(init=False)  # those of `seq`, to be compared with a row at once
    new: list[int] = field(default_factory=list)  # of these, the ones of the latest call
    call: int = NEVER  # the latest one that had new tokens of it
    end: int | None = None  # tokens before one that ends texts; vLLM may have been told to ignore it
    drafted: Drafted | None = None  # in that call

    def __post_init__(self) -> None:
        self.tokens = array("i", self.seq.tokens)

    def is_in(self, row: Any, length: int) -> bool:
        """Whether the first `length` tokens of a row are all tokens of the request."""
        mine = self.tokens
        if len(mine) != length or mine[-1] != row[length - 1]:
            return False
        return bool((np.frombuffer(mine, np.intc) == row[:length]).all())

    def extend(self, new: list[int], call: int, eos_ids: Collection[int]) -> None:
        ends = (i for i, token in enumerate(new, len(self.tokens)) if token in eos_ids)
        self.end, self.new, self.call = next(ends, None), new, call
        self.tokens.extend(new)
        self.seq.tokens.extend(new)
        self.seq.committed = len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Seen:
    """One call: its requests by row, None where a prompt is still computed."""

    rows: list[KnownRequest | None]
    going_on: list[KnownRequest]  # of these, the ones of the latest step
    ended: list[Sequence]

    @property
    def decoding_only(self) -> bool:
        """Whether the step since the latest call computed no prompt."""
        return len(self.going_on) == len(self.rows)


class Requests:
    """Recognises requests by their tokens.

    A row with new tokens belongs to the request whose tokens are all that stands before them: that of the
    same row, or one that was in another row, or in none for some calls. Any other row is a new request. Of
    two requests with the same tokens either is right.
    """

    def __init__(
        self, admit: Callable[[list[int]], Sequence], eos_ids: Collection[int] = (), stages: int = 1
    ) -> None:
        self._admit, self._eos_ids, self._stages = admit, eos_ids, stages
        self.rows: list[KnownRequest | None] = []
        self._absent: list[KnownRequest] = []
        self._call = 0

    def read(self, new: list[list[int]], lengths: Any, table: Any) -> Seen:
        """The requests of this call, with their new tokens.

        `new` are these by row; the first `lengths[i]` of `table[i]` are all tokens of row i, the new ones
        included.
        """
        self._call += 1
        before = [int(lengths[i]) - len(tokens) for i, tokens in enumerate(new)]
        rows = [self._at(i, table[i], before[i]) if tokens else None for i, tokens in enumerate(new)]
        missing = self._missing(rows)
        strange = [i for i, tokens in enumerate(new) if tokens and rows[i] is None]
        if strange:
            others = defaultdict[int, list[KnownRequest]](list)
            for known in missing:
                others[len(known.tokens)].append(known)
            for i in strange:
                rows[i] = self._elsewhere(table[i], before[i], others[before[i]])
            missing = [known for some in others.values() for known in some]
        going_on = [known for known in rows if known and known.call >= self._call - self._stages]
        for found, tokens in zip(rows, new, strict=True):
            if found is not None:
                found.extend(tokens, self._call, self._eos_ids)
        ended = [known for known in missing if known.end or self._call - known.call > ABSENT]
        self.rows, self._absent = rows, [known for known in missing if known not in ended]
        return Seen(rows, going_on, [closed(known) for known in ended])

    def _at(self, row: int, tokens: Any, length: int) -> KnownRequest | None:
        known = self.rows[row] if row < len(self.rows) else None
        return known if known is not None and known.is_in(tokens, length) else None

    def _missing(self, rows: list[KnownRequest | None]) -> list[KnownRequest]:
        """Known requests that are not among these."""
        if rows == self.rows and not self._absent:
            return []
        found = set(rows)
        return [known for known in (*self.rows, *self._absent) if known and known not in found]

    def _elsewhere(self, tokens: Any, length: int, others: list[KnownRequest]) -> KnownRequest:
        """One of the others, which is then taken out, or a new request."""
        for known in others:
            if known.is_in(tokens, length):
                others.remove(known)
                return known
        return KnownRequest(self._admit(tokens[:length].tolist()))


def closed(known: KnownRequest) -> Sequence:
    """Its sequence, as far as the token that ended it."""
    del known.seq.tokens[known.end or len(known.tokens) :]
    return known.seq
