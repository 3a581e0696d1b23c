"""The networks of drafters as they run: captured as CUDA graphs or compiled where `compile` asks for it.

Only the forwards that draft: what reads committed states, and what makes logits of states, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from speculon.core import LayerSpec
from speculon.kv.store import PageStore, SpanView, View, as_index
from speculon.models.attention import fold, running, unfold
from speculon.models.block import Block, CannotReplace, Tables, rotate, tables_of
from speculon.models.captured import (
    RECORDERS,
    CapturedDraft,
    Lengths,
    Recorder,
    captured_draft,
    of_buckets,
)
from speculon.models.compiled import (
    Arguments,
    Attend,
    CompilePlan,
    DenseNorm,
    Exported,
    Layer,
    PagedPrograms,
    Programs,
    attention_of,
    compared,
    kinds_of,
    linear_of,
    plan_for,
    reported,
)
from speculon.models.dflash import BlockLayer, DFlashModel
from speculon.models.dflash_attention import Sight, visible
from speculon.models.eagle import EagleHead, FirstLayer
from speculon.models.footprint import BUCKETS, CaptureSizes, program_bytes
from speculon.models.grouping import FOLD_ROWS
from speculon.models.target import Runner, Target
from speculon.models.trial import Forward, Step

# rows of the sequences in the trial; the first of each program has no size of 1 but that of one row
OF_HEADS = ((1,), (5,), (3, 2), (12,), (1, 1), (4, 1, 2), (2,), (FOLD_ROWS + 1,))
OF_BLOCKS = ((4,), (2,), (FOLD_ROWS,), (1,), (3, 2), (FOLD_ROWS + 1,))
SEEN = 5  # positions of a trial's sequence before its rows


def run_of_head(head: EagleHead, layers: tuple[LayerSpec, ...], target: Target, compile: bool) -> Runner:
    """The head as it runs; `layers` are those of its attention in the pages."""
    captured, compiled = (partial(make, head, layers, target) for make in (captured_head, compiled_head))
    return chosen(head, len(head.blocks), target, compile, captured, compiled)


def run_of_blocks(model: DFlashModel, layers: tuple[LayerSpec, ...], target: Target, compile: bool) -> Runner:
    """The same for a block drafter."""
    captured, compiled = (partial(make, model, layers, target) for make in (captured_blocks, compiled_blocks))
    return chosen(model, len(model.layers), target, compile, captured, compiled)


def chosen(
    network: Forward,
    layers: int,
    target: Target,
    compile: bool,
    captured: Callable[[], Forward],
    compiled: Callable[[], Forward],
) -> Runner:
    """The faster form where that is asked for, possible and equal on every step; else the network."""
    runner = Runner(network, layers, layers, "loop")
    if compile:
        graphs = target.device.type in RECORDERS
        try:
            with torch.inference_mode():
                runner.run = captured() if graphs else compiled()
            runner.form = "captured" if graphs else "compiled"
        except CannotReplace as reason:
            runner.refused[str(reason)] += 1
    return runner


def run_bytes(
    sizes: LlamaConfig, layers: int, weights: int, dtype: torch.dtype, device: torch.device, more: int = 0
) -> int:
    """Memory that `compile` takes in addition to so many bytes of weights; see `CaptureSizes.of_drafter`."""
    if device.type in RECORDERS:
        return CaptureSizes.of_drafter(sizes, layers, more).num_bytes(dtype)
    return program_bytes(weights, dtype, device, drafter=True)


# CUDA graphs


def captured_head(head: EagleHead, layers: tuple[LayerSpec, ...], target: Target) -> Forward:
    """Raises `CannotReplace`."""

    def made(record: Recorder) -> CapturedDraft:
        ids, positions = buffers(target.device)
        states = head.norm.weight.new_zeros(BUCKETS[-1], len(head.norm.weight))
        heads, inputs = head.first.attention.heads, (ids, states, positions)
        return CapturedDraft(head, head.begin, head.end, head.blocks, heads, inputs, record)

    return captured_draft(made, head, head_steps(head, layers, target, of_buckets()), target.device)


def captured_blocks(model: DFlashModel, layers: tuple[LayerSpec, ...], target: Target) -> Forward:
    def made(record: Recorder) -> CapturedDraft:
        inputs = buffers(target.device)
        query, *_ = model.layers[0].begin(*model.begin(*inputs))
        return CapturedDraft(model, model.begin, model.norm, model.layers, query.shape[1], inputs, record)

    return captured_draft(made, model, block_steps(layers, target, of_buckets()), target.device)


def buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    """For token ids and positions."""
    ids, positions = torch.zeros(2, BUCKETS[-1], dtype=torch.long, device=device)
    return ids, positions


# compiled programs


def compiled_head(head: EagleHead, layers: tuple[LayerSpec, ...], target: Target) -> Forward:
    """Raises `CannotReplace`."""
    with reported(target):
        steps, of = list(head_steps(head, layers, target, OF_HEADS)), plan_for(target.dtype, target.device)
        # several sequences share a call in any layout: that was measured in blocks, too
        settings = {name: of.settings[name] for name in ("one", "few", "many")}
        plan = CompilePlan({**settings, "joint": settings["many"]}, of.few)
        steps += [apart(step) for step in steps[:2]]
        layer_kinds = kinds_of(steps[0][1], len(head.blocks))
        made = CompiledHead(head, plan, layer_kinds)
        return with_programs(made, head, HeadLayers(head, layer_kinds), steps, len(head.blocks))


def compiled_blocks(model: DFlashModel, layers: tuple[LayerSpec, ...], target: Target) -> Forward:
    with reported(target):
        steps, of = list(block_steps(layers, target, OF_BLOCKS)), plan_for(target.dtype, target.device)
        made = CompiledBlocks(model, CompilePlan({"few": of.settings["few"]}, FOLD_ROWS))
        return with_programs(made, model, RowsLayers(model), steps, 0)


def with_programs(
    made: CompiledHead | CompiledBlocks, network: Forward, layers: Exported, steps: list[Step], pages: int
) -> Forward:
    """`made`, with its programs; what it writes to so many layers of pages is compared, too."""
    arguments: Callable[..., tuple[str, Arguments]] = made.arguments
    made.compile(layers, [arguments(*inputs, view) for inputs, view in steps])
    compared(made, network, steps, pages)
    return made


class CompiledHead(PagedPrograms):
    """A head and its programs."""

    def __init__(self, head: EagleHead, plan: CompilePlan, layer_kinds: list[int]):
        of = head.first.attention
        super().__init__(plan, layer_kinds, of.heads // of.kv_heads)
        self.head = head

    def __call__(self, ids: Tensor, states: Tensor, positions: Tensor, view: View) -> Tensor:  # [T, H]
        if torch.get_num_threads() != self.threads:
            return self.head(ids, states, positions, view)
        variant, arguments = self.arguments(ids, states, positions, view)
        with running(view):
            (after,) = self.programs[variant](*arguments)
        return after

    def arguments(self, ids: Tensor, states: Tensor, positions: Tensor, view: View) -> tuple[str, Arguments]:
        """The program for a step, and its arguments."""
        return self.for_step([F.embedding(ids, self.head.embed), states, positions], view)


class CompiledBlocks(Programs):
    """A block drafter and its program for one sequence. Other steps run the drafter."""

    def __init__(self, model: DFlashModel, plan: CompilePlan):
        super().__init__(plan)
        self.model = model

    def __call__(self, ids: Tensor, positions: Tensor, view: View) -> Tensor:  # [T, H]
        variant, arguments = self.arguments(ids, positions, view)
        if variant not in self.programs or torch.get_num_threads() != self.threads:
            return self.model(ids, positions, view)
        (states,) = self.programs[variant](*arguments)
        return states

    def arguments(self, ids: Tensor, positions: Tensor, view: View) -> tuple[str, Arguments]:
        """The program for a step, and its arguments."""
        span, rows = view.spans[0], len(ids)
        if len(view.spans) > 1 or not 1 < rows <= self.plan.few:
            return "many", []
        seen = [view.slots_of(x.layer, visible(span, x.sight).where) for x in self.model.layers]
        keys, values = zip(*seen, strict=True)
        return "few", [F.embedding(ids, self.model.embed), positions, None, *keys, *values]


class PairsLayer(Layer):
    """`FirstLayer` as a module that can be exported and compiled."""

    def __init__(self, first: FirstLayer):
        super().__init__(Block(first.attention, first.mlp, (first.embed_norm, None, first.mlp_norm, None)))
        self.state_norm, self.norm_before_residual = DenseNorm(first.state_norm), first.norm_before_residual

    def forward(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:  # [T, 2 H] -> [T, H]
        embedded, state = x.chunk(2, -1)
        normed = self.state_norm(state)
        pairs = torch.cat([self.before(embedded), normed], -1)
        x = (normed if self.norm_before_residual else state) + self.attended(pairs, tables, attend)
        return x + self.mlp(self.before_mlp(x))


class HeadLayers(Exported):
    """`EagleHead` without its embedding, which may be the target's."""

    sizes = ("rows", "rows", "rows")

    def __init__(self, head: EagleHead, layer_kinds: list[int]):
        super().__init__()
        self.layers = nn.ModuleList([PairsLayer(head.first), *map(Layer, head.more)])
        self.rotary, self.head_dim, self.layer_kinds = head.rotary, head.first.attention.head_dim, layer_kinds
        self.norm = DenseNorm(head.norm) if head.norm_output else nn.Identity()

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, slots: Tensor | None, *pages: Tensor
    ) -> list[Tensor]:
        """The states [T, H] after each row; the rest as in `Layers`."""
        cos, sin = self.rotary(embedded, positions[None])
        tables, x = tables_of(cos, sin, self.head_dim), torch.cat([embedded, states], -1)
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, attention_of(number, self.layer_kinds, slots, pages))
        return [self.norm(x)]


