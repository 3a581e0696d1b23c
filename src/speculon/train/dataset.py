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
        self.room = min(
            len(rows), int(min(limit, free_for(file)) // (length * width * teacher.precision.itemsize))
        )
        self.cached, self.valid = torch.empty(0), torch.empty(0)
        if self.room:
            shape, valid = (self.room, length, width), file.with_suffix(".valid")
            if not file.exists():
                valid.unlink(missing_ok=True)  # it is about a deleted file
            self.cached = torch.from_file(
                str(file), True, self.room * length * width, dtype=teacher.precision
            ).view(shape)
            self.valid = torch.from_file(str(valid), True, self.room, dtype=torch.uint8)

    def batch(self, chosen: Seq[int]) -> Batch:
        device = self.teacher.device
        ids = torch.from_numpy(self.rows.ids[list(chosen)].astype(np.int64)).to(device)
        weights = torch.from_numpy(self.rows.weights[list(chosen)]).to(device)
        return self.teacher.batch(ids, weights, self._states(chosen, ids))

    def _states(self, chosen: Seq[int], ids: Tensor) -> Tensor:
        known = [row < self.room and bool(self.valid[row]) for row in chosen]
        new = [place for place, known_one in enumerate(known) if not known_one]
        fresh = self.teacher.states(ids[new]) if new else None
        for place, states in zip(new, () if fresh is None else fresh, strict=True):
            if chosen[place] < self.room:
                self.cached[chosen[place]] = states.cpu()
                self.valid[chosen[place]] = 1  # last: a killed run leaves no partial row
        if fresh is not None and len(new) == len(chosen):
            return fresh
        parts = dict(zip(new, () if fresh is None else fresh, strict=True))
        return torch.stack(
            [
                parts[i] if i in parts else self.cached[row].to(self.teacher.device)
                for i, row in enumerate(chosen)
            ]
        )
