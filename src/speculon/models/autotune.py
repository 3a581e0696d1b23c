"""Which of several ways is the fastest on this machine: chips and their libraries differ by a factor of two,
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

TURNS = 7


def median_times(ways: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each. They take turns, so that what a shared machine does meanwhile befalls all."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(TURNS):
        for way, taken in zip(ways, seconds, strict=True):
            began = perf_counter()
            way()
            taken.append(perf_counter() - began)
    return [median(taken) for taken in seconds]
