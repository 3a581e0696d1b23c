"""Prompt lookup: what followed the last time the text ended like this (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft, Stop, no_draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import Lookup, TargetFacts

NO_MATCH = no_draft(Stop.NO_MATCH)


class Index:
    """For every n-gram of a growing text, where its most recent occurrence was followed by what."""

    def __init__(self, min_order: int, max_order: int):
        self.min_order, self.max_order = min_order, max_order
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._done = 0  # positions below this have been a continuation

    def extend(self, tokens: list[int]) -> None:
        """Indexes what is new. The n-grams at the very end wait until something follows them."""
        for end in range(max(self._done, 1), len(tokens)):
            for order in range(self.min_order, min(self.max_order, end) + 1):
                self._next[tuple(tokens[end - order : end])] = end
        self._done = len(tokens)

    def lookup(self, tokens: Seq[int], k: int) -> tuple[tuple[int, ...], int]:
        """Up to `k` tokens after the longest, most recent match of the text's end, and its length; reads no
        other part.

        `tokens` may go on beyond what was indexed.
        """
        # the last place of the index, which waits for what follows
        done = self._done if len(tokens) > self._done else 0
        for order in range(min(self.max_order, len(tokens)), self.min_order - 1, -1):
            tail = tuple(tokens[-order:])
            at = (
                done if done >= order and tuple(tokens[done - order : done]) == tail else self._next.get(tail)
            )
            if at is not None:
                period = len(tokens) - at  # a match that reaches the end repeats itself
                if k <= period:
                    return tuple(tokens[at : at + k]), order
                return tuple(tokens[at + i % period] for i in range(k)), order
        return (), 0


class NGram(Lookup):
    """Drafts from the sequence's own prompt and output."""

    def __init__(self, min_order: int, max_order: int):
        self._orders = (min_order, max_order)
        self.index: dict[int, Index] = {}

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> NGram:
        return cls(config.prompt_lookup_min, config.prompt_lookup_max)

    def admit(self, seq: Sequence) -> None:
        self.index[seq.id] = Index(*self._orders)

    def release(self, seq: Sequence) -> None:
        self.index.pop(seq.id, None)

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        index = self.index[seq.id]
        index.extend(seq.tokens)
        tokens, order = index.lookup([*seq.tokens, *ahead] if ahead else seq.tokens, k)
        if not tokens:
            return NO_MATCH
        return Draft(
            tokens, ("ngram",) * len(tokens), None, (order / (order + 1),) * len(tokens), order, Stop.LIMIT
        )
