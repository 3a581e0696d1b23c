"""Who is asked for drafts, in which order: the one place where a cascade of methods is walked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from speculon.core import Ask


def ask_in_turn(
    asks: Mapping[int, Iterable[Ask]], propose: Callable[[str, dict[int, int]], Iterable[int]]
) -> None:
    """Asks the methods of each sequence in turn until one has a draft: one call per method and turn, for all
    who wait for it.

    `propose` takes a method and the most drafts of each sequence, and returns the sequences that need not be
    asked again.
    """
    waiting = {i: iter(some) for i, some in asks.items()}
    while waiting:
        groups: dict[str, dict[int, int]] = {}
        for i in list(waiting):
            if (ask := next(waiting[i], None)) is None:
                del waiting[i]
            else:
                groups.setdefault(ask.method, {})[i] = ask.k
        for method, rooms in groups.items():
            for i in propose(method, rooms):
                del waiting[i]
