"""How a drafter's network runs: as it is, as CUDA graphs between attentions, or as compiled programs.

Where `compile` asks for it, the forwards that draft are captured or compiled, as those of the target's loop
are. What reads committed states, and what makes logits of states, runs as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.types import LayerSpec, Needs
from speculon.decoding.kv.store import PageStore, View, as_index, end_to_end
from speculon.drafters.config import DrafterConfig
from speculon.drafters.dflash.attention import Sight, visible
from speculon.drafters.layers import Network, rope_config, weight_bytes
from speculon.target.attention import fold, running, unfold
from speculon.target.block import CannotReplace, Norm, Tables, rotation_tables
from speculon.target.captured import RECORDERS, Lengths, Pieces, Recorder, copied, of_buckets
from speculon.target.compare import alike
from speculon.target.compiled import (
    CompilePlan,
    PagedPrograms,
    Programs,
    number_kinds,
    plan_for,
    refuse_unmeasured,
)
from speculon.target.compiled_layers import Arguments, DenseNorm, Exported, as_linear, choose_attend
from speculon.target.footprint import BUCKETS, CaptureSizes, program_bytes, scratch_bytes
from speculon.target.grouping import FOLD_ROWS
from speculon.target.linear import Linear, Packed
from speculon.target.target import Runner, Target
from speculon.target.trial import Step, compare_steps, refused

SEEN = 5  # positions of a trial's sequence before its rows
# rows of the sequences in the trial; the first of each program has no size of 1 but that of one row
OF_HEADS = ((1,), (5,), (3, 2), (12,), (1, 1), (4, 1, 2), (2,), (FOLD_ROWS + 1,))
OF_BLOCKS = ((4,), (2,), (FOLD_ROWS,), (1,), (3, 2), (FOLD_ROWS + 1,))


def estimate_needs(
    config: DrafterConfig,
    taps: tuple[int, ...],
    target: Target,
    rows: int,
    scored: int,
    compile: bool,
    more: int = 0,
) -> Needs:
    """The needs of a network that is not loaded; T = `rows` and R = `scored` in its largest forward.

    For `more` see `CaptureSizes.of_drafter`.
    """
    dtype, device, width = target.dtype, target.device, config.taps * config.target_hidden
    layers = [LayerSpec("taps", 1, width, 0, dtype)]
    layers += [
        LayerSpec("attention", config.kv_heads, config.head_dim, config.head_dim, dtype, window)
        for window in config.page_windows
    ]
    sizes, fixed = rope_config(config), weight_bytes(config, dtype)
    sizes.vocab_size = target.vocab_size  # its logits cover the target's vocabulary
    if compile and device.type in RECORDERS:
        fixed += CaptureSizes.of_drafter(sizes, config.layers, more).num_bytes(dtype)
    elif compile:
        fixed += program_bytes(fixed, dtype, device, drafter=True)
    return Needs(
        taps=taps,
        layers=tuple(layers),
        max_context=config.max_context,
        max_drafts=config.max_drafts,
        bytes_fixed=fixed,
        bytes_scratch=scratch_bytes(sizes, dtype, device, rows, scored) + 2 * rows * width * dtype.itemsize,
    )


def choose_run(network: Network, layers: tuple[LayerSpec, ...], target: Target, compile: bool) -> Runner:
    """The faster form where that is asked for, possible and equal on every step; else the network itself.

    `layers` are those of its attention in the pages.
    """
    count = len(network.layers)
    runner = Runner(network.forward, count, count, "loop")
    if not compile:
        return runner
    try:
        if target.device.type in RECORDERS:
            runner.run = captured_draft(network, layers, target)
            runner.form = "captured"
        else:
            runner.run = compiled_draft(network, layers, target)
            runner.form = "compiled"
    except CannotReplace as reason:
        runner.refused[str(reason)] += 1
    return runner


# CUDA graphs between attentions


class CapturedDraft(Pieces):
    """A drafter's network whose pieces are captured. A call of more rows than any captured one runs it."""

    def __init__(self, network: Network, inputs: tuple[Tensor, ...], record: Recorder):
        self.network = network
        layers: Any = network.layers
        super().__init__(layers, network.config.heads, inputs)
        self.record(record)

    def __call__(self, *arguments: Any) -> Tensor:  # [T, H]
        *inputs, view = arguments
        rows = len(inputs[0])
        if rows > BUCKETS[-1]:
            return self.network(*arguments)
        for buffer, values in zip(self.inputs, inputs, strict=True):
            buffer[:rows].copy_(values)
        *_, after = self.replay(rows, view)
        return copied(after)

    def start(self, rows: int) -> tuple[Tensor, Tables]:
        return self.network.begin(*(buffer[:rows] for buffer in self.inputs))

    def finish(self, x: Tensor) -> Tensor:
        return self.network.end(x)


