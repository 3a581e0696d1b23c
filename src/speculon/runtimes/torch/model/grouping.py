"""Groups spans into calls of the attention kernel, so that few calls waste little padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from speculon.core.types import ceil_div
from speculon.runtimes.torch.kv.store import SpanView, View, Where, as_index, gather_bytes, power_of_two
from speculon.runtimes.torch.needs import NO_PADDING, LayerSpec, Padding

# guess: up to here the head group is folded into the query rows, beyond it SDPA repeats K and V itself
FOLD_ROWS = 32
# rows of a call: the keys of a piece end with its last row; 48 and 128 were slower
PIECE = {"cpu": 64}
# In bytes of K and V read, measured out of cache on 2 cores: the fixed cost of a call, the cost of a further
# query row per key, and the cost of copying the keys of several spans for a joint call.
CALL = {"cpu": 200 << 10}
CALL_ELSEWHERE = 32 << 20  # guess, for devices with far more bandwidth
ROW, COPY = 0.08, 0.1

# SDPA takes larger blocks of query rows from 192 on, so a padded call has fewer.
MOST_FOLDED = 191
# query rows of a smaller block; the rows of its last block have an order of addition of their own if few
QUERY_BLOCK = 32
KEY_BLOCK = 512  # keys that the kernel takes at once


@dataclass(slots=True)
class KernelCall:
    """One call of the kernel: B spans of up to n rows each."""

    rows: slice | Tensor  # of the flat batch; [B * n] when padded
    spans: int  # B
    n: int
    where: Where  # slots of the keys, [B * S]
    mask: Tensor | None  # additive; [n * g, S] for one span, [B, 1, n * g, S] for many
    folded: bool = True  # whether the rows of a head group are rows of one head: else K and V are repeated
    copies: int = 1  # times that the folded rows are repeated: for few of them the kernel is another one


@dataclass(slots=True)
class CallPlan:
    """The calls of all layers of one window in one forward."""

    calls: list[KernelCall]
    order: Tensor | None = None  # [T] index of each row of the flat batch in the calls' rows; None: in order


@dataclass(frozen=True, slots=True)
class Kernel:
    """What all calls of a plan have in common."""

    spec: LayerSpec
    group: int  # queries for each key
    plain: bool  # neither soft cap nor sinks
    dtype: torch.dtype
    device: torch.device
    readable: int = 0  # slots up to this may be read in place

    @property
    def mask_rows(self) -> int:
        """Rows of a mask for each row of queries."""
        return self.group if self.plain else 1


class PlanKey(NamedTuple):
    """What layers of one plan have in common."""

    kind: int  # of `PageStore.layer_kinds`
    group: int  # queries for each key
    plain: bool  # neither soft cap nor sinks


def shared_plan(view: View, layer: int, group: int, plain: bool, query: Tensor) -> CallPlan:
    """The plan for layers like this one; made once per forward and shared by them."""
    key = PlanKey(view.kind(layer), group, plain)
    plan: CallPlan | None = view.memo.get(key)
    if plan is None:
        plan = view.memo[key] = make_plan(view, layer, group, plain, query)
    return plan


def make_plan(view: View, layer: int, group: int, plain: bool, query: Tensor) -> CallPlan:
    spec, device = view.spec(layer), query.device
    kernel = Kernel(spec, group, plain, query.dtype, device, view.store.readable)
    spans = [part for span in view.spans for part in span.in_chunks(spec.chunk)]
    few = FOLD_ROWS
    if spec.padding == NO_PADDING:
        spans = [piece for span in spans for piece in pieces(span, PIECE.get(device.type, span.rows))]
    else:
        few = few_rows(group)
        max_rows = spec.padding.piece if plain and spec.padding.piece > FOLD_ROWS else few
        parts = [part for span in spans for part in exact_parts(span, spec.window, spec.padding)]
        spans = [piece for part in parts for piece in pieces(part, max_rows)]
    calls, placed, at = [], [], 0
    for bucket in buckets(spans, spec.window, spec.bytes_per_token, device, few, spec.padding):
        call = span_call(bucket[0], kernel) if len(bucket) == 1 else spans_call(bucket, kernel)
        calls.append(call)
        for i, span in enumerate(bucket):
            placed.append((span.first, range(at + i * call.n, at + i * call.n + span.rows)))
        at += len(bucket) * call.n
    order = [row for _, rows in sorted(placed, key=lambda x: x[0]) for row in rows]
    return CallPlan(calls, None if order == list(range(at)) else torch.tensor(order, device=device))


def few_rows(group: int) -> int:
    """Up to how many rows are folded where calls are padded."""
    return max(1, min(FOLD_ROWS, MOST_FOLDED // group))


def pieces(span: SpanView, max_rows: int) -> list[SpanView]:
    """The span in parts of at most so many rows, as even as possible."""
    parts = ceil_div(span.rows, max_rows)
    ends = [span.rows * i // parts for i in range(parts + 1)]
    return [span] if parts == 1 else [span.part(begin, end) for begin, end in pairwise(ends)]


def buckets(
    spans: list[SpanView],
    window: int | None,
    token_bytes: int,
    device: torch.device,
    few: int = FOLD_ROWS,
    padding: Padding = NO_PADDING,
) -> list[list[SpanView]]:
    """Spans that share one padded call, joined while that costs less than calls of their own.

    A span of more than `few` rows has a call of its own, and so has one whose rows see each other in both
    directions. All spans of a call need the same exact number of keys, or none.
    """

    def alone(span: SpanView) -> bool:
        return span.rows > few or span.both

    def call_class(span: SpanView) -> tuple[bool, int]:
        return alone(span), exact_keys(span.context, window, padding)

    price = partial(cost, token_bytes=token_bytes, device=device)

    joint: list[list[SpanView]] = []
    size = CallSize(0, 0, 0)  # of the last call
    for span in sorted(spans, key=lambda s: (*call_class(s), visible_keys(s, window))):
        own = size_of([span], window)
        joined = size.with_all_of(own)
        alike = joint and not alone(span) and call_class(joint[-1][0]) == call_class(span)
        fits = alike and fits_in_cache(joined, token_bytes, device)
        if fits and price(joined) <= price(size) + price(own):
            joint[-1].append(span)
            size = joined
        else:
            joint.append([span])
            size = own
    return [sorted(bucket, key=lambda s: s.first) for bucket in joint]


class CallSize(NamedTuple):
    """What one call for several spans costs depends on: each is padded to the longest."""

    spans: int
    rows: int  # of the span with most
    keys: int  # that any of its rows sees, likewise

    def with_all_of(self, other: CallSize) -> CallSize:
        return CallSize(self.spans + other.spans, max(self.rows, other.rows), max(self.keys, other.keys))


def size_of(spans: list[SpanView], window: int | None) -> CallSize:
    rows, keys = max(s.rows for s in spans), max(visible_keys(s, window) for s in spans)
    return CallSize(len(spans), rows, keys)


def fits_in_cache(size: CallSize, key_bytes: int, device: torch.device) -> bool:
    """Whether the keys that the call copies, `key_bytes` each, stay in cache."""
    return size.spans * size.keys * key_bytes <= gather_bytes(device)


def cost(size: CallSize, token_bytes: int, device: torch.device) -> float:
    """Cost of the call, in bytes read."""
    read = size.spans * size.keys * token_bytes * (1 + ROW * (size.rows - 1) + COPY * (size.spans > 1))
    return CALL.get(device.type, CALL_ELSEWHERE) + read


def visible_keys(span: SpanView, window: int | None) -> int:
    """Number of keys that any of the span's rows sees."""
    return span.context if window is None else min(span.context, window + span.rows - 1 + span.after)


