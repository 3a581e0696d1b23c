"""How a drafter's network runs: as it is, or as CUDA graphs between attentions.

Where `compile` asks for it, the forwards that draft are captured, as those of the target's loop are. What
reads committed states, and what makes logits of states, runs as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from speculon.runtimes.torch.budget import scratch_bytes
from speculon.runtimes.torch.drafters.config import DrafterConfig
from speculon.runtimes.torch.drafters.layers import Network, rope_config, weight_bytes
from speculon.runtimes.torch.kv.store import PageStore, View, end_to_end
from speculon.runtimes.torch.model.block import CannotReplace, RotaryTables
from speculon.runtimes.torch.model.captured import (
    BUCKETS,
    RECORDERS,
    CapturedPieces,
    CaptureSizes,
    Lengths,
    Recorder,
    copied,
    of_buckets,
)
from speculon.runtimes.torch.model.compare import alike
from speculon.runtimes.torch.model.target import Runner, Target
from speculon.runtimes.torch.model.trial import TrialStep, compare_steps, refused
from speculon.runtimes.torch.needs import LayerSpec, Needs

SEEN = 5  # positions of a trial's sequence before its rows


def estimate_needs(
    config: DrafterConfig,
    taps: tuple[int, ...],
    target: Target,
    rows: int,
    scored: int,
    compile: bool,
    more: int = 0,
    numbers: int = 2,
) -> Needs:
    """The needs of a network that is not loaded; T = `rows` and R = `scored` in its largest forward.

    For `more` and `numbers` see `CaptureSizes.of_drafter`.
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
        fixed += CaptureSizes.of_drafter(sizes, config.layers, more, numbers).num_bytes(dtype)
    return Needs(
        taps=taps,
        layers=tuple(layers),
        max_context=config.max_context,
        max_drafts=config.max_drafts,
        bytes_fixed=fixed,
        bytes_scratch=scratch_bytes(sizes, dtype, device, rows, scored) + 2 * rows * width * dtype.itemsize,
    )


def choose_run(network: Network, layers: tuple[LayerSpec, ...], target: Target, compile: bool) -> Runner:
    """Captured where that is asked for, possible and equal on every step; else the network itself.

    `layers` are those of its attention in the pages.
    """
    count = len(network.layers)
    runner = Runner(network.forward, count, count, "loop")
    if not compile:
        return runner
    try:
        if target.device.type not in RECORDERS:
            raise CannotReplace("not compiled: on a CPU the network of a drafter runs as it is")
        runner.run = captured_draft(network, layers, target)
        runner.form = "captured"
    except CannotReplace as reason:
        runner.refused[str(reason)] += 1
    return runner


# CUDA graphs between attentions


class CapturedDraft(CapturedPieces):
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

    def start(self, rows: int) -> tuple[Tensor, RotaryTables]:
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
    """What a network reads at ids and positions [T]: random states, or each row's number in its block."""
    if not network.reads_states:
        return ids, positions, positions - SEEN
    states = torch.randn(len(ids), network.config.hidden).to(network.norm.weight)
    return ids, states, positions


def draft_steps(
    network: Network, layers: tuple[LayerSpec, ...], target: Target, all_lengths: Iterable[Lengths]
) -> Iterator[TrialStep]:
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
