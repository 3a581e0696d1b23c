"""The transaction of a step: pages and state slots are reserved, then committed or given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType

import torch
from torch import Tensor

from speculon.core.types import Reason
from speculon.decoding.sequence import Sequence, Span, share_rows
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_slots import DraftSlots
from speculon.runtimes.torch.kv.states import StateSpan, StateStep, StateStore
from speculon.runtimes.torch.kv.store import PageStore, View, end_to_end, tail_of


class Lease:
    """The claim of one step. Leaving the `with` block gives back all pages beyond what is committed.

    Without `commit` that restores every sequence.
    """

    def __init__(self, leases: Leases, spans: list[Span]):
        self.repair_ms = 0.0  # what the commit took to restore recurrent states after rejected drafts
        self._of, self._pool, self._spans = leases, leases.pool, spans
        self._step: StateStep | None = None

    def view(self, batch: Batch) -> View:
        """Where each row of the batch is written, and what each span reads."""
        self._spans = batch.spans  # in the order of its rows, in which states are rolled back
        view = self._of.store.view(batch.spans)
        if self._of.states is not None:
            view.states = self._step = StateStep(self._of.states, [self._state_span(s) for s in batch.spans])
        return view

    def _state_span(self, span: Span) -> StateSpan:
        slots, drafted = self._pool.slots, bool(span.draft.tokens)
        held, cut = slots.of(span.seq), None if drafted else slots.cut(span.seq, span.end)
        return StateSpan(
            span.row,
            span.row + span.rows,
            held.committed,
            held.next,
            fresh=not span.start,
            drafted=drafted,
            cut=cut and (cut[0] - span.start, cut[1]),
        )

    def of(self, first_layer: int, method: str = "") -> DraftLease:
        """The same claim as the drafter of a method sees it whose layers begin at `first_layer`."""
        store = self._of.draft_states.get(method)
        states = None if store is None else DraftStates(self._pool.draft_slots[method], store)
        return DraftLease(self._of.store, first_layer, states)

    def commit(self) -> None:
        """Keeps the K and V of each span and of its accepted drafts, and appends the verdict's tokens."""
        ends = [s.start + s.length + min(s.verdict.accepted, len(s.verdict.tokens)) for s in self._spans]
        self._commit_states(ends)
        self._commit_paths()
        for span, end in zip(self._spans, ends, strict=True):
            seq = span.seq
            assert span.verdict.accepted <= len(span.draft.tokens)
            seq.committed = end
            seq.tokens.extend(span.verdict.tokens)
            seq.prompt_scored = max(
                seq.prompt_scored, min(span.start + span.length, seq.request.prompt_len - 1)
            )
            self._pool.seal(seq)

    def _commit_paths(self) -> None:
        """Moves what the accepted drafts of trees have in pages to their positions, and these drafts to the
        front: from then on a tree begins with them.
        """
        store, slots, to = self._of.store, list[int](), list[int]()
        for span in self._spans:
            if (path := span.verdict.path) is None:
                continue
            first = span.start + span.length
            for place, node in enumerate(path[: span.verdict.accepted]):
                if node != place:
                    slots.append(store.slot_of(span.seq, first + node))
                    to.append(store.slot_of(span.seq, first + place))
            others = (node for node in range(len(span.draft.tokens)) if node not in path)
            span.draft, span.verdict = span.draft.in_order([*path, *others]), replace(span.verdict, path=None)
        if slots:
            store.move(slots, to)

    def _commit_states(self, ends: list[int]) -> None:
        """Restores the states of partly accepted spans, then exchanges the slots of all."""
        if self._step is None:
            return
        began = perf_counter()
        rows = [end - span.start for span, end in zip(self._spans, ends, strict=True)]
        for i, span in enumerate(self._spans):
            if span.verdict.finish and ends[i] % self._pool.block_size:  # nobody reads its state again
                rows[i] = span.rows
        if self._step.roll_back(rows):
            self.repair_ms = (perf_counter() - began) * 1e3
        for span, end in zip(self._spans, ends, strict=True):
            self._pool.slots.commit(span.seq, end)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The rollback: drafters' counts and pages end at what is committed, after a commit or without."""
        for seq in (span.seq for span in self._spans):
            seq.drafted = {method: min(done, seq.committed) for method, done in seq.drafted.items()}
            for slots in self._pool.draft_slots.values():
                slots.roll_back(seq)
            self._pool.trim(seq)