class RowsLayer(nn.Module):
    """`BlockLayer` as a module that can be exported and compiled."""

    def __init__(self, layer: BlockLayer):
        super().__init__()
        self.head_dim, self.act, self.sight = layer.head_dim, layer.mlp.act, layer.sight
        self.q, self.kv, self.out = linear_of(layer.q), linear_of(layer.kv), linear_of(layer.out)
        self.gate_up, self.down = linear_of(layer.mlp.gate_up), linear_of(layer.mlp.down)
        self.norm, self.mlp_norm = DenseNorm(layer.norm), DenseNorm(layer.mlp_norm)
        self.q_norm, self.k_norm = (
            nn.Identity() if norm is None else DenseNorm(norm) for norm in (layer.q_norm, layer.k_norm)
        )

    def extra_repr(self) -> str:  # part of the key of programs
        return f"{self.sight}"

    def forward(self, x: Tensor, tables: Tables, keys: Tensor, values: Tensor) -> Tensor:  # [T, H] -> [T, H]
        normed = self.norm(x)
        query = rotate(self.q_norm(self.q(normed).view(x.shape[0], -1, self.head_dim)), tables)
        key, value = self.kv(normed).view(x.shape[0], 2, -1, self.head_dim).unbind(1)
        key, group = rotate(self.k_norm(key), tables), query.shape[1] // key.shape[1]
        k, v = (torch.cat(both).transpose(0, 1)[None] for both in ((keys, key), (values, value)))
        mask = mask_of(self.sight, x.shape[0], keys.shape[0], x)
        mask = None if mask is None else mask.repeat_interleave(group, 0)
        seen = F.scaled_dot_product_attention(
            fold(query, 1, group), k, v, attn_mask=mask, scale=self.head_dim**-0.5
        )
        x = x + self.out(unfold(seen, group).reshape(x.shape[0], -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(self.act(gate) * up)


def mask_of(sight: Sight, rows: int, pages: int, like: Tensor) -> Tensor | None:  # [n, S + n]
    """The additive mask of one block over the pages that its first row sees, and its own rows."""
    row = torch.arange(rows, device=like.device)[:, None]
    other = torch.arange(-pages, rows, device=like.device)[None]  # seen from the anchor
    hidden = other > row if sight.causal else None
    if sight.reach is not None and not sight.anchored:
        far = (other - row).abs() > sight.reach
        hidden = far if hidden is None else hidden | far
    return None if hidden is None else like.new_zeros(()).masked_fill(hidden, -torch.inf)


class RowsLayers(Exported):
    """`DFlashModel` as it runs on the block of one sequence, without its embedding."""

    sizes = ("rows", "rows")

    def __init__(self, model: DFlashModel):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(map(RowsLayer, model.layers)), DenseNorm(model.norm)
        self.rotary, self.head_dim = model.rotary, model.layers[0].head_dim
        sights = [layer.sight for layer in model.layers]
        self.layer_kinds = [sights.index(sight) for sight in sights]

    def forward(self, embedded: Tensor, positions: Tensor, _: None, *pages: Tensor) -> list[Tensor]:
        """The normed states [T, H]; `pages`: the keys that the first row sees in each layer, then values."""
        cos, sin = self.rotary(embedded, positions[None])
        tables, x, count = tables_of(cos, sin, self.head_dim), embedded, len(self.layer_kinds)
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, pages[number], pages[count + number])
        return [self.norm(x)]


# trials of both


def head_steps(
    head: EagleHead, layers: tuple[LayerSpec, ...], target: Target, all_lengths: Iterable[Lengths]
) -> Iterator[Step]:
    """Steps of a head over sequences of so many rows."""
    for ids, positions, store, lengths in trials(layers, target, all_lengths):
        states = torch.randn(len(ids), len(head.norm.weight)).to(head.norm.weight)
        yield (ids, states, positions), view_of(store, lengths, written=True)


def block_steps(
    layers: tuple[LayerSpec, ...], target: Target, all_lengths: Iterable[Lengths]
) -> Iterator[Step]:
    for ids, positions, store, lengths in trials(layers, target, all_lengths):
        yield (ids, positions), view_of(store, lengths, written=False)


def trials(
    layers: tuple[LayerSpec, ...], target: Target, all_lengths: Iterable[Lengths]
) -> Iterator[tuple[Tensor, Tensor, PageStore, Lengths]]:
    """Ids and positions of sequences with so many rows, and pages that are full."""
    for lengths in all_lengths:
        rows = sum(lengths)
        store = PageStore(layers, len(lengths), SEEN + max(lengths), target.device)
        noise = torch.Generator(target.device).manual_seed(rows)
        for pool in (*store.k, *store.v):
            pool.normal_(generator=noise)
        ids = torch.arange(rows, device=target.device) % target.vocab_size
        positions = torch.cat([torch.arange(n, device=target.device) + SEEN for n in lengths])
        yield ids, positions, store, lengths


def view_of(store: PageStore, lengths: Lengths, written: bool) -> View:
    """Rows after SEEN positions of each sequence; only where `written` have these slots of their own."""
    spans, row = [], 0
    for page, rows in enumerate(lengths):
        start, seen = page * store.block_size, SEEN + rows * written
        spans.append(SpanView(row, row + rows, slice(start, start + seen), seen))
        row += rows
    return store.view_of(spans) if written else View(store, slice(0, 0), spans)


def apart(step: Step) -> Step:
    """The step as if its slots were not consecutive."""
    inputs, view = step
    spans = [replace(span, where=as_index(span.where, view.store.device)) for span in view.spans]
    return inputs, view.store.view_of(spans)
