"""When two implementations of the same computation count as equal."""

from __future__ import annotations

from torch import Tensor

EXACT = 1e-5  # of a row's largest value, in fp32
# in other dtypes: error of a fused layer over that of the stock one, both against the layer in fp32
NEAR = 1.25


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether rows agree up to fp32 rounding."""
    limit = EXACT * expected.abs().amax(-1, keepdim=True)
    return found.shape == expected.shape and bool(((found - expected).abs() <= limit).all())


def nearly(found: Tensor, expected: Tensor, truth: Tensor) -> bool:
    """Whether `found` is about as near to the truth as `expected` is."""
    return found.shape == expected.shape and bool(
        (found - truth).norm() <= NEAR * (expected - truth).norm() + EXACT * truth.norm()
    )
