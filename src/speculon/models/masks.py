"""Additive attention masks of spans, as slices of cached banded matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from speculon.kv.store import power_of_two


class MaskCache:
    """Banded base masks, grown by doubling: a single span's mask is a slice of one of them."""

    def __init__(self) -> None:
        self.bases: dict[tuple[int | None, int, torch.dtype, torch.device], tuple[Tensor, int, int, int]] = {}

    def slice(
        self,
        n: int,
        length: int,
        window: int | None,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        padding: int = 0,
    ) -> Tensor:  # [n * g, length + padding]
        """The mask of the last n positions: row i * g + j sees the keys up to length - n + i."""
        key = (window, group, dtype, device)
        base, rows, before, after = self.bases.get(key, (None, 0, 0, 0))
        if base is None or n > rows or length - n > before or n + padding > after:
            rows, after = max(rows, power_of_two(n)), max(after, power_of_two(n + padding))
            before = max(before, power_of_two(length - n))
            base = banded(rows, before, after, window, group, dtype, device)
            self.bases[key] = base, rows, before, after
        mask = base[: n * group, before - (length - n) : before + n + padding]
        # A kernel of CUDA ends with "misaligned address" where a mask does not begin at 16 bytes.
        return mask if device.type == "cpu" else mask.clone()


def banded(
    rows: int,
    before: int,
    after: int,
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """0 where row i sees column c (before + i - window < c <= before + i), minus infinity elsewhere."""
    last = (before + torch.arange(rows, device=device)).repeat_interleave(group)[:, None]  # [rows * g, 1]
    column = torch.arange(before + after, device=device)[None]
    hidden = column > last
    if window is not None:
        hidden |= column <= last - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


MASKS = MaskCache()
