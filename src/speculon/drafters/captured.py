"""The networks of drafters as CUDA graphs between attentions, as `Captured` is for the target's loop.

Captured are the forwards that draft. What reads committed states, and what makes logits of states, runs as
before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from speculon.core.types import LayerSpec
from speculon.decoding.kv.store import PageStore, SpanView, View
from speculon.drafters.layers import Network
from speculon.target.block import Tables
from speculon.target.captured import (
    Lengths,
    Pieces,
    Recorder,
    compared,
    copied,
    of_buckets,
    recorder,
    reported,
)
from speculon.target.footprint import BUCKETS
from speculon.target.target import Target
from speculon.target.trial import Step, alike

SEEN = 5  # positions of a trial's sequence before its rows


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
        for kept, given in zip(self.inputs, inputs, strict=True):
            kept[:rows].copy_(given)
        *_, after = self.replay(rows, view)
        return copied(after)

    def start(self, rows: int) -> tuple[Tensor, Tables]:
        return self.network.begin(*(kept[:rows] for kept in self.inputs))

    def finish(self, x: Tensor) -> Tensor:
        return self.network.end(x)


def captured_draft(network: Network, layers: tuple[LayerSpec, ...], target: Target) -> CapturedDraft:
    """The network captured; `layers` are those of its attention in the pages.

    Raises `CannotReplace` where that fails, or it differs on a step.
    """
    with torch.inference_mode(), reported():
        ids, positions = torch.zeros(2, BUCKETS[-1], dtype=torch.long, device=target.device)
        inputs = inputs_of(network, ids, positions)
        made = CapturedDraft(network, inputs, recorder(target.device))
        compared(made, network, steps_of(network, layers, target, of_buckets()), alike)
    return made


def inputs_of(network: Network, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """What a network reads at ids and positions [T]; random states where it reads such."""
    if not network.reads_states:
        return ids, positions
    states = torch.randn(len(ids), network.config.hidden).to(network.norm.weight)
    return ids, states, positions


def steps_of(
    network: Network, layers: tuple[LayerSpec, ...], target: Target, all_lengths: Iterable[Lengths]
) -> Iterator[Step]:
    """Steps of a network over sequences of so many rows; those that read states are written to pages."""
    for ids, positions, store, lengths in trials(layers, target, all_lengths):
        yield inputs_of(network, ids, positions), view_of(store, lengths, network.reads_states)


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
