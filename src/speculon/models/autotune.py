"""Measures which of several kernels is fastest here: chips and libraries differ by a factor of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

REPEATS = 7


def median_times(candidates: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each candidate. They alternate, so that other load on the machine slows all alike."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(REPEATS):
        for candidate, times in zip(candidates, seconds, strict=True):
            start = perf_counter()
            candidate()
            times.append(perf_counter() - start)
    return [median(times) for times in seconds]
