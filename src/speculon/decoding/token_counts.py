"""How often a sequence has each token, for penalties. A token is counted once, when it is new."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class TokenCounts:
    """The tokens of a growing sequence, and how often its output has each of them."""

    def __init__(self) -> None:
        self._read = 0  # tokens that are counted
        self._at: dict[int, int] = {}  # token -> its place in the arrays
        self._ids, self._written = np.zeros((2, 64), np.int64)

    @property
    def ids(self) -> Ints:
        return self._ids[: len(self._at)]

    @property
    def written(self) -> Ints:
        """The counts of `ids` in the output; 0 for a token that only the prompt has."""
        return self._written[: len(self._at)]

    def of_token(self, token: int) -> int:
        place = self._at.get(token)
        return 0 if place is None else int(self._written[place])

    def read(self, tokens: list[int], prompt_len: int) -> None:
        """Counts the tokens that were added to the sequence since the last call."""
        for position, token in enumerate(tokens[self._read :], self._read):
            place = self._at.setdefault(token, len(self._at))
            if place == len(self._ids):
                self._ids, self._written = np.pad([self._ids, self._written], ((0, 0), (0, place)))
            self._ids[place] = token
            self._written[place] += position >= prompt_len
        self._read = len(tokens)
