"""Attention of blocks: each row sees its sequence's pages, and the block's own rows beside them.

The keys and values of a block are those of one call. They are never written to pages: the next round has
another block at these positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from speculon.runtimes.torch.kv.store import SpanView, View, as_index, end_to_end
from speculon.runtimes.torch.model.attention import fold, unfold
from speculon.runtimes.torch.model.grouping import buckets, padded_slots

DraftBlock = tuple[Sequence, int, int]  # a sequence, the position of its anchor n, and the rows of its block


@dataclass(frozen=True, slots=True)
class Sight:
    """What the row at position p of a block sees, whose anchor is at position n."""

    causal: bool = False  # no later row of its block
    reach: int | None = None  # no page before p - reach, and no row farther than that; None: all
    anchored: bool = False  # with a reach: no page before n - reach, but all rows


@dataclass(slots=True)
class BlockCall:
    """One call of the kernel for B blocks of up to n rows each, with up to S keys in pages."""

    rows: Tensor  # [B * n] of the flat batch; those of padding repeat the last row of their block
    blocks: int  # B
    n: int
    slots: Tensor  # [B * (S + n)]; the last n of each block are replaced by its own keys
    mask: Tensor | None  # additive [B, 1, n * g, S + n]


@dataclass(slots=True)
class BlockPlan:
    """The calls of all layers with one sight, and where the rows of the flat batch are in them."""

    calls: list[BlockCall]
    order: Tensor  # [T]


def block_view(own: DraftPages, blocks: list[DraftBlock]) -> View:
    """What blocks read: `context` of each span are its keys in pages. No row has a slot to be written."""
    parts = []
    for seq, n, rows in blocks:
        pages = own.of(seq)
        parts.append((rows, own.store.where_of(pages, n), n - pages.released, pages.released))
    return View(own.store, slice(0, 0), end_to_end(parts), own.first_layer)


def attend_blocks(
    view: View,
    layer: int,
    sight: Sight,
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, Hkv, D]
    value: Tensor,  # [T, Hkv, D]
    scaling: float,
) -> Tensor:  # [T, H, D]
    group = query.shape[1] // key.shape[1]
    memo = (sight, group)
    plan: BlockPlan | None = view.memo.get(memo)
    if plan is None:
        plan = view.memo[memo] = plan_blocks(view, layer, sight, group, query)
    outs = []
    for call in plan.calls:
        k, v = view.store.gather(view.first_layer + layer, call.slots)
        k, v = with_own(k, key, call), with_own(v, value, call)  # [B, Hkv, S + n, D]
        q = fold(query.index_select(0, call.rows), call.blocks, group)  # [B, Hkv, n * g, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask, scale=scaling)
        outs.append(unfold(out, group))
    return torch.cat(outs).index_select(0, plan.order)


def with_own(copies: Tensor, own: Tensor, call: BlockCall) -> Tensor:
    """Copies of pages [B * (S + n), Hkv, D] with the blocks' own rows at their ends: [B, Hkv, S + n, D].

    Changes `copies`, never the pages.
    """
    keys = copies.view(call.blocks, -1, *copies.shape[1:])
    keys[:, -call.n :] = own.index_select(0, call.rows).view(call.blocks, call.n, *own.shape[1:])
    return keys.transpose(1, 2)


def plan_blocks(view: View, layer: int, sight: Sight, group: int, query: Tensor) -> BlockPlan:
    token_bytes, device = view.spec(layer).bytes_per_token, query.device
    calls, placed, at = [], [], 0
    for bucket in buckets([visible(span, sight) for span in view.spans], None, token_bytes, device):
        call = make_call(bucket, sight, group, query.dtype, device)
        calls.append(call)
        for i, span in enumerate(bucket):
            first = at + i * call.n
            placed += [(span.first + row, first + row) for row in range(span.rows)]
        at += len(bucket) * call.n
    order = [row for _, row in sorted(placed)]
    return BlockPlan(calls, torch.tensor(order, device=device))


def visible(span: SpanView, sight: Sight) -> SpanView:
    """The span with the pages alone that its first row sees."""
    keys = span.context if sight.reach is None else min(span.context, sight.reach)
    return SpanView(span.first, span.last, span.tail(keys), keys)


def make_call(
    bucket: list[SpanView], sight: Sight, group: int, dtype: torch.dtype, device: torch.device
) -> BlockCall:
    n, keys = max(span.rows for span in bucket), max(span.context for span in bucket)
    rows = [min(span.first + i, span.last - 1) for span in bucket for i in range(n)]
    slots = as_index(padded_slots([span.where for span in bucket], keys + n, device), device)
    hidden = hidden_keys(bucket, sight, n, keys, device)  # [B, n, S + n]
    mask = None
    if hidden.any():
        folded = hidden.repeat_interleave(group, 1)[:, None]
        mask = torch.zeros(folded.shape, dtype=dtype, device=device).masked_fill_(folded, -torch.inf)
    return BlockCall(torch.tensor(rows, device=device), len(bucket), n, slots, mask)


def hidden_keys(
    bucket: list[SpanView], sight: Sight, n: int, keys: int, device: torch.device
) -> Tensor:  # [B, n, S + n]
    """Which keys each row of a call does not see; its own row is always seen."""
    context, own = (
        torch.tensor(numbers, device=device)[:, None, None]
        for numbers in ([span.context for span in bucket], [span.rows for span in bucket])
    )
    row = torch.arange(n, device=device)[None, :, None]
    page, other = torch.arange(keys, device=device), torch.arange(n, device=device)
    in_pages = (page >= context).expand(-1, n, -1)
    in_block = (other >= own) & (other != row)
    if sight.causal:
        in_block = in_block | (other > row)
    if sight.reach is not None and not sight.anchored:
        in_pages = in_pages | (page < context + row - sight.reach)
        in_block = in_block | ((other - row).abs() > sight.reach)
    return torch.cat([in_pages, in_block.expand(len(bucket), -1, -1)], -1)
