"""The networks of drafters as compiled programs, as `Compiled` is the target's loop.

Compiled are the forwards that draft. What reads committed states, and what makes logits of states, runs as
before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.types import LayerSpec
from speculon.decoding.kv.store import View, as_index
from speculon.drafters.captured import steps_of
from speculon.drafters.dflash.attention import Sight, visible
from speculon.drafters.layers import Network
from speculon.target.attention import fold, running, unfold
from speculon.target.block import Norm, tables_of
from speculon.target.compiled import (
    CompilePlan,
    PagedPrograms,
    Programs,
    compared,
    kinds_of,
    plan_for,
    reported,
)
from speculon.target.compiled_layers import Arguments, DenseNorm, Exported, attention_of, linear_of
from speculon.target.grouping import FOLD_ROWS
from speculon.target.linear import Linear, Packed
from speculon.target.target import Target
from speculon.target.trial import Step

# rows of the sequences in the trial; the first of each program has no size of 1 but that of one row
OF_HEADS = ((1,), (5,), (3, 2), (12,), (1, 1), (4, 1, 2), (2,), (FOLD_ROWS + 1,))
OF_BLOCKS = ((4,), (2,), (FOLD_ROWS,), (1,), (3, 2), (FOLD_ROWS + 1,))


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
        tables = tables_of(cos, sin, self.layers[0].head_dim)
        x = torch.cat([embedded, states], -1)
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, attention_of(number, self.layer_kinds, slots, pages))
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
        tables = tables_of(cos, sin, self.layers[0].head_dim)
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
            setattr(made, name, linear_of(value))
    return made


def attend_block(
    sight: Sight, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:  # [T, H, Dh]
    """The rows of one block over the pages that its first row sees, and over each other."""
    group = query.shape[1] // key.shape[1]
    k, v = (torch.cat(both).transpose(0, 1)[None] for both in ((keys, key), (values, value)))
    mask = mask_of(sight, query.shape[0], keys.shape[0], query)
    mask = None if mask is None else mask.repeat_interleave(group, 0)
    seen = F.scaled_dot_product_attention(fold(query, 1, group), k, v, attn_mask=mask, scale=scaling)
    return unfold(seen, group)


def mask_of(sight: Sight, rows: int, pages: int, like: Tensor) -> Tensor | None:  # [n, S + n]
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
    """The network compiled, and compared with it on steps; raises `CannotReplace`."""
    with reported(target):
        of, count = plan_for(target.dtype, target.device), len(network.layers)
        steps = list(steps_of(network, layers, target, OF_HEADS if network.reads_states else OF_BLOCKS))
        if network.reads_states:
            # several sequences share a call in any layout: that was measured in blocks, too
            settings = {name: of.settings[name] for name in ("one", "few", "many")}
            steps += [apart(step) for step in steps[:2]]
            layer_kinds = kinds_of(steps[0][1], count)
            plan = CompilePlan({**settings, "joint": settings["many"]}, of.few)
            made: CompiledHead | CompiledBlocks = CompiledHead(network, plan, layer_kinds)
            programs: Exported = HeadLayers(network, layer_kinds)
            written = count
        else:
            made = CompiledBlocks(network, CompilePlan({"few": of.settings["few"]}, FOLD_ROWS))
            programs, written = RowsLayers(network), 0
        arguments: Callable[..., tuple[str, Arguments]] = made.arguments
        made.compile(programs, [arguments(*inputs, view) for inputs, view in steps])
        compared(made, network, steps, written)
    return made


def apart(step: Step) -> Step:
    """The step as if its slots were not consecutive."""
    inputs, view = step
    spans = [replace(span, where=as_index(span.where, view.store.device)) for span in view.spans]
    return inputs, view.store.view_of(spans)