def spans_call(spans: list[SpanView], kernel: Kernel) -> KernelCall:
    """One padded call for several spans."""
    group, fewest = kernel.group, kernel.spec.padding.rows
    n = padded_rows(max(span.rows for span in spans), group, fewest)
    call = joint_call(spans, n, kernel)
    call.copies = ceil_div(fewest, n * group)
    if call.mask is not None and call.copies > 1 and n > 1:
        call.mask = call.mask.repeat(1, 1, call.copies, 1)
    return call


def span_call(span: SpanView, kernel: Kernel) -> KernelCall:
    spec, group, device = kernel.spec, kernel.group, kernel.device
    padding, length = spec.padding, aligned_keys(span, spec.window, spec.padding.alignment)
    total = padded_keys(length, spec.window, padding)
    where = span.tail(length)
    if total > length:
        where = padded_slots([where], total, device, kernel.readable)
    folded = not kernel.plain or span.rows <= (FOLD_ROWS if padding == NO_PADDING else few_rows(group))
    n = padded_rows(span.rows, group if folded else 1, padding.rows)
    rows: slice | Tensor = slice(span.first, span.last)
    if n > span.rows:
        rows = torch.arange(span.first, span.first + n, device=device).clamp_(max=span.last - 1)
    copies, mask = ceil_div(padding.rows, n * group), None
    if n > 1 or padding != NO_PADDING:  # with a mask the kernel is another one
        more, in_mask = n - span.rows, kernel.mask_rows if folded and n > 1 else 1
        after = total - length - more
        if span.both:
            mask = both_mask(span, n, length, total, in_mask, kernel)
        else:
            mask = MASKS.slice(n, length + more, spec.window, in_mask, kernel.dtype, device, padding=after)
        if copies > 1 and n > 1:
            mask = mask.repeat(copies, 1)
    return KernelCall(rows, 1, n, where, mask, folded, copies)


def both_mask(
    span: SpanView, n: int, length: int, total: int, group: int, kernel: Kernel
) -> Tensor:  # [n * g, total]
    """The mask of rows that see all of the last `length` positions, but for those before their window."""
    device, first = kernel.device, length - span.after - span.rows
    column = torch.arange(total, device=device)[None]
    hidden = (column >= length).repeat(n * group, 1)
    if (window := kernel.spec.window) is not None:
        row = first + torch.arange(n, device=device).clamp_(max=span.rows - 1)
        hidden |= column <= row.repeat_interleave(group)[:, None] - window
    return torch.zeros(hidden.shape, dtype=kernel.dtype, device=device).masked_fill_(hidden, -torch.inf)


