"""Attention of single rows as two sparse products over the pages, without gathering keys and values."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from speculon.decoding.kv.store import Where, as_index

QUERIES = 256  # floats of queries per key: beyond it SDPA was faster (2 cores, fp32)
ENTRY = 8  # bytes of an entry: its column and its score

# torch warns once per process that such tensors are in beta; users can do nothing about it
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0], [], [], (0, 0), check_invariants=False)


@dataclass(slots=True)
class SparseKeys:
    """The keys that B rows see: a sparse matrix of S entries per query. Each layer overwrites its values."""

    entries: Tensor  # CSR [B * H, slots * Hkv]
    columns: Tensor  # [B * H * S]
    first: Tensor  # [B * H + 1], where the entries of each query begin
    scores: Tensor  # [B, H, S], the values
    hidden: Tensor  # [B, 1, S] additive mask


def is_faster(query: Tensor, group: int) -> bool:
    """Whether sparse products are faster for queries [T, H, D], `group` of them per key."""
    return query.device.type == "cpu" and query.dtype is torch.float32 and group * query.shape[-1] <= QUERIES


def sparse_keys(
    where: Where, rows: int, heads: int, group: int, hidden: Tensor | None, slots: int, device: torch.device
) -> SparseKeys:
    """B rows over the keys at slots `where` [B * S] of `slots`; `hidden` [B, 1, S] is an additive mask."""
    kv_heads = heads // group
    slot = as_index(where, device).int().view(rows, 1, -1)  # [B, 1, S]
    head = torch.arange(heads, dtype=torch.int32, device=device).div_(group, rounding_mode="floor")[:, None]
    columns = (slot * kv_heads + head).flatten()  # [B * H * S]
    first = torch.arange(0, len(columns) + 1, slot.shape[-1], dtype=torch.int32, device=device)
    values = torch.empty(len(columns), device=device)
    shape = (rows * heads, slots * kv_heads)
    # invariants are not checked: padding repeats a column
    entries = torch.sparse_csr_tensor(first, columns, values, shape, check_invariants=False)
    scores = entries.values().view(rows, heads, -1)
    mask = slot.new_zeros((), dtype=values.dtype) if hidden is None else hidden
    return SparseKeys(entries, columns, first, scores, mask)


def attend_single(
    sparse: SparseKeys, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:  # [B, H, Dv]
    """Queries [B, H, Dk] over keys [Dk, slots * Hkv] and values [slots * Hkv, Dv] of a layer."""
    rows, heads, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    scores = sparse.scores.copy_(sparse.hidden)
    torch.sparse.sampled_addmm(
        sparse.entries, query.reshape(-1, width), keys, alpha=scale, out=sparse.entries
    )
    weights = scores.softmax(-1).flatten()
    # the weighted sum of values; F.embedding_bag's checks would double its cost
    bags = torch.embedding_bag(values, sparse.columns, sparse.first, False, 0, False, weights, True)
    return bags[0].view(rows, heads, -1)
