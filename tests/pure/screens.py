"""Tables as they are on a terminal of some width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

ELLIPSIS = "…"
READABLE = {0, 1, 2, 31, 32, 36}  # reset, bold, dim, red, green, cyan: on white and on black


def on_screen(tables: Sequence[Table], width: int) -> str:
    file = StringIO()
    console = Console(width=width, file=file)
    for table in tables:
        console.print(table)
    return file.getvalue()


def colours(tables: Sequence[Table]) -> set[int]:
    """Codes of the colours and weights of what is printed, by ECMA-48."""
    file = StringIO()
    console = Console(width=80, file=file, force_terminal=True, color_system="standard")
    for table in tables:
        console.print(table)
    return {int(code) for some in re.findall(r"\x1b\[([\d;]+)m", file.getvalue()) for code in some.split(";")}


def cut_off(tables: Sequence[Table], width: int) -> list[int]:
    """The tables of which something is missing at this width."""
    return [i for i, table in enumerate(tables) if ELLIPSIS in on_screen([table], width)]
