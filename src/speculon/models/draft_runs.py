"""The networks of drafters as they run: as CUDA graphs or compiled programs where `compile` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig

from speculon.core import LayerSpec
from speculon.models.block import CannotReplace
from speculon.models.captured import RECORDERS
from speculon.models.captured_drafts import Forward, captured_blocks, captured_head, draft_capture_bytes
from speculon.models.dflash import DFlashModel
from speculon.models.eagle import EagleHead
from speculon.models.fusion import Fusion
from speculon.models.target import Target


def run_of_head(
    head: EagleHead, layers: tuple[LayerSpec, ...], target: Target, compile: bool
) -> tuple[Forward, Fusion]:
    """The head as it runs; `layers` are those of its attention in the pages."""

    def compiled() -> Forward:
        from speculon.models.compiled_drafts import compiled_head  # imports the compiler

        return compiled_head(head, layers, target)

    captured = partial(captured_head, head, layers, target)
    return chosen(head, len(head.blocks), target, compile, captured, compiled)


def run_of_blocks(
    model: DFlashModel, layers: tuple[LayerSpec, ...], target: Target, compile: bool
) -> tuple[Forward, Fusion]:
    """The same for a block drafter."""

    def compiled() -> Forward:
        from speculon.models.compiled_drafts import compiled_blocks

        return compiled_blocks(model, layers, target)

    captured = partial(captured_blocks, model, layers, target)
    return chosen(model, len(model.layers), target, compile, captured, compiled)


def chosen(
    network: Forward,
    layers: int,
    target: Target,
    compile: bool,
    captured: Callable[[], Forward],
    compiled: Callable[[], Forward],
) -> tuple[Forward, Fusion]:
    """The faster form where that is asked for, possible and equal on every step; else the network."""
    fusion, with_graphs = Fusion(layers, layers, one_loop=True), target.device.type in RECORDERS
    if not compile:
        return network, fusion
    try:
        made = captured() if with_graphs else compiled()
    except CannotReplace as reason:
        fusion.refused[str(reason)] += 1
        return network, fusion
    fusion.captured, fusion.compiled = with_graphs, not with_graphs
    return made, fusion


def run_bytes(
    sizes: LlamaConfig, layers: int, weights: int, dtype: torch.dtype, device: torch.device, more: int = 0
) -> int:
    """Memory that `compile` takes in addition to so many bytes of weights; see `draft_capture_bytes`."""
    if device.type in RECORDERS:
        return draft_capture_bytes(sizes, layers, dtype, more)
    from speculon.models.compiled import draft_bytes  # imports the compiler

    return draft_bytes(weights, dtype, device)
