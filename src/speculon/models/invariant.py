"""A target whose logits of a row are the same, bit for bit, in every batch.

Kernels choose their order of addition by the number of rows and keys. Here products run in pieces of rows
(models/pieces), and attention pads its keys and rows. Both are measured at load; then logits are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from speculon.batch import Batch, Runs
from speculon.core import NO_PADDING, LayerSpec, Padding
from speculon.errors import UnsupportedModel
from speculon.kv.store import PageStore, SpanView
from speculon.models.batch_check import (
    LONGEST,
    Attending,
    RandomLayer,
    differing,
    uneven_keys,
)
from speculon.models.block import Block, CannotReplace, Gated
from speculon.models.captured import Captured
from speculon.models.fuse import Fused, captured_loop
from speculon.models.grouping import PlanKey
from speculon.models.linear import Product
from speculon.models.loop import Loop
from speculon.models.pieces import CannotBeInvariant, InPieces, InvariantProducts, Pieces, PromptsApart
from speculon.models.remembered import once, passed, passes
from speculon.models.target import Run, Target, no_context

# of attention, the cheapest first; 512 is SDPA's block of keys
PADDINGS = (
    *(Padding(keys, rows, piece) for keys in (64, 512) for rows in (4, 8) for piece in (64, 32)),
    Padding(512, 16),
)

log = logging.getLogger("speculon")


@dataclass(slots=True)
class Invariance:
    """What makes a target batch-invariant, and can be taken back."""

    target: Target
    layers: tuple[LayerSpec, ...]  # without padding, and with it
    padded: tuple[LayerSpec, ...] = ()
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)
    pieces: Pieces = field(default_factory=Pieces)
    # whose they are, and under which name; without pieces, and in pieces
    products: list[tuple[Any, str, Product, Product]] = field(default_factory=list)
    runs: dict[bool, Run] = field(default_factory=dict)  # captured steps hold the products of their time
    experts: Any = None  # transformers' choice of a kernel for them

    def add(self, owner: Any, name: str, width: int, by_row: bool = True) -> int:
        """Puts the product that `owner` has under `name` in pieces; returns the width of its result.

        `by_row` says whether it is of all rows of a forward, in their order.
        """
        product, dtype, device = getattr(owner, name), self.target.dtype, self.target.device
        outputs: int = product(torch.zeros(1, width, dtype=dtype, device=device)).shape[1]
        of = self.pieces.by_row if by_row else self.pieces.of
        self.products.append((owner, name, product, of(product, outputs, width, dtype)))
        return outputs

    def add_mlp(self, block: Block, mlp: Gated) -> None:
        """Where prompts of its products are apart, they run through all of it: its inner rows are wide."""
        mine = {name: (whole, made) for owner, name, whole, made in self.products if owner is mlp}
        rows = [made.rows for _, made in mine.values() if isinstance(made, InPieces)]
        if len(rows) < len(mine) or not any(one.prompts_differ for one in rows):
            return
        prompt, sizes = Gated(mine["gate_up"][0], mine["down"][0], mlp.act), rows[0].in_prompts(rows[1])
        if sizes:
            self.products.append((block, "mlp", mlp, PromptsApart(mlp, prompt, sizes, self.pieces)))

    @property
    def prompts_apart(self) -> bool:
        """Whether rows of prompts run in pieces of their own sizes."""
        return any(isinstance(in_pieces, PromptsApart) for *_, in_pieces in self.products)

    def context(self, prompts: Runs) -> AbstractContextManager[Any]:
        """Of a forward with these rows of prompts."""
        self.pieces.prompts = prompts
        return self.mode

    def capture(self) -> None:
        """Captures the steps once more, with products in pieces. Those with prompts apart take the loop."""
        if not isinstance(self.target.run, Captured):
            return
        self.runs[False] = self.target.run
        self.switch(True)
        self.pieces.prompts = ()
        try:
            self.runs[True] = made = captured_loop(self.target.run.loop, self.target, torch.equal)
        except CannotReplace as reason:
            raise CannotBeInvariant(str(reason)) from reason
        made.prompts_in_loop = self.prompts_apart

    def switch(self, on: bool) -> None:
        self.target.run = self.runs.get(on, self.target.run)
        self.target.layers = self.padded if on else self.layers
        self.target.context = self.context if on else no_context
        self.target.prompts_apart = on and self.prompts_apart
        for owner, name, whole, in_pieces in self.products:
            setattr(owner, name, in_pieces if on else whole)
        if self.experts is not None:  # one after the other; the other kernels depend on the rows of all
            self.target.model.set_experts_implementation("eager" if on else self.experts)


def decide(target: Target, setting: bool | None) -> None:
    """Makes a target batch-invariant if the setting says so; if it is None, where it can be in bf16 and fp16.

    Raises `UnsupportedModel` if the setting says so and it cannot be. `target.invariance` has the decision.
    """
    if setting is False:
        return
    try:
        if setting is None and target.dtype is torch.float32:
            raise CannotBeInvariant("near-ties are rare in fp32, where it is tried only if asked for")
        make_invariant(target)
    except CannotBeInvariant as reason:
        if setting:
            raise UnsupportedModel(f"batch_invariant: {target.name}: {reason}") from reason
        target.invariance = f"no: {reason}"
    except Exception as error:  # of model code that runs in another way than in its load check
        if setting:
            raise
        target.invariance = f"no: {type(error).__name__} when it was tried"
        log.warning("batch_invariant: %s: %s", target.name, target.invariance)
    else:
        note = "; prompts find no generated tokens in the prefix cache" if target.prompts_apart else ""
        target.invariance = f"yes: a row has the same logits in every batch{note}"


@torch.inference_mode()
def make_invariant(target: Target) -> None:
    """Raises `CannotBeInvariant` with the reason; the target is as it was."""
    if reason := obstacle(target):
        raise CannotBeInvariant(reason)
    invariance = in_pieces(target)
    try:
        invariance.padded = padded(target)
        invariance.capture()
        invariance.switch(True)
        if not passed("batches"):
            if (at := differing(target)) is not None:
                raise CannotBeInvariant(f"logits at position {at} depend on their batch")
            passes("batches")
    except BaseException:
        invariance.switch(False)
        raise
    invariance.runs.clear()  # the first capture takes memory


def obstacle(target: Target) -> str | None:
    """Why the logits of this target cannot be made invariant; None where it is tried."""
    if target.fusion is not None and target.fusion.compiled:
        return "compiled steps add in another order than others"
    if target.recurrent:
        return "recurrent mixers add in an order that depends on the rows of a span"
    return None


def in_pieces(target: Target) -> Invariance:
    """Products of fused layers are wrapped one by one; where other modules are left, a mode finds theirs."""
    made, loop, width = Invariance(target, target.layers), target.run, target.hidden_size
    loop = loop.loop if isinstance(loop, Captured) else loop
    blocks = list(blocks_of(target.model))
    for block in blocks:
        made.add(block.attention, "qkv", width)
        made.add(block.attention, "out", block.attention.heads * block.attention.head_dim)
        if isinstance(block.mlp, Gated):
            both = made.add(block.mlp, "gate_up", width, by_row=False)
            made.add(block.mlp, "down", both // 2, by_row=False)
            made.add_mlp(block, block.mlp)
    head = target.model.get_output_embeddings()
    if isinstance(loop, Loop):
        made.add(loop, "head", width, by_row=False)
    elif isinstance(head, Fused):  # packed: the mode does not see its product
        made.add(head, "inner", width, by_row=False)
    if not isinstance(loop, Loop) or any(not isinstance(block.mlp, Gated) for block in blocks):
        made.mode = InvariantProducts(made.pieces)
        made.experts = target.model.get_experts_implementation()
    return made


def blocks_of(model: nn.Module) -> Iterator[Block]:
    """The fused layers of a model."""
    for module in model.modules():
        block = getattr(module, "block", None)
        if isinstance(block, Block):
            yield block


def padded(target: Target) -> tuple[LayerSpec, ...]:
    """Its layers with the cheapest padding with which a row attends alike in every batch."""
    found: dict[LayerSpec, Padding] = {}
    for layer in layers_of(target):
        padding = once(f"padding {layer}", partial(padding_of, layer, target), padding_from)
        found[layer.spec] = max(padding, found.get(layer.spec, NO_PADDING))
    return tuple(replace(spec, padding=found[spec]) for spec in target.layers)


def padding_from(kept: list[Any]) -> Padding:
    keys, rows, piece, uneven = kept
    return Padding(keys, rows, piece, tuple(uneven))


def padding_of(layer: Attending, target: Target) -> Padding:
    longest = min(LONGEST + (layer.spec.window or 0), target.max_context)
    uneven = {step: uneven_keys(layer, step, target.device) for step in {one.keys for one in PADDINGS}}
    for padding in (one._replace(uneven=uneven[one.keys]) for one in PADDINGS):
        if RandomLayer.of(layer, longest, padding, target.device).differing() is None:
            return padding
    heads = f"{layer.spec.k_dim} x {layer.spec.heads}"
    raise CannotBeInvariant(f"attention of heads {heads} differs by its numbers of rows and keys")


def layers_of(target: Target) -> list[Attending]:
    """Those of its layers that attend differently, found in a forward of one token."""
    store = PageStore(target.layers, 1, 1, target.device)
    view = store.view_of([SpanView(0, 1, slice(0, 1), 1)])
    zero = torch.zeros(1, dtype=torch.long, device=target.device)
    target.forward(Batch([], zero[None], zero[None], zero), view)
    keys = [key for key in view.memo if isinstance(key, PlanKey)]
    shapes = set(zip(store.layer_kinds, target.layers, strict=True))
    return [Attending(spec, group, plain) for a, group, plain in keys for b, spec in shapes if a == b]
