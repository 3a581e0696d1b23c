"""Products planted in the place of this machine's, so that a test of them says the same on any chip; and the
tests of this machine's own, which end where a load finds that they cannot be batch-invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.model.linear import Linear, Packed
from speculon.runtimes.torch.model.pieces import CannotBeInvariant

Multiply = Callable[[Tensor], Tensor]  # [T, D] -> [T, O]


def plant(monkeypatch: pytest.MonkeyPatch, multiplied: Callable[[Multiply, Tensor], Tensor]) -> None:
    """Fused layers, adapters and heads multiply by `multiplied`, of this machine's product and the rows."""
    for layout in (Linear, Packed):
        stock = layout.__call__

        def call(self: Any, x: Tensor, stock: Any = stock) -> Tensor:
            return multiplied(partial(stock, self), x)

        monkeypatch.setattr(layout, "__call__", call)


def one_by_one(multiply: Multiply, x: Tensor) -> Tensor:
    """Each row by itself, so that it is the same in every batch."""
    return torch.cat([multiply(row.clone()) for row in x.split(1)]) if len(x) else multiply(x)


def by_place(multiply: Multiply, x: Tensor) -> Tensor:
    """A row's place in its batch changes its last bits, so that no number of rows agrees with another."""
    places = torch.arange(len(x))[:, None]
    return multiply(x) * (1 + places * torch.finfo(x.dtype).eps).to(x.dtype)


@contextmanager
def where_invariant() -> Iterator[None]:
    """Skips the test where a target cannot be batch-invariant with the kernels of this machine.

    Planted kernels show that it can be, and that it is refused.
    """
    try:
        yield
    except CannotBeInvariant as reason:
        pytest.skip(f"on this machine {reason}")
    except UnsupportedModel as refusal:
        if not str(refusal).startswith("batch_invariant: "):
            raise
        pytest.skip(f"on this machine {refusal}")
