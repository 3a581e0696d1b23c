"""When two implementations of the same computation count as equal."""

from __future__ import annotations

from torch import Tensor

EXACT = 1e-5  # of the largest value of a row, or of a column: rounding in fp32
# The error of a fused layer over that of the stock one, both against a finer dtype. Medians, since few large
# activations decide a norm: in bf16 1.03 was seen (Gemma 3, SmolLM2), 1.27 with bf16 norms.
NEAR, SAMPLING = 1.05, 5.0  # and for the noise of a median of n errors, SAMPLING / sqrt(n) more
HEAD = 64  # columns that are also compared by themselves, so that one wrong head is seen
WORST = 4.0  # times the stock layer's largest error, each relative to its column; 1.4 was seen


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether rows agree up to fp32 rounding."""
    limit = EXACT * expected.abs().amax(-1, keepdim=True)
    return found.shape == expected.shape and bool(((found - expected).abs() <= limit).all())


def nearly(found: Tensor, expected: Tensor, truth: Tensor) -> bool:
    """Whether `found` [T, D] is about as near to the truth as `expected` is.

    In all, in each run of HEAD columns, and where it is worst.
    """
    if found.shape != expected.shape:
        return False
    errors, stock, sizes = (found - truth).abs(), (expected - truth).abs(), truth.abs()
    column = sizes.amax(0).clamp(min=EXACT * sizes.max())
    worst = bool((errors / column).max() <= WORST * (stock / column).max() + EXACT)
    return worst and all(map(near_medians, *(with_parts(x) for x in (errors, stock, sizes))))


def with_parts(x: Tensor) -> list[Tensor]:
    """All of it, and its runs of HEAD columns."""
    return [x, *x.split(HEAD, -1)]


def near_medians(errors: Tensor, stock: Tensor, sizes: Tensor) -> bool:
    limit = NEAR + SAMPLING / errors.numel() ** 0.5
    return bool(errors.median() <= limit * stock.median() + EXACT * sizes.median())
