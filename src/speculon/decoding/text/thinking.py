"""Where the answer begins in a text that thinks first: stop strings and forms begin there. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from speculon.core.config import Thinking
    from speculon.decoding.text.tokenizer import Tokenizer


class AnswerStart:
    """Finds the first token of the answer in one sequence's output, token by token.

    It is the first token that is not blank, after the token that ends the thinking.
    """

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer):
        self._thinking, self._tokenizer = thinking, tokenizer
        self._longest = max(len(thinking.start), len(thinking.end))  # a token may be one character
        self._tail: tuple[int, ...] = ()
        self._read = 0
        self._part: Literal["start", "thinking", "gap", "answer"] = "thinking" if thinking.opened else "start"
        self.at: int | None = None if thinking.opened else 0  # None: no answer yet

    def push(self, token: int) -> int | None:
        """Where the answer has begun; None where the token is not of an answer."""
        if self._part != "answer":
            self._tail = (*self._tail, token)[-self._longest :]
            self._look(self._tokenizer.decode(self._tail, skip_special_tokens=False))
        self._read += 1
        return self.at

    def _look(self, text: str) -> None:
        """Goes on by the text of the last tokens."""
        match self._part:
            case "start":
                begun = text.lstrip()
                if begun.startswith(self._thinking.start):
                    self.at, self._tail, self._part = None, (), "thinking"
                elif not self._thinking.start.startswith(begun):
                    self._part = "answer"
            case "thinking" if self._thinking.end in text:
                self._tail, self._part = (), "gap"
            case "gap" if text.strip():
                self.at, self._part = self._read, "answer"

    def runs(self, output: Seq[int], num_committed: int) -> list[tuple[int, int, int]]:
        """(start of the answer, first position, end) of those output tokens after the committed ones that are
        of an answer. Of them nothing is kept.
        """
        for token in output[self._read : num_committed]:
            self.push(token)
        ahead = copy(self)
        begins = [ahead.push(token) for token in output[num_committed:]]
        found = []
        for begin, run in groupby(range(len(begins)), key=begins.__getitem__):
            positions = [num_committed + i for i in run]
            if begin is not None:
                found.append((begin, positions[0], positions[-1] + 1))
        return found