@dataclass(frozen=True, slots=True)
class DraftStates:
    """The recurrent states of a draft model: who owns which slot, and their bytes."""

    slots: DraftSlots
    store: StateStore

    def begin(self, pieces: list[tuple[Sequence, int, int]]) -> StateStep:
        """What a forward over one flat row of (sequence, start, end) pieces reads and writes."""
        spans, row = [], 0
        for seq, start, end in pieces:
            rows, (read, write) = end - start, self.slots.begin(seq, start, end)
            spans.append(StateSpan(row, row + rows, read, write, fresh=not start))
            row += rows
        return StateStep(self.store, spans)


@dataclass(frozen=True, slots=True)
class DraftLease:
    """A drafter's share of the step's claim: the leased pages, in its own layers."""

    store: PageStore
    first_layer: int
    states: DraftStates | None = None  # of a recurrent draft model

    def view(self, pieces: list[tuple[Sequence, int, int]], first: int = 0) -> View:
        """For one flat row of (sequence, start, end) pieces, positions end to end; nobody sees positions
        below `first`, nor `first` ones after those that are released: the drafter may not have read them.
        """
        parts = []
        for seq, start, end in pieces:
            hidden = seq.released + first
            where, context = self.store.where_of(seq, end), end - hidden
            parts.append((end - start, tail_of(where, context), context, hidden))
        view = self.store.view_of(end_to_end(parts), self.first_layer)
        if self.states is not None:
            view.states = self.states.begin(pieces)
        return view

    def view_of_nodes(self, nodes: list[tuple[Sequence, tuple[int, ...]]], first: int = 0) -> View:
        """For one flat row of nodes of trees, one row each: (sequence, the places behind its last token of
        the node's ancestors, and of itself). `first` as in `view`.
        """
        parts = []
        for seq, places in nodes:
            hidden, length = seq.released + first, len(seq.tokens)
            where, context = self.store.path_of(seq, length, [*places]), length + len(places) - hidden
            parts.append((1, tail_of(where, context), context, hidden))
        return self.store.view_of(end_to_end(parts), self.first_layer)

    def done(self, pieces: list[tuple[Sequence, int, int]], ids: list[list[int]]) -> None:
        """The forward over the pieces of the last view has run, with these tokens."""
        if self.states is not None:
            for (seq, _, _), tokens in zip(pieces, ids, strict=True):
                self.states.slots.done(seq, tokens)

    def after(self, layers: int) -> DraftLease:
        """The same without its first `layers`."""
        return DraftLease(self.store, self.first_layer + layers)

    def taps(self, pieces: list[tuple[Sequence, int, int]]) -> Tensor:  # [T, n * D]
        """What its first layer holds of the target's states at these positions."""
        states = self.store.k[self.first_layer].flatten(1)
        taps = [states[tail_of(self.store.where_of(seq, end), end - start)] for seq, start, end in pieces]
        return taps[0] if len(taps) == 1 else torch.cat(taps)


class Leases:
    def __init__(
        self,
        pool: BlockPool,
        store: PageStore,
        draft_rows: int,
        states: StateStore | None = None,
        draft_states: Mapping[str, StateStore] | None = None,
    ):
        self.pool, self.store, self._draft_rows, self.states = pool, store, draft_rows, states
        self.draft_states = draft_states or {}

    def reserve(self, spans: list[Span]) -> Lease:
        """Takes the pages of the spans, all or none, then those of the drafts that are decided for them.

        What is `reserved` is within the rows of the memory estimate, and a draft position never takes a page
        from a sequence: without free pages it shrinks, to zero with reason `no_pages`.
        """
        pool, decoding = self.pool, [span for span in spans if span.decodes]
        needed = sum(pool.missing(span.seq, span.start + span.length) for span in spans)
        assert needed <= pool.available, (needed, pool.available)
        lease = Lease(self, spans)
        for span in spans:
            pool.slots.claim(span.seq)
            pool.extend(span.seq, span.start + span.length)
        share_rows(decoding, self._draft_rows)
        for span in decoding:
            spare = (len(span.seq.table) + pool.available) * pool.block_size - span.start - span.length
            if span.reserved > spare:
                span.reserved = spare
                span.reason = None if spare else Reason.NO_PAGES
            pool.extend(span.seq, span.start + span.length + span.reserved)
        return lease
