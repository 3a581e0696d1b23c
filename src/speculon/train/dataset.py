"""Rows of tokens with the target's states and best tokens, kept on disk so that later passes reuse them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Seq
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speculon.train.data import Rows
from speculon.train.teacher import Batch, Teacher


def free_for(file: Path) -> float:
    """Bytes that a file may grow to. Writing to a mapped file on a full disk kills the process silently."""
    taken = file.stat().st_blocks * 512 if file.exists() else 0
    return 0.9 * (shutil.disk_usage(file.parent).free + taken)


class Dataset:
    """Rows with the target's outputs; those of the first ones are cached, in at most `limit` bytes."""

    def __init__(self, teacher: Teacher, rows: Rows, file: Path, limit: float):
        self.teacher, self.rows = teacher, rows
        width = (len(teacher.taps) + 1) * teacher.width
        length = rows.ids.shape[1]
        row_bytes = length * width * teacher.precision.itemsize
        self.room = min(len(rows), int(min(limit, free_for(file)) // row_bytes))
        self.cached, self.best, self.valid = torch.empty(0), torch.empty(0), torch.empty(0)
        if self.room:
            best, valid = file.with_suffix(".best"), file.with_suffix(".valid")
            if not (file.exists() and best.exists()):
                valid.unlink(missing_ok=True)  # it is about a deleted file
            self.cached = mapped(file, (self.room, length, width), teacher.precision)
            self.best = mapped(best, (self.room, length), torch.int32)
            self.valid = mapped(valid, (self.room,), torch.uint8)

    def batch(self, chosen: Seq[int], draw: int = 0) -> Batch:
        device = self.teacher.device
        ids = torch.from_numpy(self.rows.ids[list(chosen)].astype(np.int64)).to(device)
        weights = torch.from_numpy(self.rows.weights[list(chosen)]).to(device)
        return self.teacher.batch(ids, weights, *self._outputs(chosen, ids), draw)

    def _outputs(self, chosen: Seq[int], ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's states [B, T, (k + 1) * Ht], and its best tokens [B, T]."""
        missing = [place for place, row in enumerate(chosen) if not self._is_cached(row)]
        states = self.teacher.states(ids[missing]) if missing else ids.new_empty(0)
        best = self.teacher.best(states[..., -self.teacher.width :]) if missing else ids.new_empty(0)
        computed = dict(zip(missing, zip(states, best, strict=True), strict=True))
        for place, outputs in computed.items():
            self._cache(chosen[place], *outputs)
        found = [
            computed[place] if place in computed else (self.cached[row], self.best[row])
            for place, row in enumerate(chosen)
        ]
        device = self.teacher.device
        states, best = (
            torch.stack([part.to(device) for part in parts]) for parts in zip(*found, strict=True)
        )
        return states, best.long()

    def _is_cached(self, row: int) -> bool:
        return row < self.room and bool(self.valid[row])

    def _cache(self, row: int, states: Tensor, best: Tensor) -> None:
        if row < self.room:
            self.cached[row], self.best[row] = states.cpu(), best.cpu()
            self.valid[row] = 1  # last: a killed run leaves no partial row


def mapped(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), True, prod(shape), dtype=dtype).view(shape)
