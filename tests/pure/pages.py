"""Sequences in a page pool, without a model."""

from __future__ import annotations

from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv.blocks import BlockPool


def opened(pool: BlockPool, seq: Sequence) -> int:
    """Begins a sequence with the pages that are found; returns how many of its tokens are in these."""
    seq.committed = pool.open(seq)
    return seq.committed


def fill(pool: BlockPool, seq: Sequence, upto: int | None = None) -> None:
    """Computes a sequence up to `upto` tokens, as a step would."""
    seq.committed = len(seq.tokens) if upto is None else upto
    pool.extend(seq, seq.committed)
    pool.cut_to_committed(seq)
