"""Tables of reports: the same columns for Markdown and for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table

NARROWEST = 8  # characters of a column of words that has to wrap
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """Its name, and its text for each row. On a terminal columns of `words` wrap, and others never do."""

    name: str
    text: Callable[[T], str]
    words: bool = False


def markdown(columns: Sequence[Column[T]], rows: Iterable[T]) -> str:
    return markdown_table([column.name for column in columns], texts(columns, rows))


def terminal(
    title: str, columns: Sequence[Column[T]], rows: Sequence[T], style: Callable[[T], str] = lambda row: ""
) -> Table:
    """The first column wraps, too. Styles: names of colours that are readable on dark and on light."""
    words = [column.name for column in columns if column.words]
    names = [column.name for column in columns]
    return terminal_table(title, names, texts(columns, rows), [*map(style, rows)], words)


def texts(columns: Sequence[Column[T]], rows: Iterable[T]) -> list[list[str]]:
    return [[column.text(row) for column in columns] for row in rows]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(map(markdown_row, (head, ["---"] * len(head), *rows)))


def markdown_row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def terminal_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="dim", box=None)
    table.pad_edge, table.collapse_padding = False, True
    for i, name in enumerate(head):
        longest = max((len(row[i]) for row in rows), default=0)
        if i == 0 or name in words:
            table.add_column(name, overflow="fold", min_width=min(longest, NARROWEST))
        else:
            header = name if len(name) <= max(longest, NARROWEST) else name.replace(" ", "\n")
            table.add_column(header, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(*row, style=styles[i] if styles else "")
    return table
