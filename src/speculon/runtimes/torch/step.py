"""The transaction of a step: pages and state slots are claimed, then committed or given back."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from speculon.core.types import Reason
from speculon.decoding.rounds import Drafted, Grant, Judged, Span, grants
from speculon.runtimes.base import Output
from speculon.runtimes.torch.batch import Batch, PlacedSpan
from speculon.runtimes.torch.kv.states import StateSpan, StateStep

if TYPE_CHECKING:
    from speculon.runtimes.torch.kv.store import View
    from speculon.runtimes.torch.runtime import TorchRuntime


class TorchStep:
    """The claim of one step. Leaving the `with` block gives back all pages beyond what is committed.

    Without `commit` that restores every sequence. Pages of drafts are promised by `grants`, and taken by who
    writes them: most are never needed.
    """

    def __init__(self, runtime: TorchRuntime, spans: list[Span]):
        self._runtime, self._space, self._spans = runtime, runtime.space, spans
        self._placed: list[PlacedSpan] = []
        self._states: StateStep | None = None
        needed = sum(self._space.missing(span.seq, span.end) for span in spans)
        assert needed <= self._space.available, (needed, self._space.available)
        for span in spans:
            self._space.slots.claim(span.seq)
            self._space.extend(span.seq, span.end)
        self.grants = self._granted()

    def _granted(self) -> list[Grant]:
        """Drafts within the rows of the memory estimate. Where pages are few, the longest shrink to a common
        limit, but what a sequence's own pages still hold it may use.
        """
        space, spans = self._space, self._spans
        within_rows = grants([span.most_drafts for span in spans], self._runtime.draft_rows)
        ends = [(span.seq, span.end, grant.drafts) for span, grant in zip(spans, within_rows, strict=True)]
        limit = max((k for _, _, k in ends), default=0)
        while limit and space.available < sum(
            space.missing(seq, end + min(k, limit)) for seq, end, k in ends
        ):
            limit -= 1
        granted = list[Grant]()
        for (seq, end, k), grant in zip(ends, within_rows, strict=True):
            drafts = min(k, max(limit, len(space.of(seq).table) * space.block_size - end))
            granted.append(Grant(drafts, Reason.NO_PAGES if k and not drafts else grant.reason))
        return granted

    def forward(self, drafted: list[Drafted]) -> Output:
        """As `Step` says; the states that drafters read go to their pages."""
        for one in drafted:
            self._space.extend(one.seq, one.end)
        batch = Batch.pack(drafted, self._runtime.device)
        self._placed, view = batch.placed, self._view(batch.placed)
        result = self._runtime.target.forward(batch, view)
        if result.taps is not None:
            self._runtime.keep(result.taps, view)
        return Output(result.logits, batch.scored, result.ms)

    def _view(self, placed: list[PlacedSpan]) -> View:
        """Where each row of the batch is written, and what each span reads."""
        view = self._runtime.store.view(placed, self._space.of)
        if self._runtime.states is not None:
            spans = [self._state_span(place) for place in placed]
            view.states = self._states = StateStep(self._runtime.states, spans)
        return view

    def _state_span(self, place: PlacedSpan) -> StateSpan:
        slots, span, end = self._space.slots, place.drafted.span, place.drafted.end
        drafted = bool(place.drafted.draft.tokens)
        held, cut = slots.of(span.seq), None if drafted else slots.split_point(span.seq, end)
        return StateSpan(
            place.row,
            place.last,
            held.committed,
            held.next,
            fresh=not span.start,
            drafted=drafted,
            cut=cut and (cut[0] - span.start, cut[1]),
        )

    def commit(self, judged: list[Judged]) -> float:
        """Keeps the K and V, and the states, of each span and of its accepted drafts."""
        assert all(one.verdict.accepted <= len(one.draft.tokens) for one in judged)
        ms = self._commit_states(judged)
        self._commit_paths(judged)
        return ms

    def _commit_paths(self, judged: list[Judged]) -> None:
        """Moves what the accepted drafts of trees have in pages to their positions."""
        store, slots, to = self._runtime.store, list[int](), list[int]()
        for one in judged:
            if (path := one.verdict.path) is None:
                continue
            pages, first = self._space.of(one.seq), one.span.end
            for place, node in enumerate(path[: one.verdict.accepted]):
                if node != place:
                    slots.append(store.slot_of(pages, first + node))
                    to.append(store.slot_of(pages, first + place))
        if slots:
            store.move(slots, to)

    def _commit_states(self, judged: list[Judged]) -> float:
        """Restores the states of partly accepted spans, then exchanges the slots of all; returns the ms of
        the former.
        """
        if self._states is None:
            return 0.0
        began, kept = perf_counter(), dict[int, int]()  # rows by sequence
        for one in judged:
            last = one.verdict.finish and one.end % self._space.block_size  # nobody reads its state again
            kept[one.seq.id] = one.drafted.rows if last else one.end - one.span.start
        restored = self._states.roll_back([kept[place.drafted.seq.id] for place in self._placed])
        ms = (perf_counter() - began) * 1e3 if restored else 0.0
        for one in judged:
            self._space.slots.commit(one.seq, one.end)
        return ms

    def __enter__(self) -> TorchStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The rollback: drafters' counts and pages end at what is committed, after a commit or without."""
        for seq in (span.seq for span in self._spans):
            self._space.cut_to_committed(seq)
