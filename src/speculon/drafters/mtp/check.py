"""The check of prediction modules after loading, and their fused forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from speculon.core.errors import UnsupportedModel
from speculon.core.types import LayerSpec
from speculon.decoding.batch import Batch
from speculon.decoding.kv.store import PageStore, SpanView
from speculon.drafters.mtp.network import Module, MtpHead
from speculon.loading.load_check import LOOSE, TOLERANCE
from speculon.target import attention
from speculon.target.block import UNKNOWN, CannotReplace, Fused, FusedLayer, block_of, norm_of
from speculon.target.target import Target

TRIAL = 12  # rows of the check
ROUNDING = 0.03  # guess: of the largest value, between a fused module and its stock form in bf16 and fp16


@torch.inference_mode()
def check_head(head: MtpHead, target: Target, layers: tuple[LayerSpec, ...], fused: bool) -> None:
    """Raises `UnsupportedModel` where the target's logits are not those of its final norm and head, or a
    module over pages differs from its layer's eager attention.

    With `fused`, modules are replaced by fused ones. Changes which taps the target captures.
    """
    device, n, last = target.device, TRIAL, len(target.layers) - 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (n,), generator=generator).to(device)
    rows = torch.arange(n, device=device)
    store = PageStore((*target.layers, *layers), 1, n, device)
    target.capture((last,))
    batch = Batch([], ids[None], rows[None], rows)
    out = target.forward(batch, target.view_of_new(store, SpanView(0, n, slice(0, n), n)))
    assert out.taps is not None
    states, limit = head.final_norm(out.taps[last]), TOLERANCE.get(target.dtype, LOOSE)
    if not (off := relative(target.head(states).float()[:, : target.vocab_size], out.logits)) <= limit:
        raise UnsupportedModel(
            f"{target.name}: its logits differ from head(norm(states)) by {off:.2g}, so MTP cannot read them"
        )
    view = store.view_of([SpanView(0, n - 1, slice(1, n), n - 1)], len(target.layers) + 1)
    for number, module in enumerate(head.modules):
        where = f"{target.name}: MTP module {number}"
        run = partial(head.run, number, ids[1:], states[:-1], rows[:-1], view)
        try:
            paged = run()
            eager = eager_run(head, module, ids[1:], states[:-1], rows[:-1], layers[1 + number].window)
        except UNKNOWN as error:
            raise UnsupportedModel(f"{where} cannot run: {error}") from error
        if not (off := relative(paged, eager)) <= limit:
            raise UnsupportedModel(f"{where} over pages differs from its eager attention by {off:.2g}")
        for form in fused_forms(module, number, layers[1 + number]) if fused else ():
            head.modules[number] = form
            if agrees(run, paged, TOLERANCE.get(target.dtype, ROUNDING)):
                break
            head.modules[number] = module


def eager_run(
    head: MtpHead, module: Module, ids: Tensor, states: Tensor, positions: Tensor, window: int | None
) -> Tensor:
    """The module over consecutive rows with transformers' own attention."""
    ages = positions[:, None] - positions[None]
    hidden = (ages < 0) | (ages >= (window or len(ids)))
    mask = torch.zeros(hidden.shape, device=ids.device, dtype=states.dtype)
    mask = mask.masked_fill(hidden, torch.finfo(states.dtype).min)[None, None]
    set_attention(module, "eager")
    try:
        return module(ids, states, head.rotary(states[None], positions[None]), positions, mask)
    finally:
        set_attention(module, attention.NAME)


def set_attention(module: Module, name: str) -> None:
    """Switches the attention function of the module's layer."""
    for part in module.layer.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = name  # type: ignore[union-attr]


def fused_forms(module: Module, number: int, spec: LayerSpec) -> Iterator[Module]:
    """A module with fused norms and layer, then with fused norms alone. Does not modify it."""
    embed_norm, state_norm, norm = map(fused_norm, (module.embed_norm, module.state_norm, module.norm))
    with_norms = replace(module, embed_norm=embed_norm, state_norm=state_norm, norm=norm)
    try:
        layer = FusedLayer(block_of(module.layer, number, spec.heads, spec.k_dim, share=False))
        yield replace(with_norms, layer=layer)
    except (CannotReplace, *UNKNOWN):
        pass  # latent attention has its own code
    yield with_norms


def agrees(run: Callable[[], Tensor], expected: Tensor, limit: float) -> bool:
    """Whether a fused form runs, with the same result."""
    try:
        return relative(run(), expected) <= limit
    except UNKNOWN:
        return False


def fused_norm(stock: nn.Module) -> nn.Module:
    try:
        return Fused(norm_of(stock))
    except CannotReplace:
        return stock


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