def captured_draft(network: Network, layers: tuple[LayerSpec, ...], target: Target) -> CapturedDraft:
    """Raises `CannotReplace` where capturing fails, or the result differs on a step."""
    with torch.inference_mode(), refused("captured", RuntimeError):
        ids, positions = torch.zeros(2, BUCKETS[-1], dtype=torch.long, device=target.device)
        record = RECORDERS[target.device.type](target.device)
        made = CapturedDraft(network, trial_inputs(network, ids, positions), record)
        steps = draft_steps(network, layers, target, of_buckets())
        compare_steps(made, network, steps, "captured", same=alike)
    return made


# the steps of a trial


def trial_inputs(network: Network, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """What a network reads at ids and positions [T]; random states where it reads such."""
    if not network.reads_states:
        return ids, positions
    states = torch.randn(len(ids), network.config.hidden).to(network.norm.weight)
    return ids, states, positions


def draft_steps(
    network: Network, layers: tuple[LayerSpec, ...], target: Target, all_lengths: Iterable[Lengths]
) -> Iterator[Step]:
    """Steps of a network over sequences of so many rows; those that read states are written to pages."""
    for ids, positions, store, lengths in trials(layers, target, all_lengths):
        yield trial_inputs(network, ids, positions), trial_view(store, lengths, network.reads_states)


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


def trial_view(store: PageStore, lengths: Lengths, written: bool) -> View:
    """Rows after SEEN positions of each sequence; only where `written` have these slots of their own."""
    parts = []
    for page, rows in enumerate(lengths):
        start, seen = page * store.block_size, SEEN + rows * written
        parts.append((rows, slice(start, start + seen), seen, 0))
    spans = end_to_end(parts)
    return store.view_of(spans) if written else View(store, slice(0, 0), spans)


# compiled programs


class HeadLayers(Exported):
    """A network whose rows are written to pages, without its embedding, which may be the target's."""

    sizes = ("rows", "rows", "rows")

    def __init__(self, network: Any, layer_kinds: list[int]):
        super().__init__()
        self.layers, self.rotary, self.layer_kinds = exported(network.layers), network.rotary, layer_kinds
        self.norm = DenseNorm(network.norm) if network.norm_output else nn.Identity()

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, slots: Tensor | None, *pages: Tensor
    ) -> list[Tensor]:
        """The states [T, H] after each row; the rest as in `Layers`."""
        cos, sin = self.rotary(embedded, positions[None])
        tables = rotation_tables(cos, sin, self.layers[0].head_dim)
        x = torch.cat([embedded, states], -1)
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, choose_attend(number, self.layer_kinds, slots, pages))
        return [self.norm(x)]


class RowsLayers(Exported):
    """A block drafter as it runs on the block of one sequence, without its embedding."""

    sizes = ("rows", "rows")

    def __init__(self, network: Any):
        super().__init__()
        self.layers, self.rotary = exported(network.layers), network.rotary
        self.norm = DenseNorm(network.norm)
        sights = [layer.sight for layer in network.layers]
        self.layer_kinds = [sights.index(sight) for sight in sights]

    def forward(self, embedded: Tensor, positions: Tensor, _: None, *pages: Tensor) -> list[Tensor]:
        """The normed states [T, H]; `pages`: the keys that the first row sees in each layer, then values."""
        cos, sin = self.rotary(embedded, positions[None])
        tables = rotation_tables(cos, sin, self.layers[0].head_dim)
        x, count = embedded, len(self.layer_kinds)
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, partial(attend_block, layer.sight, pages[number], pages[count + number]))
        return [self.norm(x)]


def exported(part: nn.Module) -> Any:
    """A copy of frozen layers whose products and norms are modules that can be exported and compiled."""
    made = copy.copy(part)
    made._modules = {name: exported(child) for name, child in part._modules.items() if child is not None}
    for name, value in vars(part).items():
        if isinstance(value, Norm):
            setattr(made, name, DenseNorm(value))
        elif isinstance(value, Linear | Packed):
            setattr(made, name, as_linear(value))
    return made


