"""Attention over pages: the one function every architecture of transformers calls in place of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core import ceil_div
from speculon.errors import UnsupportedModel
from speculon.kv.store import SpanView, View, Where, as_index, gather_bytes, power_of_two
from speculon.models.sparse import ENTRY, Sight, attend_single, pays, sight

NAME = "speculon"
# guess: up to here the head group is folded into the query rows, beyond it SDPA repeats K and V itself
FOLD_ROWS = 32
PIECE = {
    "cpu": 64
    # rows in one call: its keys end with its last row, so that less is computed only to be hidden (48 and
    # 128:
    # slower)
}
# In bytes of K and V read, measured out of cache on 2 cores: what a call costs besides its keys, what each
# further query row adds
# to a key, and what it costs to copy the keys of several spans together for a joint call.
CALL = {"cpu": 200 << 10}
CALL_ELSEWHERE = 32 << 20  # guess, for devices with far more bandwidth
ROW, COPY = 0.08, 0.1
# Single rows beside few rows of others have a call of their own, and rows are picked out and put back: 1.0 to
# 1.5 ms of a step of
# 20 layers, the time in which so many bytes of keys and values are read in each.
REREAD = 1 << 20


@dataclass(slots=True)
class Call:
    """One call of the kernel: B spans of up to n rows each."""

    rows: slice | Tensor  # of the flat batch; [B * n] when padded
    spans: int  # B
    n: int
    where: Where  # slots of the keys, [B * S]
    mask: Tensor | None  # additive; [n * g, S] for one span, [B, 1, n * g, S] for many
    seen: Sight | None = None  # where single rows are attended to by sparse products


@dataclass(slots=True)
class Calls:
    """What all layers of one window do in one forward."""

    calls: list[Call]
    # [T] where the row of the flat batch lies among the calls' rows, None: in place
    order: Tensor | None = None


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, Dk]
    key: Tensor,  # [1, Hkv, T, Dk]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    view: View | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] attention sinks
    **_: object,  # looked at once, by models/probe
) -> tuple[Tensor, None]:
    """What transformers' own layers call in place of theirs."""
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} builds an attention mask of its own")
    if view is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not hand the arguments of a forward down to its attention"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return attend_rows(view, layer, query, key, value, scaling, softcap, s_aux)[None], None


