"""Tables as they are on a terminal of some width."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

ELLIPSIS = "…"


def on_screen(tables: Sequence[Table], width: int) -> str:
    file = StringIO()
    console = Console(width=width, file=file)
    for table in tables:
        console.print(table)
    return file.getvalue()


def cut_off(tables: Sequence[Table], width: int) -> list[int]:
    """The tables of which something is missing at this width."""
    return [i for i, table in enumerate(tables) if ELLIPSIS in on_screen([table], width)]
