"""A small batch on which replacements are compared with what they replace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from speculon.batch import Batch
from speculon.core import LayerSpec
from speculon.kv.store import PageStore, SpanView, View, as_index
from speculon.models.attention import running
from speculon.models.target import Target

LENGTHS, PAGE = (5, 3), 8  # two sequences, a page each: one at the beginning, one at the end of the context


@dataclass(slots=True)
class Trial:
    """Sequences in pages, and the arguments that the stock model passed to each layer."""

    target: Target
    store: PageStore
    batch: Batch
    view: View
    arguments: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, lengths: tuple[int, ...] = LENGTHS) -> Trial:
        device, size = target.device, max(PAGE, *lengths)
        store = PageStore(target.layers, len(lengths), size, device)
        spans, row = [], 0
        for page, length in enumerate(lengths):
            spans.append(SpanView(row, row + length, slice(page * size, page * size + length), length))
            row += length
        ids = torch.arange(row, device=device)[None] % target.vocab_size
        # the second sequence is at the end of the context, where a layer may compute something else
        starts = (0, max(0, target.max_context - lengths[-1]))
        ranges = [torch.arange(n, device=device) + at for n, at in zip(lengths, starts, strict=False)]
        batch = Batch([], ids, torch.cat(ranges)[None], torch.arange(row, device=device))
        return cls(target, store, batch, store.view_of(spans))

    def last(self, *rows: int, scattered: bool = False) -> tuple[Batch, View]:
        """The last `rows[i]` rows of sequence i; `scattered`: as if its slots were not consecutive."""
        spans: list[SpanView] = []
        taken: list[int] = []
        for span, count in zip(self.view.spans, rows, strict=False):
            where = as_index(span.where, self.store.device) if scattered else span.where
            spans.append(SpanView(len(taken), len(taken) + count, where, span.context))
            taken += range(span.last - count, span.last)
        ids, positions = (t[:, taken] for t in (self.batch.input_ids, self.batch.position_ids))
        return Batch([], ids, positions, self.batch.score_rows[: len(taken)]), self.store.view_of(spans)

    def run_layer(self, layer: nn.Module, number: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """States, keys and values [T, ...] of a layer on random rows, run in `dtype` if given."""
        arguments, store, view = self.arguments[number], self.store, self.view
        width = self.target.model.get_input_embeddings().weight.shape[1]
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(self.batch.input_ids.shape[1], width, generator=generator)
        x = rows.to(self.target.device, self.target.dtype)[None]
        if dtype is not None:
            store, x = store_in(store, dtype), x.to(dtype)
            view = View(store, self.view.slots, self.view.spans)
            arguments = cast(arguments, dtype)
        pages = [pool[number] for pool in (store.k, store.v)]
        for pool in pages:
            pool.fill_(torch.nan)  # rows that the layer does not write stay NaN
        with running(view):
            out = layer(x, **arguments)
        states = (out[0] if isinstance(out, tuple) else out)[0]
        found = (states, *(pool[self.view.slots].flatten(1) for pool in pages))
        return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in found]


def store_in(store: PageStore, dtype: torch.dtype) -> PageStore:
    """An empty store of the same shape in another dtype."""
    layers: tuple[LayerSpec, ...] = tuple(replace(spec, dtype=dtype) for spec in store.layers)
    return PageStore(layers, store.num_blocks, PAGE, store.device)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same arguments with every floating tensor in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    return {key: cast(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value
