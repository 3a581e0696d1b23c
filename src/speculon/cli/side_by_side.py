"""Two recorded runs in a terminal: their texts are replayed next to each other at the speeds they had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from speculon.cli.drafts import drawn

ACCEPTED = "bold green"
FRAMES = 30  # per second
GUTTER = 2  # columns between the two texts
OTHER_LINES = 8  # of the terminal, for what is around the texts


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round added to a text."""

    seconds: float  # since the request began
    parts: tuple[tuple[str, bool], ...]  # text, and whether it was an accepted draft
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
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
            for part, accepted in piece.parts:
                text.append(drawn(part), style=ACCEPTED if accepted else "")
        return text, tokens

    def headline(self, seconds: float, tokens: int) -> Text:
        """Name, time and speed so far; the measured speed at the end."""
        done = seconds >= self.seconds
        shown = min(seconds, self.seconds)
        speed = f"{tokens / shown:.0f} tokens/s" if tokens and shown else ""
        state = Text(" done", style="bold") if done else Text("")
        return Text.assemble((self.name, "bold underline"), f"  {shown:.1f} s  {speed}", state)


def replay(
    runs: tuple[Run, Run],
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


def frame(runs: tuple[Run, Run], seconds: float, console: Console) -> Group:
    """Both texts at a time: as many of their last lines as the terminal has room for."""
    width = max(10, (console.width - GUTTER) // 2)
    lines = max(4, console.height - OTHER_LINES)
    heads, bodies = [], []
    for run in runs:
        text, tokens = run.at(seconds)
        heads.append(run.headline(seconds, tokens))
        bodies.append(Text("\n").join(text.wrap(console, width, overflow="fold", tab_size=4)[-lines:]))
    table = Table.grid(padding=(0, GUTTER, 0, 0), expand=False, pad_edge=False)
    for _ in runs:
        table.add_column(width=width, overflow="fold")
    table.add_row(*heads)
    table.add_row(*bodies)
    return Group(table)
