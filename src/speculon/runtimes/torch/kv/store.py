"""The bytes of the page pool: where each row's keys and values go, and where a span finds those of its
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculon.core.tree import branches
from speculon.core.types import ceil_div
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.batch import PlacedSpan, as_tensor
from speculon.runtimes.torch.kv.pages import Pages
from speculon.runtimes.torch.kv.states import StateStep
from speculon.runtimes.torch.needs import LayerSpec

GATHER_BYTES = {"cpu": 4 << 20}  # a buffer that is still in cache when it is read
GATHER_BYTES_ELSEWHERE = 64 << 20
ALIGNMENT = 64  # bytes, as torch aligns its own

Where = slice | Tensor  # consecutive slots, or a LongTensor of them


class PageStore:
    """One K and one V tensor per layer, addressed by slot = page * block_size + offset."""

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
    ):
        self.layers, self.num_blocks, self.block_size = layers, num_blocks, block_size
        self.device = torch.device(device)
        self.slots = slots = num_blocks * block_size
        self.k = [zeros(slots, x.heads, x.k_dim, x.dtype, self.device) for x in layers]
        self.v = [zeros(slots, x.heads, x.v_dim, x.dtype, self.device) for x in layers]
        self.by_head = [(by_span(k, 1), by_span(v, 1)) for k, v in zip(self.k, self.v, strict=True)]
        self._offsets = torch.arange(block_size, device=device)
        self._rooms: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        shapes = [(x.window, x.chunk, x.bytes_per_token, x.padding) for x in layers]
        self.layer_kinds = [shapes.index(shape) for shape in shapes]  # layers of one number share a view

    @property
    def readable(self) -> int:
        """Slots that hidden keys may be read from, though another sequence wrote them or none did.

        A hidden key must be finite. In fp16 it may overflow; in other dtypes only a faulty model writes NaN,
        which then reaches the sequences whose pages lie before it.
        """
        return 0 if any(spec.dtype is torch.float16 for spec in self.layers) else self.slots

    @property
    def num_bytes(self) -> int:
        return sum(spec.bytes_per_token for spec in self.layers) * self.num_blocks * self.block_size

    def view(self, placed: list[PlacedSpan], of: Callable[[Sequence], Pages]) -> View:
        """What one forward over spans and their drafts writes and reads, in the pages `of` their sequences.
        Does not modify the store.
        """
        return self.view_of([part for one in placed for part in self._branches(one, of(one.drafted.seq))])

    def _branches(self, placed: PlacedSpan, pages: Pages) -> list[SpanView]:
        """Each branch of a tree as a span of its own behind its ancestors, so that its rows see what those of
        a chain would, in the same order; a chain is one branch.
        """
        drafted, row = placed
        span, parents = drafted.span, drafted.draft.parents
        if any(block.stop > span.start for block in span.seq.request.images.blocks):
            return [*self._blocks(placed, pages)]
        if parents is None:
            return [SpanView(row, row + drafted.rows, self.where_of(pages, drafted.end), drafted.end)]
        first_draft, views = row + span.length, list[SpanView]()
        for ancestors, begin, end in branches(parents):
            first = first_draft + begin if begin else row
            where = self.path_of(pages, span.end, [*ancestors, *range(begin, end)])
            views.append(SpanView(first, first_draft + end, where, span.end + len(ancestors) + end - begin))
        return views

    def _blocks(self, placed: PlacedSpan, pages: Pages) -> Iterator[SpanView]:
        """Rows of images that see each other in both directions, and those between them, as spans."""
        drafted, row = placed
        start = drafted.span.start
        for begin, stop, seen in drafted.seq.request.images.runs(start, drafted.end):
            end = seen or stop
            where = self.where_of(pages, end)
            yield SpanView(row + begin - start, row + stop - start, where, end, both=bool(seen))

    def view_of(self, spans: list[SpanView], first_layer: int = 0) -> View:
        """The same for a model whose layers begin at `first_layer` of the store."""
        return View(self, self._writes(spans), spans, first_layer)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:  # k [S, Hkv, Dk], v [S, Hkv, Dv]
        """Copies of K and V at some slots, valid until the next call: fresh memory for each layer would cost
        more.
        """
        spec, pools = self.layers[layer], {"k": self.k[layer], "v": self.v[layer]}
        if len(slots) * spec.bytes_per_token > gather_bytes(self.device):
            k, v = (pool.index_select(0, slots) for pool in pools.values())
            return k, v
        for name, pool in pools.items():
            key = (name, pool.shape[1:], pool.dtype)
            room = self._rooms.get(key)
            if room is None or len(room) < len(slots):
                room = self._rooms[key] = pool.new_empty(power_of_two(len(slots)), *pool.shape[1:])
            pools[name] = torch.index_select(pool, 0, slots, out=room[: len(slots)])
        return pools["k"], pools["v"]

    def where_of(self, pages: Pages, end: int) -> Where:
        """The slots of a sequence's positions up to `end`, from the first whose page it has."""
        return self.where(pages.table[pages.released // self.block_size :], end - pages.released)

    def path_of(self, pages: Pages, length: int, nodes: list[int]) -> Where:
        """The slots of its positions up to `length`, then those of some nodes of a tree, which lie behind."""
        if nodes == list(range(len(nodes))):
            return self.where_of(pages, length + len(nodes))
        slots = as_index(self.where_of(pages, length + max(nodes) + 1), self.device)
        first = length - pages.released
        return torch.cat([slots[:first], slots[first:][nodes]])

    def move(self, slots: list[int], to: list[int]) -> None:
        """Copies what is at some slots of all layers to others."""
        source, target = as_tensor(slots, self.device), as_tensor(to, self.device)
        for pool in (*self.k, *self.v):
            pool[target] = pool[source]

    def slot_of(self, pages: Pages, position: int) -> int:
        return pages.table[position // self.block_size] * self.block_size + position % self.block_size

    def where(self, table: list[int], length: int) -> Where:
        """The slots of the first `length` positions in these pages."""
        size, pages = self.block_size, table[: ceil_div(length, self.block_size)]
        assert len(pages) * size >= length, f"{length} positions in {len(pages)} pages of {size}"
        first = pages[0]
        if pages == list(range(first, first + len(pages))):
            return slice(first * size, first * size + length)
        starts = as_tensor(pages, self.device)[:, None]
        return torch.add(self._offsets, starts, alpha=size).flatten()[:length]  # [S]

    def _writes(self, spans: list[SpanView]) -> Where:
        tails = [span.tail(span.rows) for span in spans]
        slices = [tail for tail in tails if isinstance(tail, slice)]
        if len(slices) == len(tails):
            if all(a.stop == b.start for a, b in pairwise(slices)):
                return slice(slices[0].start, slices[-1].stop)
            # [T]
            return as_tensor([slot for tail in slices for slot in range(tail.start, tail.stop)], self.device)
        indices = [as_index(tail, self.device) for tail in tails]
        return indices[0] if len(indices) == 1 else torch.cat(indices)  # [T]


@dataclass(slots=True)
class SpanView:
    """One span's rows in the flat batch, and the slots of every position its last row may see.

    These are the last positions of its context: where all layers have windows, earlier ones are released.
    """

    first: int
    last: int
    where: Where
    context: int  # S = start + rows
    hidden: int = 0  # positions before the context, which no row sees
    both: bool = False  # whether each row sees the whole context, also behind it
    after: int = 0  # positions of the context behind its last row; 0 but in a part of such a span

    @property
    def rows(self) -> int:
        return self.last - self.first

    def part(self, begin: int, end: int) -> SpanView:
        """Its rows from `begin` to `end` as a span of their own."""
        left, where = self.rows - end, self.where
        if self.both:
            return replace(self, first=self.first + begin, last=self.first + end, after=self.after + left)
        seen = (
            slice(where.start, where.stop - left) if isinstance(where, slice) else where[: len(where) - left]
        )
        return SpanView(self.first + begin, self.first + end, seen, self.context - left, self.hidden)

    def in_chunks(self, chunk: int | None) -> list[SpanView]:
        """Its rows in each chunk of `chunk` positions, which see the slots of that chunk alone."""
        if chunk is None:
            return [self]
        end = self.hidden + self.context
        start = end - self.rows
        ends = [start, *range((start // chunk + 1) * chunk, end, chunk), end]
        firsts = [max(begin // chunk * chunk, self.hidden) for begin in ends]
        parts = [
            (self.part(a - start, b - start), b - first)
            for (a, b), first in zip(pairwise(ends), firsts, strict=False)
        ]
        return [SpanView(part.first, part.last, part.tail(seen), seen) for part, seen in parts]

    def tail(self, length: int) -> Where:
        """The slots of the last `length` positions."""
        return tail_of(self.where, length)


def end_to_end(parts: Iterable[tuple[int, Where, int, int]]) -> list[SpanView]:
    """Spans of (rows, where, context, hidden), one after the other in the flat batch."""
    spans, row = [], 0
    for rows, where, context, hidden in parts:
        spans.append(SpanView(row, row + rows, where, context, hidden))
        row += rows
    return spans


@dataclass(slots=True)
class View:
    """The store as one forward of one model sees it. `memo` keeps what all layers of this forward share."""

    store: PageStore
    slots: Where
    spans: list[SpanView]
    first_layer: int = 0  # where the model's own layer 0 lies in the store
    memo: dict[Any, Any] = field(default_factory=dict)
    states: StateStep | None = None  # of a model with recurrent mixers

    def spec(self, layer: int) -> LayerSpec:
        return self.store.layers[self.first_layer + layer]

    def kind(self, layer: int) -> int:
        """A number that layers of the same window and size have in common."""
        return self.store.layer_kinds[self.first_layer + layer]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:  # k [T, Hkv, Dk], v [T, Hkv, Dv]
        """Puts the keys and values of all T rows into their slots."""
        layer, slots = self.first_layer + layer, self.slots
        if isinstance(slots, slice):
            self.store.k[layer][slots].copy_(k)
            self.store.v[layer][slots].copy_(v)
        else:
            self.store.k[layer].index_copy_(0, slots, k)
            self.store.v[layer].index_copy_(0, slots, v)

    def keep(self, layer: int, states: list[Tensor]) -> None:  # [T, D] each
        """Puts the states of all T rows into their slots, side by side, in a layer of kind `taps`."""
        pool, at = self.store.k[self.first_layer + layer], 0
        for part in states:
            pool[self.slots, 0, at : at + part.shape[1]] = part
            at += part.shape[1]

    # k [B, Hkv, S, Dk], v [B, Hkv, S, Dv]
    def take(self, layer: int, where: Where, spans: int) -> tuple[Tensor, Tensor]:
        """Keys and values at the slots of B spans [B * S]; views where they are consecutive."""
        layer = self.first_layer + layer
        if isinstance(where, slice):
            k, v = self.store.by_head[layer]
            return k[:, :, where], v[:, :, where]
        k, v = self.store.gather(layer, where)
        return by_span(k, spans), by_span(v, spans)


def zeros(slots: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [slots, heads, width], in memory that is touched on first use: a large pool takes seconds."""
    if device.type != "cpu":
        return torch.zeros(slots, heads, width, dtype=dtype, device=device)
    size = slots * heads * width * dtype.itemsize
    lazy = torch.from_numpy(np.zeros(size + ALIGNMENT, dtype=np.uint8))
    start = -lazy.data_ptr() % ALIGNMENT
    return lazy[start : start + size].view(dtype).view(slots, heads, width)


def tail_of(where: Where, length: int) -> Where:
    """The last `length` of these slots."""
    if isinstance(where, slice):
        assert length <= where.stop - where.start, f"{length} positions of {where}"
        return slice(where.stop - length, where.stop)
    assert length <= len(where), f"{length} positions of {len(where)}"
    return where[len(where) - length :]


def by_span(slots: Tensor, spans: int) -> Tensor:
    """[B * S, Hkv, D] -> [B, Hkv, S, D]."""
    return slots.view(spans, len(slots) // spans, *slots.shape[1:]).transpose(1, 2)


def gather_bytes(device: torch.device) -> int:
    """K and V that may be copied together into a buffer that stays."""
    return GATHER_BYTES.get(device.type, GATHER_BYTES_ELSEWHERE)


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def as_index(where: Where, device: torch.device) -> Tensor:
    """The slots as a LongTensor."""
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
