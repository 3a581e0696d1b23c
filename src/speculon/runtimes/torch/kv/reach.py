"""How far layers read back, and how many pages a sequence therefore holds."""

from __future__ import annotations

from collections.abc import Iterable

from speculon.core.config import MAX_DRAFTS
from speculon.core.types import ceil_div
from speculon.runtimes.torch.needs import LayerSpec, Needs


def joint_reach(target: Iterable[LayerSpec], drafters: Iterable[Needs] = ()) -> int | None:
    """Positions before the committed ones that a row of target or drafters may read; None: all, or no layer
    is in pages, which then only count tokens.

    A drafter reads the accepted drafts of a round in the next one; a recurrent one may begin again.
    """
    behind = [(layer.reach, 0) for layer in target]
    for needs in drafters:
        if needs.states:
            return None
        behind += [(layer.reach, MAX_DRAFTS) for layer in needs.layers]
    longest = 0
    for reach, lag in behind:
        if reach is None:
            return None
        longest = max(longest, reach + lag)
    return longest or None


def max_pages(length: int, rows: int, reach: int | None, block_size: int) -> int:
    """The most pages that a sequence holds at once while it grows to `length` tokens, `rows` at most in a
    step, of which each reads `reach` positions before it (None: all).
    """
    pages = ceil_div(length, block_size)
    return pages if reach is None else min(pages, ceil_div(reach + rows - 1, block_size) + 1)