def attend_rows(
    view: View,
    layer: int,
    query: Tensor,  # [T, H, Dk]
    key: Tensor,  # [T, Hkv, Dk]
    value: Tensor,  # [T, Hkv, Dv]
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [T, H, Dv]
    """Writes K and V of all T rows into the pages, then lets each span attend to its own sequence."""
    view.write(layer, key, value)
    return attend_written(view, layer, query, scaling, softcap, sinks)


def attend_written(
    view: View,
    layer: int,
    query: Tensor,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # [T, H, Dv]
    """The same once the rows' own keys and values are in the pages."""
    plain = softcap is None and sinks is None
    group = query.shape[1] // view.spec(layer).heads
    todo = calls_of(view, layer, group, plain, query)
    outs = []
    for call in todo.calls:
        # [B * n, H, Dk]
        q = query[call.rows] if isinstance(call.rows, slice) else query.index_select(0, call.rows)
        if call.seen is not None:
            outs.append(attend_single(call.seen, q, *view.pool(layer), scaling))
            continue
        k, v = view.take(layer, call.where, call.spans)  # [B, Hkv, S, D]
        if not plain:
            out = by_hand(fold(q, call.spans, group), k, v, call.mask, group, scaling, softcap, sinks)
        elif call.n > FOLD_ROWS:
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k, v, attn_mask=call.mask, scale=scaling, enable_gqa=group > 1
            )
            outs.append(out[0].transpose(0, 1))
            continue
        else:
            out = F.scaled_dot_product_attention(
                fold(q, call.spans, group), k, v, attn_mask=call.mask, scale=scaling
            )
        outs.append(unfold(out, group))
    rows = outs[0] if len(outs) == 1 else torch.cat(outs)
    return rows if todo.order is None else rows.index_select(0, todo.order)


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: int,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax in fp32 with what no kernel takes: a soft cap on the scores, a sink that drains probability."""
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    # [B, Hkv, n * g, S]; scaled first: fp16 ends at 65504
    scores = ((q * scale) @ k.transpose(-1, -2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(2, (-1, group))  # [B, Hkv, n, g, S]
    if mask is not None:
        scores = scores + mask.unsqueeze(-2)
    if sinks is not None:
        drain = sinks.float().view(-1, 1, group, 1).expand(*scores.shape[:-1], 1)  # [B, Hkv, n, g, 1]
        scores = torch.cat([scores, drain], -1)
    p = scores.softmax(-1)
    if sinks is not None:
        p = p[..., :-1]
    return p.flatten(2, 3).to(v.dtype) @ v  # [B, Hkv, n * g, Dv]


def fold(q: Tensor, spans: int, group: int) -> Tensor:
    """[B * n, H, D] -> [B, Hkv, n * g, D]: row i of head (h, j) becomes row i * g + j of key-value head h."""
    rows, heads, width = q.shape
    if rows == spans:  # n = 1
        return q.reshape(spans, heads // group, group, width)
    return q.reshape(spans, -1, heads // group, group, width).transpose(1, 2).flatten(2, 3)


def unfold(out: Tensor, group: int) -> Tensor:
    """[B, Hkv, n * g, D] -> [B * n, H, D]."""
    spans, kv_heads, rows, width = out.shape
    if rows == group:  # n = 1
        return out.reshape(spans, kv_heads * group, width)
    return out.view(spans, kv_heads, -1, group, width).transpose(1, 2).reshape(-1, kv_heads * group, width)


def calls_of(view: View, layer: int, group: int, plain: bool, query: Tensor) -> Calls:
    """The calls for one kind of layer; made once per forward and shared by all its layers."""
    key = (view.kind(layer), group, plain)
    todo: Calls | None = view.memo.get(key)
    if todo is None:
        todo = view.memo[key] = make_calls(view, layer, group, plain, query)
    return todo


def make_calls(view: View, layer: int, group: int, plain: bool, query: Tensor) -> Calls:
    spec, dtype, device, heads = view.spec(layer), query.dtype, query.device, query.shape[1]
    window, folded = spec.window, group if plain else 1
    entry = heads * ENTRY if plain and pays(query, group) else 0
    calls, placed, at = [], [], 0
    most = (
        1
        if entry and rereads(view.spans, window) * spec.bytes_per_token <= REREAD
        else PIECE.get(device.type)
    )
    few = [span for span in view.spans if span.rows <= FOLD_ROWS]
    if most != 1 and joined_by_most(few) and fits(few, window, spec.bytes_per_token, device):
        entry = 0
    spans = [piece for span in view.spans for piece in pieces(span, most or span.rows)]
    for bucket in buckets(spans, window, spec.bytes_per_token, device, entry):
        if len(bucket) == 1:
            call = span_call(bucket[0], window, folded, dtype, device)
        else:
            call = joint_call(bucket, window, folded, dtype, device)
        if entry and call.n == 1 and fits(bucket, window, entry, device):
            hidden = None if call.mask is None else call.mask[:, 0, :1]
            call.seen = sight(call.where, len(bucket), heads, group, hidden, view.store.slots, device)
        calls.append(call)
        for i, span in enumerate(bucket):
            placed.append((span.first, range(at + i * call.n, at + i * call.n + span.rows)))
        at += len(bucket) * call.n
    order = [row for _, rows in sorted(placed, key=lambda x: x[0]) for row in rows]
    return Calls(calls, None if order == list(range(at)) else torch.tensor(order, device=device))


def rereads(spans: list[SpanView], window: int | None) -> float:
    """Keys that are read again where each row of a crowd is served by itself; not for a text alone, nor
    beside a prompt.
    """
    if len(spans) == 1 or any(span.rows > FOLD_ROWS for span in spans):
        return inf
    return sum((span.rows - 1) * reach(span, window) for span in spans)


def joined_by_most(spans: list[SpanView]) -> bool:
    """Whether single rows go along with the few rows of others: those are as many, and not one, which is read
    in place.
    """
    singles = sum(span.rows == 1 for span in spans)
    return 1 < len(spans) - singles >= singles


def pieces(span: SpanView, most: int) -> list[SpanView]:
    """The span in parts of at most so many rows, as even as may be."""
    parts = ceil_div(span.rows, most)
    ends = [span.rows * i // parts for i in range(parts + 1)]
    return [span] if parts == 1 else [span.part(begin, end) for begin, end in pairwise(ends)]


def buckets(
    spans: list[SpanView], window: int | None, token_bytes: int, device: torch.device, entry: int = 0
) -> list[list[SpanView]]:
    """Spans that share one padded call: of like reach, joined while that costs less than calls of their own.

    With `entry`, the bytes of a key in a sparse product, single rows are among themselves.
    """

    def kind(span: SpanView) -> int:
        return 2 if span.rows > FOLD_ROWS else 0 if entry and span.rows == 1 else 1

    found: list[list[SpanView]] = []
    for span in sorted(spans, key=lambda s: (kind(s), reach(s, window))):
        joined = [*found[-1], span] if found and kind(found[-1][0]) == kind(span) < 2 else []
        key_bytes, copy = (token_bytes, COPY) if kind(span) else (entry, 0.0)
        price = partial(cost, window=window, token_bytes=token_bytes, device=device, copy=copy)
        if (
            joined
            and fits(joined, window, key_bytes, device)
            and price(joined) <= price(found[-1]) + price([span])
        ):
            found[-1] = joined
        else:
            found.append([span])
    return [sorted(bucket, key=lambda s: s.first) for bucket in found]


def fits(spans: list[SpanView], window: int | None, key_bytes: int, device: torch.device) -> bool:
    """Whether what one call for all of them copies, so many bytes for a key, stays in cache."""
    return len(spans) * max(reach(s, window) for s in spans) * key_bytes <= gather_bytes(device)


def cost(
    spans: list[SpanView], window: int | None, token_bytes: int, device: torch.device, copy: float
) -> float:
    """What one call for all of them costs, in bytes read; `copy` for each byte that several spans must copy
    together.
    """
    rows, keys = max(s.rows for s in spans), max(reach(s, window) for s in spans)
    read = len(spans) * keys * token_bytes * (1 + ROW * (rows - 1) + copy * (len(spans) > 1))
    return CALL.get(device.type, CALL_ELSEWHERE) + read


def reach(span: SpanView, window: int | None) -> int:
    """Keys that any of the span's rows may see."""
    return span.context if window is None else min(span.context, window + span.rows - 1)


def span_call(
    span: SpanView, window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Call:
    n, length = span.rows, reach(span, window)
    where = span.where if length == span.context else span.tail(length)
    mask = None if n == 1 else MASKS.slice(n, length, window, group if n <= FOLD_ROWS else 1, dtype, device)
    return Call(slice(span.first, span.last), 1, n, where, mask)


def joint_call(
    spans: list[SpanView], window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Call:
    """One call for many spans, rows and keys padded at the end.

    A padding row sees the first key: it stays finite.
    """
    n, length = max(s.rows for s in spans), max(reach(s, window) for s in spans)
    where = padded([s.tail(reach(s, window)) for s in spans], length, device)
    even = all(s.rows == n and s.first == spans[0].first + i * n for i, s in enumerate(spans))
    rows: slice | Tensor = slice(spans[0].first, spans[-1].last)
    if not even:
        rows = torch.tensor([min(s.first + i, s.last - 1) for s in spans for i in range(n)], device=device)
    if n == 1 and all(reach(s, window) == length for s in spans):
        return Call(rows, len(spans), n, where, None)
    ends = [
        reach(s, window) - s.rows + i + 1 if i < s.rows else 1
        for s in spans
        for i in range(n)
        for _ in range(group)
    ]
    end = torch.tensor(ends, device=device).view(len(spans), 1, n * group, 1)
    column = torch.arange(length, device=device)
    hidden = column >= end
    if window is not None:
        hidden |= column < end - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    return Call(rows, len(spans), n, where, mask)


def padded(wheres: list[Where], to: int, device: torch.device) -> Tensor:  # [B * to]
    """The slots of each, then its last one again: that is written, while an unused slot may hold a NaN."""
    column = torch.arange(to, device=device)
    slices = [where for where in wheres if isinstance(where, slice)]
    if len(slices) == len(wheres):
        first, last = torch.tensor([[w.start for w in slices], [w.stop - 1 for w in slices]], device=device)[
            ..., None
        ]
        return torch.minimum(first + column, last).flatten()
    slots = [as_index(where, device) for where in wheres]
    return torch.cat([x[column.clamp(max=len(x) - 1)] for x in slots])


class MaskCache:
    """Banded base masks, grown by doubling: a single span's mask is a slice of one of them."""

    def __init__(self) -> None:
        self.bases: dict[tuple[int | None, int, torch.dtype, torch.device], tuple[Tensor, int, int]] = {}

    def slice(
        self, n: int, length: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:  # [n * g, length]
        """Additive mask of the last n positions: row i * g + j sees keys in (length - n + i - window, length
        - n + i].
        """
        key = (window, group, dtype, device)
        base, rows, before = self.bases.get(key, (None, 0, 0))
        if base is None or n > rows or length - n > before:
            rows = max(rows, power_of_two(n))
            before = max(before, power_of_two(length - n)) if window is None else window - 1
            base = banded(rows, before, window, group, dtype, device)
            self.bases[key] = base, rows, before
        return base[: n * group, before - (length - n) : before + n]


def banded(
    rows: int, before: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 where row i sees column c (before + i - window < c <= before + i), minus infinity elsewhere."""
    last = (before + torch.arange(rows, device=device)).repeat_interleave(group)[:, None]  # [rows * g, 1]
    column = torch.arange(before + rows, device=device)[None]
    hidden = column > last
    if window is not None:
        hidden |= column <= last - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


MASKS = MaskCache()
