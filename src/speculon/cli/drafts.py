"""Streamed texts on a terminal: who drafted each character, and where lines break."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

from speculon.decoding.text.tokenizer import Stream, Tokenizer

if TYPE_CHECKING:
    from speculon.core.config import SamplingParams
    from speculon.engine.outputs import Completion

OWN = "the target itself"
COLOURS: Mapping[str, str] = {
    "ngram": "green",
    "draft_model": "cyan",
    "eagle3": "bright_blue",
    "pard": "bright_cyan",
    "dflash": "bright_magenta",
    "mtp": "bright_green",
    "gemma4_assistant": "red",
    "prediction": "magenta",
    "suffix": "yellow",
}
OTHER = "blue"  # a plug-in's
# a model's text must not control the terminal: control characters are drawn, newlines and tabs are kept
DRAWN: dict[int, int] = {
    **{c: 0x2400 + c for c in range(32)},
    127: 0x2421,
    **dict.fromkeys(range(128, 160), 0xFFFD),
    9: 9,
    10: 10,
}

PIECES = re.compile(r"\s|\S+")
TAB = 8  # columns
ACCEPTED = "bold green"

StyledRun = tuple[str, str | None]  # text, and the method that drafted it; None: the target itself


def colour_of(source: str | None) -> str:
    return "" if source is None else COLOURS.get(source, OTHER)


class DraftStream:
    """One text in runs of the same source, whose concatenation is the whole text: pushes, then `finish`.

    A character belongs to the token that completed it. One that is held back, as the possible start of a
    stop string, keeps its source.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()):
        self._certain = Stream.of(tokenizer, params, prompt)
        # the same characters, none held back for a stop
        self._whole = Stream.of(tokenizer, params.model_copy(update={"stop": ()}), prompt)
        self._sources: deque[str | None] = deque()  # of the characters that are not shown yet
        self._shown, self._tokens = 0, 0
        self.counts: Counter[str] = Counter()  # source -> tokens

    def push(self, tokens: Sequence[int], sources: Sequence[str | None]) -> Iterator[StyledRun]:
        """The text that is certain now. `sources` belong to the first tokens, the others are the target's."""
        for token, source in zip_longest(tokens, sources):
            self.counts[source or OWN] += 1
            self._tokens += 1
            self._sources.extend(source for _ in self._whole.push([token]))
            yield from self._runs(self._certain.push([token]))

    def finish(self, answer: Completion) -> Iterator[StyledRun]:
        """The rest of the text, and tokens that were not pushed because of Ctrl-C."""
        yield from self.push(answer.token_ids[self._tokens :], answer.sources[self._tokens :])
        yield from self._runs(answer.text[self._shown :])

    def _runs(self, text: str) -> Iterator[StyledRun]:
        self._shown += len(text)
        owned = [(character, self._sources.popleft() if self._sources else None) for character in text]
        for source, run in groupby(owned, key=lambda pair: pair[1]):
            yield "".join(character for character, _ in run), source


def painted(text: str, source: str | None) -> str:
    """For a terminal with colours. Nothing breaks lines here: the text stays as it is."""
    return Style.parse(colour_of(source)).render(text, color_system=ColorSystem.STANDARD)


def drawn(text: str) -> str:
    """For a terminal: control characters are shown instead of executed."""
    return text.translate(DRAWN)


def legend(counts: Mapping[str, int]) -> Text:
    """The number of tokens by source, in their colours."""
    methods = sorted((source for source in counts if source != OWN), key=lambda source: -counts[source])
    parts = [Text(f"{source} {counts[source]}", style=colour_of(source)) for source in methods]
    return Text(", ").join([*parts, Text(f"{OWN} {counts.get(OWN, 0)}")])


class WordWrap:
    """Breaks lines between words, on a terminal. A word is held back until its end is known."""

    def __init__(self, width: int):
        self.width, self.column, self.word = max(1, width), 0, list[StyledRun]()

    def push(self, runs: Iterable[StyledRun]) -> Iterator[StyledRun]:
        for text, source in runs:
            for piece in PIECES.findall(text):
                if piece.isspace():
                    yield from self.flush()
                    self.column += TAB - self.column % TAB if piece == "\t" else 1
                    ends = piece == "\n" or self.column > self.width
                    self.column = 0 if ends else self.column
                    yield "\n" if ends else piece, source
                else:
                    self.word.append((piece, source))
                    if self.length >= self.width:  # longer than a line: the terminal breaks it
                        yield from self.flush()

    @property
    def length(self) -> int:
        return sum(cell_len(text) for text, _ in self.word)

    def flush(self) -> Iterator[StyledRun]:
        """The held word, on a new line where this one has no room for it."""
        if self.column and self.column + self.length > self.width:
            yield "\n", None
            self.column = 0
        total = self.column + self.length
        self.column = total if total <= self.width else total % self.width
        yield from self.word
        self.word = []


def in_green(runs: Iterable[StyledRun]) -> Text:
    """A text with its accepted drafts marked."""
    return Text.assemble(*((drawn(text), ACCEPTED if source else "") for text, source in runs))
