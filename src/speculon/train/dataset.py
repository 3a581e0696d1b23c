"""Rows of tokens with the target's hidden states, which are kept on disk so that later passes reuse them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Seq
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
    """Rows with the target's states; the first ones are cached in a file of at most `limit` bytes."""

    def __init__(self, teacher: Teacher, rows: Rows, file: Path, limit: float):
        self.teacher, self.rows = teacher, rows
        width = (len(teacher.taps) + 1) * teacher.width
        length = rows.ids.shape[1]
        row_bytes = length * width * teacher.precision.itemsize
        self.room = min(len(rows), int(min(limit, free_for(file)) // row_bytes))
        self.cached, self.valid = torch.empty(0), torch.empty(0)
        if self.room:
            shape, valid = (self.room, length, width), file.with_suffix(".valid")
            if not file.exists():
                valid.unlink(missing_ok=True)  # it is about a deleted file
            size = self.room * length * width
            self.cached = torch.from_file(str(file), True, size, dtype=teacher.precision).view(shape)
            self.valid = torch.from_file(str(valid), True, self.room, dtype=torch.uint8)

    def batch(self, chosen: Seq[int], draw: int = 0) -> Batch:
        device = self.teacher.device
        ids = torch.from_numpy(self.rows.ids[list(chosen)].astype(np.int64)).to(device)
        weights = torch.from_numpy(self.rows.weights[list(chosen)]).to(device)
        return self.teacher.batch(ids, weights, self._states(chosen, ids), draw)

    def _states(self, chosen: Seq[int], ids: Tensor) -> Tensor:  # [B, T, (k + 1) * Ht]
        missing = [place for place, row in enumerate(chosen) if not self._is_cached(row)]
        computed = self.teacher.states(ids[missing]) if missing else ()
        found = dict(zip(missing, computed, strict=True))
        for place, states in found.items():
            self._cache(chosen[place], states)
        device = self.teacher.device
        return torch.stack(
            [
                found[place] if place in found else self.cached[row].to(device)
                for place, row in enumerate(chosen)
            ]
        )

    def _is_cached(self, row: int) -> bool:
        return row < self.room and bool(self.valid[row])

    def _cache(self, row: int, states: Tensor) -> None:
        if row < self.room:
            self.cached[row] = states.cpu()
            self.valid[row] = 1  # last: a killed run leaves no partial row
