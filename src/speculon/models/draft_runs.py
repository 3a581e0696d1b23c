"""What a drafter's network needs, and how it runs: as CUDA graphs or programs where `compile` asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from speculon.checkpoints.drafter_config import DrafterConfig
from speculon.core import LayerSpec, Needs
from speculon.models.block import CannotReplace
from speculon.models.captured import RECORDERS
from speculon.models.captured_drafts import Forward, captured_draft, draft_capture_bytes
from speculon.models.drafter_layers import Network, rope_config, weight_bytes
from speculon.models.fusion import Fusion
from speculon.models.target import Target, scratch_bytes


def needs_of(
    config: DrafterConfig,
    taps: tuple[int, ...],
    spans: Sequence[int | None],
    target: Target,
    rows: int,
    scored: int,
    compile: bool,
    more: int = 0,
    max_drafts: int | None = None,
) -> Needs:
    """The needs of a network that is not loaded; T = `rows` and R = `scored` in its largest forward.

    `spans` are the windows of its layers over pages; for `more` see `draft_capture_bytes`.
    """
    dtype, device, width = target.dtype, target.device, config.taps * config.target_hidden
    layers = [LayerSpec("taps", 1, width, 0, dtype)]
    layers += [
        LayerSpec("attention", config.kv_heads, config.head_dim, config.head_dim, dtype, span)
        for span in spans
    ]
    sizes, fixed = rope_config(config), weight_bytes(config, dtype)
    sizes.vocab_size = target.vocab_size  # its logits cover the target's vocabulary
    if compile and device.type in RECORDERS:
        fixed += draft_capture_bytes(sizes, config.layers, dtype, more)
    elif compile:
        from speculon.models.compiled import draft_bytes  # imports the compiler

        fixed += draft_bytes(fixed, dtype, device)
    return Needs(
        taps=taps,
        layers=tuple(layers),
        max_context=config.max_context,
        max_drafts=max_drafts,
        bytes_fixed=fixed,
        bytes_scratch=scratch_bytes(sizes, dtype, device, rows, scored) + 2 * rows * width * dtype.itemsize,
    )


def run_of(
    network: Network, layers: tuple[LayerSpec, ...], target: Target, compile: bool
) -> tuple[Forward, Fusion]:
    """The faster form where that is asked for, possible and equal on every step; else the network itself.

    `layers` are those of its attention in the pages.
    """
    count, with_graphs = len(network.layers), target.device.type in RECORDERS
    fusion = Fusion(count, count, one_loop=True)
    if not compile:
        return network.forward, fusion
    try:
        if with_graphs:
            run: Forward = captured_draft(network, layers, target)
        else:
            from speculon.models.compiled_drafts import compiled_draft  # imports the compiler

            run = compiled_draft(network, layers, target)
    except CannotReplace as reason:
        fusion.refused[str(reason)] += 1
        return network.forward, fusion
    fusion.captured, fusion.compiled = with_graphs, not with_graphs
    return run, fusion