def padded_keys(keys: int, window: int | None, padding: Padding) -> int:
    """The next number of keys that may be read for these."""
    total = padding.keys * ceil_div(keys, padding.keys)
    while total % KEY_BLOCK in padding.uneven and not exact_keys(keys, window, padding):
        total += padding.keys
    return total


def exact_keys(seen: int, window: int | None, padding: Padding) -> int:
    """With how many keys a row that sees so many is always computed; 0: with any number that is not uneven.

    Within a window, where a call begins depends on its other rows, so no row has a number of its own.
    """
    if window is not None or not padding.uneven:
        return 0
    total = padding.keys * ceil_div(seen, padding.keys)
    return total if total % KEY_BLOCK in padding.uneven else 0


def exact_parts(span: SpanView, window: int | None, padding: Padding) -> list[SpanView]:
    """The span, cut where its rows need another number of keys."""
    if span.both:  # all rows see the same number of keys
        return [span]
    start, step = span.context - span.rows, padding.keys
    ends = [
        at - start
        for at in range(step * (start // step + 1), span.context, step)
        if exact_keys(at, window, padding) != exact_keys(at + 1, window, padding)
    ]
    return [span.part(begin, end) for begin, end in pairwise([0, *ends, span.rows])] if ends else [span]


def padded_rows(n: int, group: int, fewest: int) -> int:
    """From `n` on, the first number of rows that leaves no block of fewer than so many behind full ones."""
    while n * group > QUERY_BLOCK and 0 < n * group % QUERY_BLOCK < fewest:
        n += 1
    return n


def joint_call(spans: list[SpanView], n: int, kernel: Kernel) -> KernelCall:
    """One call for spans, padded at the end to `n` rows."""
    window, padding, device = kernel.spec.window, kernel.spec.padding, kernel.device
    lengths = [aligned_keys(span, window, padding.alignment) for span in spans]
    length = padded_keys(max(lengths), window, padding)
    tails = [span.tail(keys) for span, keys in zip(spans, lengths, strict=True)]
    where = padded_slots(tails, length, device, kernel.readable)
    even = all(s.rows == n and s.first == spans[0].first + i * n for i, s in enumerate(spans))
    rows: slice | Tensor = slice(spans[0].first, spans[-1].last)
    if not even:
        rows = torch.tensor([min(s.first + i, s.last - 1) for s in spans for i in range(n)], device=device)
    # with a mask the kernel is another one
    if padding == NO_PADDING and n == 1 and all(x == length for x in lengths):
        return KernelCall(rows, len(spans), n, where, None)
    return KernelCall(rows, len(spans), n, where, joint_mask(spans, lengths, n, length, kernel))


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


def aligned_keys(span: SpanView, window: int | None, step: int) -> int:
    """Number of its keys from the last multiple of `step` at or before the first that is visible."""
    return span.context - (span.context - visible_keys(span, window)) // step * step


def joint_mask(
    spans: list[SpanView], lengths: list[int], n: int, length: int, kernel: Kernel
) -> Tensor:  # [B, 1, n * g, S], or [B, 1, 1, S] where n is 1
    """The mask of padded spans. A padding row sees the first key, so that it stays finite."""
    group, window, device = kernel.mask_rows if n > 1 else 1, kernel.spec.window, kernel.device
    ends = [
        keys - s.rows + i + 1 if i < s.rows else 1
        for s, keys in zip(spans, lengths, strict=True)
        for i in range(n)
        for _ in range(group)
    ]
    end = torch.tensor(ends, device=device).view(len(spans), 1, n * group, 1)
    column = torch.arange(length, device=device)
    hidden = column >= end
    if window is not None:
        hidden |= column < end - window
    return torch.zeros(hidden.shape, dtype=kernel.dtype, device=device).masked_fill_(hidden, -torch.inf)


def padded_slots(wheres: list[Where], to: int, device: torch.device, readable: int = 0) -> Where:  # [B * to]
    """The slots of each span, then its last one again: another may hold a NaN, unless it is `readable`."""
    only = wheres[0]
    if len(wheres) == 1 and isinstance(only, slice) and only.start + to <= readable:
        return slice(only.start, only.start + to)
    column = torch.arange(to, device=device)
    slices = [where for where in wheres if isinstance(where, slice)]
    if len(slices) == len(wheres):
        bounds = [[w.start for w in slices], [w.stop - 1 for w in slices]]
        first, last = torch.tensor(bounds, device=device)[..., None]
        return torch.minimum(first + column, last).flatten()
    slots = [as_index(where, device) for where in wheres]
    return torch.cat([x[column.clamp(max=len(x) - 1)] for x in slots])
