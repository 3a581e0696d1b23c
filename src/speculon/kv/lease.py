"""The transaction of a step: pages are reserved, then committed, or given back without trace."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType

from speculon.batch import Batch
from speculon.core import Decision, Plan, Reason, Span, Verdict
from speculon.kv.blocks import BlockPool
from speculon.kv.store import PageStore, View


class Lease:
    """The claim of one step. Leaving the `with` block without `commit` restores every sequence."""

    def __init__(self, pool: BlockPool, store: PageStore, spans: list[Span], decisions: list[Decision]):
        self.decisions = decisions  # as granted: K shrinks where pages are short
        self._pool, self._store, self._spans = pool, store, spans

    def view(self, batch: Batch) -> View:
        """Where each row of the batch is written, and what each span reads."""
        return self._store.view(batch.spans)

    def commit(self, verdicts: list[Verdict]) -> None:
        """Keeps the K and V of each span and of its accepted drafts, and appends the verdict's tokens."""
        for span, verdict in zip(self._spans, verdicts, strict=True):
            seq = span.seq
            assert verdict.accepted <= len(span.draft.tokens)
            seq.committed = span.start + span.length + min(verdict.accepted, len(verdict.tokens))
            seq.tokens.extend(verdict.tokens)
            seq.prompt_scored = max(seq.prompt_scored, min(span.start + span.length, seq.prompt_len - 1))
            self._pool.seal(seq)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for span in self._spans:
            self._pool.trim(span.seq)


class Leases:
    def __init__(self, pool: BlockPool, store: PageStore):
        self._pool, self._store = pool, store

    def reserve(self, plan: Plan, decisions: list[Decision]) -> Lease:
        """Takes the pages of the plan, all or none, then those of the drafts as far as they go.

        A draft position never takes a page from a sequence: without free pages K shrinks, to zero with `no_pages`.
        """
        pool = self._pool
        needed = sum(pool.missing(span.seq, span.start + span.length) for span in plan.spans)
        assert needed <= pool.available, (needed, pool.available)
        lease = Lease(pool, self._store, plan.spans, list(decisions))
        for span in plan.spans:
            pool.extend(span.seq, span.start + span.length)
        for i, (span, decision) in enumerate(zip(plan.decoding, decisions, strict=True)):
            end = span.start + span.length
            spare = (len(span.seq.table) + pool.available) * pool.block_size - end
            if spare < decision.k:
                lease.decisions[i] = replace(decision, k=spare) if spare else Decision(None, 0, Reason.NO_PAGES)
            pool.extend(span.seq, end + lease.decisions[i].k)
        return lease
