"""Line breaks between words, for a text that is streamed to a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.cells import cell_len

from speculon.commands.drafts import Run

PIECES = re.compile(r"\s|\S+")
TAB = 8  # columns


class WordWrap:
    """Breaks lines that are longer than the terminal. A word is held back until its end is known."""

    def __init__(self, width: int):
        self.width = max(1, width)
        self.column = 0
        self.word: list[Run] = []

    def push(self, runs: Iterable[Run]) -> Iterator[Run]:
        for text, source in runs:
            for piece in PIECES.findall(text):
                if piece.isspace():
                    yield from self.flush()
                    yield self.blank(piece), source
                    continue
                self.word.append((piece, source))
                if self.length >= self.width:  # longer than a line: the terminal breaks it
                    yield from self.flush()

    @property
    def length(self) -> int:
        return sum(cell_len(text) for text, _ in self.word)

    def flush(self) -> Iterator[Run]:
        """The held word, on a new line where this one has no room for it."""
        if self.column and self.column + self.length > self.width:
            yield "\n", None
            self.column = 0
        total = self.column + self.length
        self.column = total if total <= self.width else total % self.width
        yield from self.word
        self.word = []

    def blank(self, character: str) -> str:
        """The character itself, or a line break at the end of the line."""
        self.column += TAB - self.column % TAB if character == "\t" else 1
        if character == "\n" or self.column > self.width:
            self.column = 0
            return "\n"
        return character
