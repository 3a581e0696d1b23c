"""Streamed texts on a terminal: who drafted each character, line breaks, and two runs next to each other."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Table
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


FRAMES = 30  # per second
GUTTER = 2  # columns between the two texts
OTHER_LINES = 8  # of the terminal, for what is around the texts

Run = tuple[str, str | None]  # text, and the method that drafted it; None: the target itself


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

    def push(self, tokens: Sequence[int], sources: Sequence[str | None]) -> Iterator[Run]:
        """The text that is certain now. `sources` belong to the first tokens, the others are the target's."""
        for token, source in zip_longest(tokens, sources):
            self.counts[source or OWN] += 1
            self._tokens += 1
            self._sources.extend(source for _ in self._whole.push([token]))
            yield from self._runs(self._certain.push([token]))

    def finish(self, answer: Completion) -> Iterator[Run]:
        """The rest of the text, and tokens that were not pushed because of Ctrl-C."""
        yield from self.push(answer.token_ids[self._tokens :], answer.sources[self._tokens :])
        yield from self._runs(answer.text[self._shown :])

    def _runs(self, text: str) -> Iterator[Run]:
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


def in_green(runs: Iterable[Run]) -> Text:
    """A text with its accepted drafts marked."""
    return Text.assemble(*((drawn(text), ACCEPTED if source else "") for text, source in runs))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round added to a text."""

    seconds: float  # since the request began
    runs: tuple[Run, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A text with the time of each piece."""

    name: str
    pieces: tuple[Piece, ...]
    seconds: float  # to the last token

    def at(self, seconds: float) -> tuple[Text, int]:
        """The text up to a time, and the number of its tokens."""
        text, tokens = Text(), 0
        for piece in self.pieces:
            if piece.seconds > seconds:
                break
            tokens += piece.tokens
            text.append(in_green(piece.runs))
        return text, tokens


def replay(
    runs: tuple[Replay, Replay],
    console: Console,
    clock: Callable[[], float] = perf_counter,
    wait: Callable[[float], None] = sleep,
) -> None:
    """Draws both texts until the slower one is complete. Ctrl-C jumps to the end."""
    end = max(run.seconds for run in runs)
    with Live(frame(runs, 0, console), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        began = clock()
        try:
            while (now := clock() - began) < end:
                live.update(frame(runs, now, console), refresh=True)
                wait(1 / FRAMES)
        except KeyboardInterrupt:
            pass
        live.update(frame(runs, end, console), refresh=True)


def frame(runs: tuple[Replay, Replay], seconds: float, console: Console) -> Group:
    """Both texts at a time: as many of their last lines as the terminal has room for."""
    width = max(10, (console.width - GUTTER) // 2)
    lines = max(4, console.height - OTHER_LINES)
    heads, bodies = [], []
    for run in runs:
        text, tokens = run.at(seconds)
        shown = min(seconds, run.seconds)  # name, time and speed so far; the measured speed at the end
        speed = f"{tokens / shown:.0f} tokens/s" if tokens and shown else ""
        state = Text(" done", style="bold") if seconds >= run.seconds else Text("")
        heads.append(Text.assemble((run.name, "bold underline"), f"  {shown:.1f} s  {speed}", state))
        bodies.append(Text("\n").join(text.wrap(console, width, overflow="fold", tab_size=4)[-lines:]))
    table = Table.grid(padding=(0, GUTTER, 0, 0), expand=False, pad_edge=False)
    for _ in runs:
        table.add_column(width=width, overflow="fold")
    table.add_row(*heads)
    table.add_row(*bodies)
    return Group(table)
