"""From turns to a table: what recipes/peers computes of records, and what only servers have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median

from recipes.peers.figures import OFF, Label, Record, Row, ratio, row

from speculon.measure.bench.tables import Column, number
from speculon.measure.bench.tables import markdown as table

THEIRS, OURS, AUTO = "llama-server", "speculon", "auto"
PLAIN, REFERENCE = (THEIRS, OFF), (OURS, OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Record):
    """A group of prompts, written at once by one server in one mode."""

    tokens: list[str]  # the texts: our server sends no token ids
    written: int  # tokens, without stop tokens
    prompt_tokens: int  # of the whole group
    first: list[float]  # seconds until each text began to arrive

    @property
    def count(self) -> int:
        return self.written


@dataclass(slots=True, kw_only=True)
class Line(Row):
    """`to_stock` is the ratio to llama-server's plain decoding, `to_ours` to speculon's."""

    first_ms: float
    prompt_per_second: float | None  # None: several prompts at once
    to_fastest: float | None  # median over pairs with the fastest mode of llama-server


def lines(turns: list[Turn]) -> list[Line]:
    """One for each mode, in every cell; the turns of a cell follow each other."""
    found = []
    for cell, group in groupby(turns, key=lambda turn: (turn.workload, turn.concurrency)):
        some = list(group)
        labels = sorted({(turn.engine, turn.mode) for turn in some}, key=order)
        rows = {label: row(cell, label, some, True, stock=PLAIN, ours=REFERENCE) for label in labels}
        theirs = [label for label in rows if label[0] == THEIRS]
        fastest = max(theirs, key=lambda label: rows[label].tokens_per_second or 0, default=PLAIN)
        for label, one in rows.items():
            own = [turn for turn in some if (turn.engine, turn.mode) == label]
            prompt = median(turn.prompt_tokens / turn.first[0] for turn in own) if cell[1] == 1 else None
            first = median(seconds for turn in own for seconds in turn.first) * 1e3
            to_fastest = ratio(own, some, fastest)
            found.append(Line(**asdict(one), first_ms=first, prompt_per_second=prompt, to_fastest=to_fastest))
    return found


def order(label: Label) -> tuple[bool, bool, str]:
    """llama-server first, and of each server plain decoding first."""
    return label[0] == OURS, label[1] != OFF, label[1]


def never_drafted(found: list[Line]) -> list[str]:
    """The modes that should speculate and drafted nothing in the whole run.

    In one cell a lookup may well find nothing, and the policy may decide that drafts do not pay.
    """
    drafting = {(one.engine, one.mode) for one in found if not one.silent}
    return sorted({f"{one.engine} {one.mode}" for one in found if (one.engine, one.mode) not in drafting})


def markdown(title: str, found: list[Line]) -> str:
    parts = [title]
    if never := never_drafted(found):
        parts.append(f"**These should speculate, and drafted nothing in the whole run: {', '.join(never)}.**")
    for (workload, count), some in groupby(found, key=lambda one: (one.workload, one.concurrency)):
        parts.append(f"## {workload}, {'one at a time' if count == 1 else f'{count} at once'}")
        parts.append(table(COLUMNS, some))
    return "\n\n".join(parts) + "\n"


def drafts(one: Line) -> str:
    if not one.drafted:
        return "none drafted" if one.silent else ""
    return f"{(one.accepted or 0) / one.drafted:.0%} of {one.drafted}"


COLUMNS: tuple[Column[Line], ...] = (
    Column("server", lambda one: one.engine),
    Column("mode", lambda one: one.mode),
    Column("tokens/s", lambda one: number(one.tokens_per_second, ".1f")),
    Column("first token, ms", lambda one: f"{one.first_ms:.0f}"),
    Column("prompt tokens/s", lambda one: number(one.prompt_per_second, ".0f")),
    Column("x llama-server off", lambda one: number(one.to_stock, ".2f")),
    Column("x llama-server's fastest", lambda one: number(one.to_fastest, ".2f")),
    Column("x speculon off", lambda one: number(one.to_ours, ".2f")),
    Column("drafts accepted", drafts),
    Column("texts unlike speculon off", lambda one: f"{number(one.different, 'd')} of {one.texts}"),
)
