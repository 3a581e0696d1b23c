"""Whether two sets of texts have one distribution: a permutation test of each cell, and one of all.

Under the null hypothesis it does not matter which arm a run belongs to, so the statistic is compared with
its values when the runs are dealt out anew (Fisher 1935). That is exact for any number of runs and any
vocabulary, and needs no formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RARE = 5  # tokens seen less often, both arms together, are counted as one


def deal(first: int, second: int, permutations: int, seed: int) -> Tensor:
    """1 for runs of the first arm, [1 + permutations, first + second]: as it was, then dealt out anew."""
    runs = first + second
    as_it_was = torch.arange(runs)[None] < first
    order = torch.rand(permutations, runs, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return torch.cat([as_it_was, order < first]).float()


def cells_of(texts: Tensor) -> Iterator[Tensor]:
    """Counts [runs, C] of the C tokens of each position of `texts` [runs, T], then of all positions together.

    The last cell finds a small shift that is the same everywhere.
    """
    for column in texts.T:
        yield counts_of(column[:, None])
    yield counts_of(texts)


def counts_of(texts: Tensor) -> Tensor:
    """How often each run has each token, [runs, C] from [runs, T]; rare tokens share one column."""
    _, index, seen = texts.unique(return_inverse=True, return_counts=True)
    common = seen >= RARE
    column = torch.where(common, common.cumsum(0) - 1, common.sum())
    width = int(common.sum()) + int(not common.all())
    return torch.zeros(len(texts), width).scatter_add_(1, column[index], torch.ones(texts.shape))


def max_z(counts: Tensor, arms: Tensor) -> Tensor:
    """The largest standardised difference of any token's count, [1 + permutations]; 0: all runs are equal.

    counts: [runs, C] of one cell; arms: [1 + permutations, runs] from `deal`.
    """
    runs, first = counts.shape[0], float(arms[0].sum())
    centred = counts - counts.mean(0)
    # of a sum drawn without replacement
    variance = first * (runs - first) / (runs * (runs - 1)) * centred.square().sum(0)
    alive = variance > 1e-9 * runs
    if not alive.any():
        return torch.zeros(len(arms))
    return (arms @ centred[:, alive]).abs_().div_(variance[alive].sqrt()).amax(-1)


def p_value(statistic: Tensor) -> float:
    """The share of values as large as the first one, itself counted: at least 1 / (1 + permutations)."""
    # equal counts may differ by a rounding
    return float((statistic >= statistic[0] * (1 - 1e-5)).double().mean())


def rejected(p: list[float], q: float) -> list[int]:
    """The rejected hypotheses, at most a share q of them wrongly (Benjamini and Hochberg 1995)."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    last = max((rank for rank, i in enumerate(order, 1) if p[i] <= q * rank / len(p)), default=0)
    return sorted(order[:last])
