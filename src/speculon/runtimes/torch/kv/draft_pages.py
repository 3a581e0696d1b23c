"""A drafter's view of the target's pages: its own layers in them, and how far it has read each sequence."""

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
    """The layers of one drafter in the target's pages, from `first_layer` of the store on.

    A step reserves pages for the drafts that it grants, and the drafter takes them when it writes there.
    """

    pool: BlockPool
    store: PageStore
    method: str
    first_layer: int
    states: DraftStates | None = None  # of a recurrent draft model

    def begin(self, seq: Sequence, first: int = 0) -> int:
        """The position that the drafter reads next. It cannot read positions below `first`, or positions
        whose pages were released.
        """
        pages = self.of(seq)
        return max(pages.drafted.get(self.method, 0), pages.released + first)

    def unread(self, seq: Sequence) -> int:
        """The number of tokens that it has not read yet, without the last one."""
        return len(seq.tokens) - self.begin(seq) - 1

    def catch_up(
        self, seqs: list[Sequence], max_rows: int, read: Callable[[list[TokenRange]], object], first: int = 0
    ) -> list[TokenRange]:
        """Reads the tokens that the drafter has not read yet, in calls of `read` with at most `max_rows`
        rows, until one more call can take the rest.

        Returns the ranges of this last call, which contain the last token of each sequence. Positions below
        `first`, and positions whose pages were released, are never read.
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
        """Notes that the drafter has read these ranges."""
        for seq, _, end in ranges:
            pages = self.of(seq)
            if 0 < pages.released >= pages.drafted.get(self.method, 0):
                pages.skipped.add(self.method)
            pages.drafted[self.method] = end

    def of(self, seq: Sequence) -> Pages:
        """The pages that a sequence has now."""
        return self.pool.of(seq)

    def up_to(self, seq: Sequence, end: int) -> Pages:
        """The pages of a sequence, extended to all positions below `end`."""
        self.pool.extend(seq, end)
        return self.of(seq)

    def view(self, ranges: list[TokenRange], first: int = 0) -> View:
        """The view for one forward over these ranges, laid out end to end. Positions below `first` are
        hidden, and so are `first` positions after the released ones, because the drafter may not have read
        them.
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
        """The view for one forward over nodes of trees, one row per node. A node is its sequence and the
        places, after the sequence's last token, of its ancestors and of itself. `first` as in `view`.
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
        """Tells that the forward over the ranges of the latest view has run, with these token ids."""
        if self.states is not None:
            for (seq, _, _), tokens in zip(ranges, ids, strict=True):
                self.states.slots.done(seq, tokens)

    def after(self, layers: int) -> DraftPages:
        """The same pages without the first `layers` layers."""
        return replace(self, first_layer=self.first_layer + layers, states=None)

    def taps(self, ranges: list[TokenRange]) -> Tensor:  # [T, n * D]
        """The target's states at these positions, which the first layer holds, [T, n * D]."""
        states = self.store.k[self.first_layer].flatten(1)
        at = [(self.store.where_of(self.of(seq), end), end - start) for seq, start, end in ranges]
        taps = [states[tail_of(where, rows)] for where, rows in at]
        return taps[0] if len(taps) == 1 else torch.cat(taps)
