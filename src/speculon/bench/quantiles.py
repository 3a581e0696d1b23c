"""Quantiles of a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def quartiles(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return quantile(ordered, 0.25), quantile(ordered, 0.75)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
