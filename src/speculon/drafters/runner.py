"""What a drafter's network needs, and how it runs: as CUDA graphs or programs where `compile` asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from speculon.core.types import LayerSpec, Needs
from speculon.drafters.captured import captured_draft
from speculon.drafters.compiled import compiled_draft
from speculon.drafters.config import DrafterConfig
from speculon.drafters.layers import Network, rope_config, weight_bytes
from speculon.target.block import CannotReplace
from speculon.target.captured import RECORDERS
from speculon.target.footprint import CaptureSizes, program_bytes, scratch_bytes
from speculon.target.target import Runner, Target


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

    `spans` are the windows of its layers over pages; for `more` see `CaptureSizes.of_drafter`.
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
        fixed += CaptureSizes.of_drafter(sizes, config.layers, more).num_bytes(dtype)
    elif compile:
        fixed += program_bytes(fixed, dtype, device, drafter=True)
    return Needs(
        taps=taps,
        layers=tuple(layers),
        max_context=config.max_context,
        max_drafts=max_drafts,
        bytes_fixed=fixed,
        bytes_scratch=scratch_bytes(sizes, dtype, device, rows, scored) + 2 * rows * width * dtype.itemsize,
    )


def run_of(network: Network, layers: tuple[LayerSpec, ...], target: Target, compile: bool) -> Runner:
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
