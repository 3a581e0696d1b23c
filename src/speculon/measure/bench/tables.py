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
    table = Table(title=title or None, title_justify="left", title_style="bold", header_style="dim", box=None)
    table.pad_edge, table.collapse_padding = False, True
    for i, column in enumerate(columns):
        longest = max((len(column.text(row)) for row in rows), default=0)
        if i == 0 or column.words:
            table.add_column(column.name, overflow="fold", min_width=min(longest, NARROWEST))
        else:
            fits = len(column.name) <= max(longest, NARROWEST)
            header = column.name if fits else column.name.replace(" ", "\n")
            table.add_column(header, justify="right", no_wrap=True)
    for row, cells in zip(rows, texts(columns, rows), strict=True):
        table.add_row(*cells, style=style(row))
    return table


def texts(columns: Sequence[Column[T]], rows: Iterable[T]) -> list[list[str]]:
    return [[column.text(row) for column in columns] for row in rows]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