def attend_block(
    sight: Sight, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:  # [T, H, Dh]
    """The rows of one block over the pages that its first row sees, and over each other."""
    group = query.shape[1] // key.shape[1]
    k, v = (torch.cat(both).transpose(0, 1)[None] for both in ((keys, key), (values, value)))
    mask = block_mask(sight, query.shape[0], keys.shape[0], query)
    mask = None if mask is None else mask.repeat_interleave(group, 0)
    seen = F.scaled_dot_product_attention(fold(query, 1, group), k, v, attn_mask=mask, scale=scaling)
    return unfold(seen, group)


def block_mask(sight: Sight, rows: int, pages: int, like: Tensor) -> Tensor | None:  # [n, S + n]
    """The additive mask of one block over the pages that its first row sees, and its own rows."""
    row = torch.arange(rows, device=like.device)[:, None]
    other = torch.arange(-pages, rows, device=like.device)[None]  # seen from the anchor
    hidden = other > row if sight.causal else None
    if sight.reach is not None and not sight.anchored:
        far = (other - row).abs() > sight.reach
        hidden = far if hidden is None else hidden | far
    return None if hidden is None else like.new_zeros(()).masked_fill(hidden, -torch.inf)


class CompiledHead(PagedPrograms):
    """A network whose rows are written to pages, and its programs."""

    def __init__(self, network: Network, plan: CompilePlan, layer_kinds: list[int]):
        super().__init__(plan, layer_kinds, network.config.heads // network.config.kv_heads)
        self.network = network

    def __call__(self, ids: Tensor, states: Tensor, positions: Tensor, view: View) -> Tensor:  # [T, H]
        if torch.get_num_threads() != self.threads:
            return self.network(ids, states, positions, view)
        variant, arguments = self.arguments(ids, states, positions, view)
        with running(view):
            (after,) = self.programs[variant](*arguments)
        return after

    def arguments(self, ids: Tensor, states: Tensor, positions: Tensor, view: View) -> tuple[str, Arguments]:
        """The program for a step, and its arguments."""
        return self.for_step([F.embedding(ids, self.network.embed), states, positions], view)


class CompiledBlocks(Programs):
    """A block drafter and its program for one sequence. Other steps run the drafter."""

    def __init__(self, network: Network, plan: CompilePlan):
        super().__init__(plan)
        self.network = network

    def __call__(self, ids: Tensor, positions: Tensor, view: View) -> Tensor:  # [T, H]
        variant, arguments = self.arguments(ids, positions, view)
        if variant not in self.programs or torch.get_num_threads() != self.threads:
            return self.network(ids, positions, view)
        (states,) = self.programs[variant](*arguments)
        return states

    def arguments(self, ids: Tensor, positions: Tensor, view: View) -> tuple[str, Arguments]:
        """The program for a step, and its arguments."""
        span, rows = view.spans[0], len(ids)
        if len(view.spans) > 1 or not 1 < rows <= self.plan.few:
            return "many", []
        layers: Any = self.network.layers
        seen = [view.slots_of(layer.number, visible(span, layer.sight).where) for layer in layers]
        keys, values = zip(*seen, strict=True)
        return "few", [F.embedding(ids, self.network.embed), positions, None, *keys, *values]


@torch.inference_mode()
def compiled_draft(
    network: Network, layers: tuple[LayerSpec, ...], target: Target
) -> CompiledHead | CompiledBlocks:
    """Raises `CannotReplace` where the network cannot be compiled, or the result differs on a step."""
    refuse_unmeasured(target)
    with refused("compiled"):
        plan, count = plan_for(target.dtype, target.device), len(network.layers)
        steps = list(draft_steps(network, layers, target, OF_HEADS if network.reads_states else OF_BLOCKS))
        if network.reads_states:
            # several sequences share a call in any layout: that was measured in blocks, too
            settings = {name: plan.settings[name] for name in ("one", "few", "many")}
            steps += [scattered(step) for step in steps[:2]]
            layer_kinds = number_kinds(steps[0][1], count)
            plan = CompilePlan({**settings, "joint": settings["many"]}, plan.few)
            made: CompiledHead | CompiledBlocks = CompiledHead(network, plan, layer_kinds)
            programs: Exported = HeadLayers(network, layer_kinds)
        else:
            made = CompiledBlocks(network, CompilePlan({"few": plan.settings["few"]}, FOLD_ROWS))
            programs = RowsLayers(network)
        arguments: Callable[..., tuple[str, Arguments]] = made.arguments
        made.compile(programs, [arguments(*inputs, view) for inputs, view in steps])
        written_layers = count if network.reads_states else 0
        compare_steps(made, network, steps, "compiled", written_layers=written_layers)
    return made


def scattered(step: Step) -> Step:
    """The step as if its slots were not consecutive."""
    inputs, view = step
    spans = [replace(span, where=as_index(span.where, view.store.device)) for span in view.spans]
    return inputs, view.store.view_of(spans)
