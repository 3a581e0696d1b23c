"""A small batch on which replacements are compared with what they replace, and when both count as equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from speculon.core.types import LayerSpec
from speculon.decoding.batch import Batch
from speculon.decoding.kv.store import PageStore, SpanView, View, as_index
from speculon.target.attention import running
from speculon.target.taps import EMBEDDINGS, Taps

if TYPE_CHECKING:
    from speculon.target.target import Run, Target

Forward = Callable[..., Any]  # inputs and a view -> a tensor, or several
Step = tuple[tuple[Any, ...], View]  # the arguments of one
Same = Callable[[Tensor, Tensor], bool]

LENGTHS, PAGE = (5, 3), 8  # two sequences, a page each: one at the beginning, one at the end of the context

EXACT = 1e-5  # of the largest value of a row, or of a column: rounding in fp32
# The error of a fused layer over that of the stock one, both against a finer dtype. Medians, since few large
# activations decide a norm: in bf16 1.03 was seen (Gemma 3, SmolLM2), 1.27 with bf16 norms.
NEAR, SAMPLING = 1.05, 5.0  # and for the noise of a median of n errors, SAMPLING / sqrt(n) more
HEAD = 64  # columns that are also compared by themselves, so that one wrong head is seen
# of a row's norm, below fp32: other numbers of rows take other kernels; an unrelated row differs by 1.4
UNRELATED = 0.3
WORST = 4.0  # times the stock layer's largest error, each relative to its column; 1.4 was seen


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


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether rows agree up to fp32 rounding."""
    limit = EXACT * expected.abs().amax(-1, keepdim=True)
    return found.shape == expected.shape and bool(((found - expected).abs() <= limit).all())


def nearly(found: Tensor, expected: Tensor, truth: Tensor) -> bool:
    """Whether `found` [T, D] is about as near to the truth as `expected` is.

    In all, in each run of HEAD columns, and where it is worst.
    """
    if found.shape != expected.shape:
        return False
    errors, stock, sizes = (found - truth).abs(), (expected - truth).abs(), truth.abs()
    column = sizes.amax(0).clamp(min=EXACT * sizes.max())
    worst = bool((errors / column).max() <= WORST * (stock / column).max() + EXACT)
    return worst and all(map(near_medians, *(with_parts(x) for x in (errors, stock, sizes))))


def with_parts(x: Tensor) -> list[Tensor]:
    """All of it, and its runs of HEAD columns."""
    return [x, *x.split(HEAD, -1)]


def near_medians(errors: Tensor, stock: Tensor, sizes: Tensor) -> bool:
    limit = NEAR + SAMPLING / errors.numel() ** 0.5
    return bool(errors.median() <= limit * stock.median() + EXACT * sizes.median())


def alike(found: Tensor, expected: Tensor) -> bool:  # [R, any] each
    """Whether two computations of the same rows agree, within what other kernels change."""
    if expected.dtype is torch.float32:
        return close(found, expected)
    found, expected = found.float(), expected.float()
    return bool(((found - expected).norm(dim=-1) <= UNRELATED * expected.norm(dim=-1)).all())


def states_of(run: Run, layers: int, batch: Batch, view: View) -> list[Tensor]:
    """Logits of a step of a target, and the states of all rows after each of its layers."""
    taps = Taps((EMBEDDINGS, *range(layers)))
    logits = run(batch, view, taps)
    assert logits is not None  # every step that is tried scores rows
    return [logits, *(states for _, states in sorted(taps.take().items()))]


def steps_agree(made: Forward, network: Forward, step: Step, pages: int = 0, same: Same = close) -> bool:
    """Whether two forwards agree on a step, and in the keys and values that they write in so many layers."""
    inputs, view = step
    expected = [*as_list(network(*inputs, view)), *written(view, pages)]
    for layer in range(pages):  # rows that are not written stay NaN
        view.write(layer, *(torch.full_like(x, torch.nan) for x in view.slots_of(layer, view.slots)))
    found = [*as_list(made(*inputs, view)), *written(view, pages)]
    return len(found) == len(expected) and all(map(same, found, expected))


def as_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else results


def written(view: View, layers: int) -> list[Tensor]:
    return [rows.clone() for layer in range(layers) for rows in view.slots_of(layer, view.slots)]
