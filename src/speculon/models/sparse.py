"""Attention of single rows as two sparse products, which read keys and values where they lie: nothing is
gathered.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from speculon.kv.store import Where, as_index

QUERIES = (
    # floats of queries to a key: beyond it SDPA was faster, which multiplies all of them by a key at once (2
    # cores, fp32)
    256
)
ENTRY = 8  # bytes of one: its column and its score

# a process is told once that such tensors are "in beta"; nobody who generates a text can help it
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0], [], [], (0, 0), check_invariants=False)


@dataclass(slots=True)
class Sight:
    """Which keys B rows see: a sparse matrix of S entries for each of B * H queries, whose values each layer
    overwrites.
    """

    entries: Tensor  # CSR [B * H, slots * Hkv]
    columns: Tensor  # [B * H * S], of them
    first: Tensor  # [B * H + 1], where each query's begin
    scores: Tensor  # [B, H, S], the values
    hidden: Tensor  # [B, 1, S] additive mask


def pays(query: Tensor, group: int) -> bool:
    """Whether queries [T, H, D] of single rows, `group` of them to a key, are faster served so."""
    return query.device.type == "cpu" and query.dtype is torch.float32 and group * query.shape[-1] <= QUERIES


def sight(
    where: Where, rows: int, heads: int, group: int, hidden: Tensor | None, slots: int, device: torch.device
) -> Sight:
    """What B rows see of the keys at the slots `where` [B * S], out of `slots`: all of them where `hidden`
    [B, 1, S] is None.
    """
    kv_heads = heads // group
    slot = as_index(where, device).int().view(rows, 1, -1)  # [B, 1, S]
    head = torch.arange(heads, dtype=torch.int32, device=device).div_(group, rounding_mode="floor")[:, None]
    columns = (slot * kv_heads + head).flatten()  # [B * H * S]
    first = torch.arange(0, len(columns) + 1, slot.shape[-1], dtype=torch.int32, device=device)
    values = torch.empty(len(columns), device=device)
    shape = (rows * heads, slots * kv_heads)
    # padding repeats a column
    entries = torch.sparse_csr_tensor(first, columns, values, shape, check_invariants=False)
    scores = entries.values().view(rows, heads, -1)
    return Sight(
        entries, columns, first, scores, slot.new_zeros((), dtype=values.dtype) if hidden is None else hidden
    )


def attend_single(seen: Sight, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Queries [B, H, Dk] over all keys [Dk, slots * Hkv] and values [slots * Hkv, Dv] of a layer: [B, H, Dv]."""
    rows, heads, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    scores = seen.scores.copy_(seen.hidden)
    torch.sparse.sampled_addmm(seen.entries, query.reshape(-1, width), keys, alpha=scale, out=seen.entries)
    weights = scores.softmax(-1).flatten()
    # A sum over a bag of rows, each by its weight: what embeddings call it. Not F.embedding_bag, whose checks
    # cost as much.
    bags = torch.embedding_bag(values, seen.columns, seen.first, False, 0, False, weights, True)
    return bags[0].view(rows, heads, -1)
