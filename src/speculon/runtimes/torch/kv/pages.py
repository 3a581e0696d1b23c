"""What one sequence has of the page pool. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

GONE = -1  # in a page table: a page that was given back


@dataclass(slots=True)
class Pages:
    """The pages of one sequence. Between steps they have the K and V of `tokens[released:committed]`."""

    table: list[int] = field(default_factory=list)  # page numbers, in order; GONE for those of `released`
    released: int = 0  # first tokens whose pages were given back: no layer reads them again
    # drafting method -> tokens whose K and V it has in the same pages
    drafted: dict[str, int] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)  # drafting methods that had not read all of `released`
