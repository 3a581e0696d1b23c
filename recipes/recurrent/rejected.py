"""What a round with rejected drafts takes, for each way to find the states after the accepted rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.states import StateSpan, StateStep, StateStore
from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.model import recurrent
from speculon.runtimes.torch.model.target import Target

PROMPT, BLOCK = 32, 64
AGAIN = "whole model again"
# name -> rows of a span that are one call each, and bytes of states that may be kept
WAYS = {
    "kept states": (recurrent.ANY, 1 << 40),
    "replay, row by row": (recurrent.ANY, 0),
    "replay, one call": (1, 0),
    AGAIN: (recurrent.ANY, 0),
}


class Round:
    """One round of B sequences with K drafts each, which is never committed, so that it can be repeated."""

    def __init__(self, target: Target, sequences: int, drafts: int):
        self.target, self.drafts, self.sequences = target, drafts, sequences
        self.store = PageStore(target.layers, sequences, BLOCK, target.device)
        states = target.states(2 * sequences)
        assert states is not None
        self.states: StateStore = states
        self.forward(0, PROMPT, read=0, write=1)

    def forward(self, start: int, rows: int, read: int, write: int) -> StateStep:
        """Runs `rows` tokens of each sequence from position `start` on."""
        spans, parts = [], []
        for i in range(self.sequences):
            first, end = i * rows, start + rows
            spans.append(SpanView(first, first + rows, slice(i * BLOCK, i * BLOCK + end), end))
            slots = 2 * i + read, 2 * i + write
            parts.append(StateSpan(first, first + rows, *slots, fresh=not start, drafted=bool(start)))
        ids = torch.arange(self.sequences * rows)[None] * 7919 % self.target.vocab_size
        positions = torch.arange(start, start + rows).repeat(self.sequences)[None]
        view: View = self.store.view_of(spans)
        view.states = step = StateStep(self.states, parts)
        self.target.forward(Batch([], ids, positions, torch.arange(ids.shape[1])), view)
        return step

    def ms(self, accepted: int, again: bool) -> tuple[float, float]:
        """Of the verify forward, and of what follows: the states after 1 + `accepted` rows."""
        began = perf_counter()
        step = self.forward(PROMPT, 1 + self.drafts, read=1, write=0)
        verified = perf_counter()
        if again and accepted < self.drafts:
            self.forward(PROMPT, 1 + accepted, read=1, write=0)
        elif not again:
            step.roll_back([1 + accepted] * self.sequences)
        return (verified - began) * 1e3, (perf_counter() - verified) * 1e3


@contextmanager
def forced(target: Target, way: str) -> Iterator[None]:
    """Lets the mixers of a target restore in one way within the context, instead of the measured one."""
    by_row, kept = WAYS[way]
    before = [(mixer.by_row, mixer.alone) for mixer in target.mixers]
    try:
        for mixer in target.mixers:
            mixer.by_row, mixer.alone = by_row, None
        with patch.object(recurrent, "KEPT_BYTES", kept):
            yield
    finally:
        for mixer, (several, alone) in zip(target.mixers, before, strict=True):
            mixer.by_row, mixer.alone = several, alone


@torch.inference_mode()
def tables(target: Target, sequences: int, drafts: int, repeats: int) -> list[str]:
    """Lines of a table: a way per line, and a column per number of accepted drafts."""
    round_ = Round(target, sequences, drafts)
    counts = range(drafts + 1)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {(w, n): [] for w in WAYS for n in counts}
    for repeat in range(repeats + 1):
        for (way, accepted), times in found.items():
            with forced(target, way):
                time = round_.ms(accepted, way == AGAIN)
            if repeat:  # the first one warms
                times.append(time)
    columns = " | ".join(f"{n} of {drafts}" for n in counts)
    lines = [f"| way | verify | {columns} |", "|---" * (3 + drafts) + "|"]
    for way in WAYS:
        verify = median(time for n in counts for time, _ in found[way, n])
        after = [median(time for _, time in found[way, n]) for n in counts]
        lines.append(f"| {way} | {verify:.1f} | " + " | ".join(f"{time:.1f}" for time in after) + " |")
    return lines
