"""A target whose logits of a row are the same, bit for bit, in every batch.

Kernels choose their order of addition by the number of rows and keys. Here products run in pieces of rows
(`model/pieces.py`), and attention pads its keys and rows. Both are measured at load; then logits are
compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.loading.batch_check import (
    LONGEST,
    Attending,
    RandomLayer,
    differing,
    uneven_keys,
)
from speculon.runtimes.torch.model.adapters import Adapted
from speculon.runtimes.torch.model.block import CannotReplace, Fused, Gated, Loop, PagedLayer, between
from speculon.runtimes.torch.model.captured import Captured, captured_loop
from speculon.runtimes.torch.model.grouping import PlanKey
from speculon.runtimes.torch.model.linear import Product
from speculon.runtimes.torch.model.pieces import (
    MOST,
    CannotBeInvariant,
    InPieces,
    InvariantProducts,
    ProductPieces,
    PromptsApart,
)
from speculon.runtimes.torch.model.remembered import once, passed, passes
from speculon.runtimes.torch.model.taps import Taps
from speculon.runtimes.torch.model.target import Target, TargetForward
from speculon.runtimes.torch.needs import LayerSpec, Padding

# of attention, the cheapest first; 512 is SDPA's block of keys. Behind a window calls begin at different
# keys; if each of them begins at a multiple of the block, its last block may be short
PADDINGS = (
    *(
        Padding(keys, rows, piece, start=start)
        for keys, start in ((64, 64), (64, 512), (512, 512))
        for rows in (4, 8)
        for piece in (64, 32)
    ),
    Padding(512, 16, start=512),
)
# multiplications of a batch of products, up to which torch takes another kernel than for more
SMALL_PRODUCT = 4096

Uneven = Callable[[Attending, int, torch.device], tuple[int, ...]]

log = logging.getLogger("speculon")


@dataclass(slots=True)
class InMode:
    """A forward of model code whose products run in pieces, wherever it makes them."""

    run: TargetForward
    mode: InvariantProducts

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        with self.mode:
            return self.run(batch, view, taps)


def decide(target: Target, setting: bool | None) -> None:
    """Makes a target batch-invariant if the setting says so; if it is None, where it can be in bf16 and fp16.

    Raises `UnsupportedModel` if the setting says so and it cannot be. `target.invariance` has the decision.
    """
    if setting is False:
        return
    try:
        if setting is None and target.dtype is torch.float32:
            raise CannotBeInvariant("near-ties are rare in fp32, so batch_invariant must be asked for")
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
    with ExitStack() as undo:
        put_products_in_pieces(target, undo)
        put(undo, target, "layers", padded(target))
        if isinstance(captured := target.runner.run, Captured):
            capture_again(captured, target, undo)
        checked = f"batches, {target.runner.form}"
        if not passed(checked):
            if (at := differing(target)) is not None:
                raise CannotBeInvariant(f"logits at position {at} depend on their batch")
            passes(checked)
        undo.pop_all()


def put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute, which `undo` sets back."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def obstacle(target: Target) -> str | None:
    """Why the logits of this target cannot be made invariant; None where it is tried."""
    if target.recurrent:
        return "recurrent mixers add in an order that depends on the rows of a span"
    return None


def put_products_in_pieces(target: Target, undo: ExitStack) -> None:
    """Those of fused layers one by one; where other modules are left, a mode finds theirs."""
    pieces, dtype, width = ProductPieces(), target.dtype, target.hidden_size
    loop = target.runner.run
    loop = loop.loop if isinstance(loop, Captured) else loop
    blocks, differ = list(fused_blocks(target.model)), False
    # decided before an MLP in pieces takes the place of a gated one
    all_fused = isinstance(loop, Loop) and all(isinstance(block.mlp, Gated) for block in blocks)
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        heads = attention.heads * attention.head_dim
        for name, inputs in (("qkv", width), ("out", heads)):
            product = getattr(attention, name)
            made = pieces.by_row(product, num_outputs(product, inputs, target), inputs, dtype)
            differ |= isinstance(made.product if isinstance(made, Adapted) else made, PromptsApart)
            put(undo, attention, name, made)
        if isinstance(mlp, Gated):
            differ |= put_mlp_in_pieces(block, mlp, pieces, target, undo)
    put(undo, target, "prompts_apart", differ)
    if isinstance(loop, Loop) and not pieces.whole:
        put(undo, loop, "between", between(loop.blocks))
    head = target.model.get_output_embeddings()
    for owner, name in ((loop, "head"),) if isinstance(loop, Loop) else ((head, "inner"),):
        if isinstance(owner, Loop | Fused):  # a packed head: the mode does not see its product
            product = getattr(owner, name)
            put(undo, owner, name, pieces.of(product, num_outputs(product, width, target), width, dtype))
    if not all_fused:
        put(undo, target.runner, "run", InMode(target.runner.run, InvariantProducts(pieces)))
        if (experts := target.model.get_experts_implementation()) is not None:
            undo.callback(target.model.set_experts_implementation, experts)
            target.model.set_experts_implementation("eager")  # others depend on the rows of all experts


def put_mlp_in_pieces(
    block: PagedLayer, mlp: Gated, pieces: ProductPieces, target: Target, undo: ExitStack
) -> bool:
    """Whether prompts take other products: then they run through all of it, since its inner rows are wide."""
    width, dtype, whole = target.hidden_size, target.dtype, Gated(mlp.gate_up, mlp.down, mlp.gating)
    both = num_outputs(mlp.gate_up, width, target)
    gate_up = pieces.of(mlp.gate_up, both, width, dtype)
    down_shape = num_outputs(mlp.down, both // 2, target), both // 2
    down = pieces.of(mlp.down, *down_shape, dtype)
    put(undo, mlp, "gate_up", gate_up)
    put(undo, mlp, "down", down)
    if not (isinstance(gate_up, InPieces) and isinstance(down, InPieces)):
        return False
    if max(gate_up.rows.max_rows, down.rows.max_rows) > max(MOST) or gate_up.rows.sizes and down.rows.sizes:
        return False
    of_down = pieces.prompt_sizes(whole.down, *down_shape, dtype)
    of_gate_up = pieces.prompt_sizes(whole.gate_up, both, width, dtype)
    if sizes := tuple(size for size in of_gate_up if size in of_down):
        put(undo, block, "mlp", PromptsApart(mlp, whole, sizes))
    return bool(sizes)


def num_outputs(product: Product, width: int, target: Target) -> int:
    return product(torch.zeros(1, width, dtype=target.dtype, device=target.device)).shape[1]


def capture_again(captured: Captured, target: Target, undo: ExitStack) -> None:
    """The steps with products in pieces. Those with prompts apart take the loop."""
    try:
        made = captured_loop(captured.loop, target, torch.equal)
    except CannotReplace as reason:
        raise CannotBeInvariant(str(reason)) from reason
    made.prompts_in_loop = target.prompts_apart
    put(undo, target.runner, "run", made)


def fused_blocks(model: nn.Module) -> Iterator[PagedLayer]:
    """The fused layers of a model."""
    for module in model.modules():
        block = getattr(module, "block", None)
        if isinstance(block, PagedLayer):
            yield block


def padded(target: Target) -> tuple[LayerSpec, ...]:
    """Its layers with the cheapest padding with which a row attends alike in every batch."""
    paddings: dict[LayerSpec, Padding] = {}
    uneven = cache(uneven_keys)
    for layer in distinct_layers(target):
        padding = once(f"padding {layer}", partial(cheapest_padding, layer, target, uneven), padding_from)
        paddings[layer.spec] = padding.with_all_of(paddings.get(layer.spec, padding))
    return tuple(replace(spec, padding=paddings[spec]) for spec in target.layers)


def padding_from(stored: list[Any]) -> Padding:
    keys, rows, piece, uneven, start = stored
    return Padding(keys, rows, piece, tuple(uneven), start)


def cheapest_padding(layer: Attending, target: Target, uneven: Uneven = uneven_keys) -> Padding:
    longest = min(LONGEST + (layer.spec.window or 0), target.max_context)
    everywhere = layer._replace(spec=replace(layer.spec, window=None, chunk=None))  # a block has no window
    by_step = {
        keys: uneven(everywhere, keys, target.device) for keys in {padding.keys for padding in PADDINGS}
    }
    for cheapest in PADDINGS:
        if not layer.plain and is_small(layer.spec, cheapest):
            continue
        if layer.spec.window is None and cheapest.start > cheapest.keys:
            continue  # all its calls begin at the first key
        padding = cheapest._replace(uneven=by_step[cheapest.keys])
        if RandomLayer.of(layer, longest, padding, target.device).differing() is None:
            return padding
    heads = f"{layer.spec.k_dim} x {layer.spec.heads}"
    raise CannotBeInvariant(f"attention of heads {heads} differs by its numbers of rows and keys")


def is_small(spec: LayerSpec, padding: Padding) -> bool:
    """Whether products of scores may be so small that torch takes another kernel for them than for more."""
    return spec.heads * padding.rows * padding.keys * min(spec.k_dim, spec.v_dim) <= SMALL_PRODUCT


def distinct_layers(target: Target) -> list[Attending]:
    """Those of its layers that attend differently, found in a forward of one token."""
    store = PageStore(target.layers, 1, 1, target.device)
    view = store.view_of([SpanView(0, 1, slice(0, 1), 1)])
    zero = torch.zeros(1, dtype=torch.long, device=target.device)
    target.forward(Batch([], zero[None], zero[None], zero), view)
    keys = [key for key in view.memo if isinstance(key, PlanKey)]
    shapes = set(zip(store.layer_kinds, target.layers, strict=True))
    return [Attending(spec, group, plain) for a, group, plain in keys for b, spec in shapes if a == b]
