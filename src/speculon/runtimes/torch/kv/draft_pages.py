"""The target's pages as one drafter sees them: its own layers there, and how far it has read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_slots import DraftSlots
from speculon.runtimes.torch.kv.pages import Pages
from speculon.runtimes.torch.kv.states import StateSpan, StateStep, StateStore
from speculon.runtimes.torch.kv.store import PageStore, View, end_to_end, tail_of

TokenRange = tuple[Sequence, int, int]  # positions of a sequence, from one up to another


@dataclass(frozen=True, slots=True)
class DraftStates:
    """The recurrent states of a draft model: who owns which slot, and their bytes."""

    slots: DraftSlots
    store: StateStore

    def begin(self, ranges: list[TokenRange]) -> StateStep:
        """What a forward over one flat row of ranges reads and writes."""
        spans, row = [], 0
        for seq, start, end in ranges:
            rows, (read, write) = end - start, self.slots.begin(seq, start, end)
            spans.append(StateSpan(row, row + rows, read, write, fresh=not start))
            row += rows
        return StateStep(self.store, spans)


@dataclass(frozen=True, slots=True)
class DraftPages:
    """The layers of a method's drafter in the target's pages, from `first_layer` of the store on.

    A step promises pages for as many drafts as it grants; the drafter takes them when it gets there.
    """

    pool: BlockPool
    store: PageStore
    method: str
    first_layer: int
    states: DraftStates | None = None  # of a recurrent draft model

    def begin(self, seq: Sequence, first: int = 0) -> int:
        """Where the drafter reads next; positions below `first`, and those released, it cannot read."""
        pages = self.of(seq)
        return max(pages.drafted.get(self.method, 0), pages.released + first)

    def unread(self, seq: Sequence) -> int:
        """Tokens that it has not read yet, without the last one."""
        return len(seq.tokens) - self.begin(seq) - 1

    def catch_up(
        self, seqs: list[Sequence], max_rows: int, read: Callable[[list[TokenRange]], object], first: int = 0
    ) -> list[TokenRange]:
        """Reads what the drafter has not seen, in calls of at most `max_rows` rows, until one more call can
        take the rest.

        Returns that rest, which holds each sequence's last token; positions below `first` are never read, nor
        those whose pages are released.
        """
        while True:
            rest = [(seq, self.begin(seq, first), len(seq.tokens)) for seq in seqs]
            room, ranges = max_rows, []
            if sum(end - start for _, start, end in rest) <= max_rows:
                return rest
            for seq, start, end in rest:
                stop = min(end - 1, start + room)  # the last token is for the call that is scored
                ranges += [(seq, start, stop)] * (stop > start)
                room -= max(0, stop - start)
            if not ranges:
                return rest
            read(ranges)

    def mark(self, ranges: list[TokenRange]) -> None:
        """Notes how far the drafter has read now."""
        for seq, _, end in ranges:
            pages = self.of(seq)
            if 0 < pages.released >= pages.drafted.get(self.method, 0):
                pages.skipped.add(self.method)
            pages.drafted[self.method] = end

    def of(self, seq: Sequence) -> Pages:
        """The pages that a sequence has now."""
        return self.pool.of(seq)

    def up_to(self, seq: Sequence, end: int) -> Pages:
        """The same with those of all positions below `end`."""
        self.pool.extend(seq, end)
        return self.of(seq)

    def view(self, ranges: list[TokenRange], first: int = 0) -> View:
        """For one flat row of ranges, positions end to end; nobody sees positions below `first`, nor `first`
        ones after those that are released: the drafter may not have read them.
        """
        parts = []
        for seq, start, end in ranges:
            pages = self.up_to(seq, end)
            hidden = pages.released + first
            where, context = self.store.where_of(pages, end), end - hidden
            parts.append((end - start, tail_of(where, context), context, hidden))
        view = self.store.view_of(end_to_end(parts), self.first_layer)
        if self.states is not None:
            view.states = self.states.begin(ranges)
        return view

    def view_of_nodes(self, nodes: list[tuple[Sequence, tuple[int, ...]]], first: int = 0) -> View:
        """For one flat row of nodes of trees, one row each: (sequence, the places behind its last token of
        the node's ancestors, and of itself). `first` as in `view`.
        """
        parts = []
        for seq, places in nodes:
            length = len(seq.tokens)
            pages = self.up_to(seq, length + max(places) + 1)
            hidden = pages.released + first
            where, context = self.store.path_of(pages, length, [*places]), length + len(places) - hidden
            parts.append((1, tail_of(where, context), context, hidden))
        return self.store.view_of(end_to_end(parts), self.first_layer)

    def done(self, ranges: list[TokenRange], ids: list[list[int]]) -> None:
        """The forward over the ranges of the last view has run, with these tokens."""
        if self.states is not None:
            for (seq, _, _), tokens in zip(ranges, ids, strict=True):
                self.states.slots.done(seq, tokens)

    def after(self, layers: int) -> DraftPages:
        """The same without its first `layers`."""
        return replace(self, first_layer=self.first_layer + layers, states=None)

    def taps(self, ranges: list[TokenRange]) -> Tensor:  # [T, n * D]
        """What its first layer holds of the target's states at these positions."""
        states = self.store.k[self.first_layer].flatten(1)
        at = [(self.store.where_of(self.of(seq), end), end - start) for seq, start, end in ranges]
        taps = [states[tail_of(where, rows)] for where, rows in at]
        return taps[0] if len(taps) == 1 else torch.cat(taps)
