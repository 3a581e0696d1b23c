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
    """Bytes that a file may grow to: a disk that is full while pages are written to it ends the process
    without a word.
    """
    taken = file.stat().st_blocks * 512 if file.exists() else 0
    return 0.9 * (shutil.disk_usage(file.parent).free + taken)


class Dataset:
    """What the target makes of rows: looked at once for the first ones, in a file of at most `limit` bytes;
    anew for others.
    """

    def __init__(self, teacher: Teacher, rows: Rows, file: Path, limit: float):
        self.teacher, self.rows = teacher, rows
        width = (len(teacher.taps) + 1) * teacher.width
        length = rows.ids.shape[1]
        self.room = min(
            len(rows), int(min(limit, free_for(file)) // (length * width * teacher.number.itemsize))
        )
        self.kept, self.seen = torch.empty(0), torch.empty(0)
        if self.room:
            shape, seen = (self.room, length, width), file.with_suffix(".seen")
            if not file.exists():
                seen.unlink(missing_ok=True)  # it spoke of a file that somebody deleted
            self.kept = torch.from_file(
                str(file), True, self.room * length * width, dtype=teacher.number
            ).view(shape)
            self.seen = torch.from_file(str(seen), True, self.room, dtype=torch.uint8)

    def batch(self, chosen: Seq[int]) -> Batch:
        device = self.teacher.device
        ids = torch.from_numpy(self.rows.ids[list(chosen)].astype(np.int64)).to(device)
        weights = torch.from_numpy(self.rows.weights[list(chosen)]).to(device)
        return self.teacher.teach(ids, weights, self._looked(chosen, ids))

    def _looked(self, chosen: Seq[int], ids: Tensor) -> Tensor:
        known = [row < self.room and bool(self.seen[row]) for row in chosen]
        new = [place for place, known_one in enumerate(known) if not known_one]
        fresh = self.teacher.look(ids[new]) if new else None
        for place, look in zip(new, () if fresh is None else fresh, strict=True):
            if chosen[place] < self.room:
                self.kept[chosen[place]] = look.cpu()
                self.seen[chosen[place]] = 1  # after the row itself: a killed run leaves no half of one
        if fresh is not None and len(new) == len(chosen):
            return fresh
        parts = dict(zip(new, () if fresh is None else fresh, strict=True))
        return torch.stack(
            [
                parts[i] if i in parts else self.kept[row].to(self.teacher.device)
                for i, row in enumerate(chosen)
            ]
        )
