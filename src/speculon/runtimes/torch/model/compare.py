"""When the results of a replacement and of what it replaces count as equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Same = Callable[[Tensor, Tensor], bool]

EXACT = 1e-5  # of the largest value of a row, or of a column: rounding in fp32
# The error of a fused layer over that of the stock one, both against a finer dtype. Medians, since few large
# activations decide a norm: in bf16 1.03 was seen (Gemma 3, SmolLM2), 1.27 with bf16 norms.
NEAR, SAMPLING = 1.05, 5.0  # and for the noise of a median of n errors, SAMPLING / sqrt(n) more
HEAD = 64  # columns that are also compared by themselves, so that one wrong head is seen
# other numbers of rows take other kernels. In fp32, as a share of a row's largest value: what the load check
# allows for all layers together; below fp32 of a row's norm, from which an unrelated row differs by 1.4
OTHER_KERNELS, UNRELATED = 1e-4, 0.3
WORST = 4.0  # times the stock layer's largest error, each relative to its column; 1.4 was seen


def difference(results: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; NaN where one is: ask `not ... <= limit`."""
    return float((results - expected).abs().max() / expected.abs().max())


def close(results: Tensor, expected: Tensor, share: float = EXACT) -> bool:
    """Whether rows agree up to fp32 rounding, or up to another share of their largest values."""
    limit = share * expected.abs().amax(-1, keepdim=True)
    return results.shape == expected.shape and bool(((results - expected).abs() <= limit).all())


def nearly(results: Tensor, expected: Tensor, truth: Tensor) -> bool:
    """Whether `results` [T, D] are about as near to the truth as `expected`.

    In all, in each run of HEAD columns, and where it is worst.
    """
    if results.shape != expected.shape:
        return False
    errors, stock, sizes = (results - truth).abs(), (expected - truth).abs(), truth.abs()
    column = sizes.amax(0).clamp(min=EXACT * sizes.max())
    worst = bool((errors / column).max() <= WORST * (stock / column).max() + EXACT)
    return worst and all(map(near_medians, *(with_parts(x) for x in (errors, stock, sizes))))


def with_parts(x: Tensor) -> list[Tensor]:
    """All of it, and its runs of HEAD columns."""
    return [x, *x.split(HEAD, -1)]


def near_medians(errors: Tensor, stock: Tensor, sizes: Tensor) -> bool:
    limit = NEAR + SAMPLING / errors.numel() ** 0.5
    return bool(errors.median() <= limit * stock.median() + EXACT * sizes.median())


def alike(results: Tensor, expected: Tensor) -> bool:  # [R, any] each
    """Whether two computations of the same rows agree, within what other kernels change."""
    if expected.dtype is torch.float32:
        return close(results, expected, OTHER_KERNELS)
    results, expected = results.float(), expected.float()
    return bool(((results - expected).norm(dim=-1) <= UNRELATED * expected.norm(dim=-1)).all())
