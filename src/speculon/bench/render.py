"""What all reports share: tables for Markdown and for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

Rows = Iterable[Sequence[str]]
NARROWEST = 8  # characters of a column of words that has to wrap


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def markdown_table(head: Sequence[str], rows: Rows) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def terminal_table(
    title: str, head: Sequence[str], rows: Rows, styles: Sequence[str] = (), words: Sequence[str] = ()
) -> Table:
    """Columns of figures are never wrapped; the first one, and those of `words`, may be.

    Styles are by row: names of colours that are readable on a dark and on a light background.
    """
    rows = list(rows)
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
