"""Who runs in a step: decoding sequences first, then prompt chunks, then whoever waits. Integers only."""

from __future__ import annotations

from collections import deque

from speculon.core import NO_DRAFT, Draft, Finish, Load, Verdict
from speculon.kv.blocks import BlockPool
from speculon.sequence import Event, Plan, Sequence, Span

Ended = list[tuple[Sequence, Finish]]


class Scheduler:
    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int):
        self.pool, self.max_num_seqs, self.max_batch_tokens = pool, max_num_seqs, max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # first sample -> those that start from its prompt's pages
        self._siblings: dict[int, list[Sequence]] = {}

    @property
    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), self.pool.available)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, samples: list[Sequence]) -> None:
        """Queues the first of a request's samples; the others follow once its prompt is in pages."""
        first, *others = samples
        self.waiting.append(first)
        if others:
            self._siblings[first.id] = others

    def plan(self) -> Plan:
        """Spans within `max_batch_tokens` rows whose pages are there, counted but not taken.

        When pages run out the youngest running sequence gives all of its own back and waits to be computed
        again. The oldest always runs: admission has checked that it fits alone.
        """
        spans: list[Span] = []
        reserved, budget = 0, self.max_batch_tokens
        order = deque(sorted(self.running, key=lambda seq: seq.pending > 1))
        while order and budget:
            seq = order.popleft()
            span = Span(seq, seq.committed, self.pool.chunk(seq, budget))
            missing = self.pool.missing(seq, span.end)
            while missing > self.pool.available - reserved:
                victim = order.pop() if order else seq
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                reserved += missing
                budget -= span.length
                spans.append(span)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            found = self.pool.attach(seq)
            missing = self.pool.most(len(seq.tokens), self.max_batch_tokens) - self.pool.held(seq)
            if missing > self.pool.available - reserved:
                self.pool.release(seq)
                break
            if not seq.stats.preemptions:  # what it finds when it comes back was its own
                seq.stats.cached_tokens = found
            self.running.append(self.waiting.popleft())
            span = Span(seq, seq.committed, self.pool.chunk(seq, budget))
            reserved += missing
            budget -= span.length
            spans.append(span)
        return Plan(spans)

    def settle(self, spans: list[Span], verdicts: list[Verdict]) -> tuple[list[Event], Ended]:
        """Frees what has ended and lets siblings in; returns the events, and which sequences ended how."""
        events: list[Event] = []
        ended: Ended = []
        for span, verdict in zip(spans, verdicts, strict=True):
            seq = span.seq
            if verdict.tokens or verdict.finish or verdict.prompt_logprobs:
                events.append(output_of(seq, verdict, span.draft))
            if seq.committed >= seq.request.prompt_len:
                self.waiting.extendleft(reversed(self._siblings.pop(seq.id, ())))
            if verdict.finish:
                self._remove(seq)
                ended.append((seq, verdict.finish))
        return events, ended

    def abort(self, request_id: str) -> tuple[list[Event], Ended]:
        """Ends every sample of a request now; unknown ids are ignored."""
        everyone = [*self.running, *self.waiting, *(s for group in self._siblings.values() for s in group)]
        aborted = [seq for seq in everyone if seq.request.id == request_id]
        for seq in aborted:
            self._siblings.pop(seq.id, None)
            self._remove(seq)
        finish = Finish("abort")
        return [output_of(seq, Verdict((), finish=finish)) for seq in aborted], [
            (seq, finish) for seq in aborted
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the pool is exactly what the running sequences hold."""
        for seq in self.waiting:
            assert not seq.table, f"sequence {seq.id} waits and holds pages"
        self.pool.check_integrity(self.running)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.stats.preemptions += 1
        self.waiting.appendleft(seq)

    def _remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.pool.release(seq)


def output_of(seq: Sequence, verdict: Verdict, draft: Draft = NO_DRAFT) -> Event:
    return Event(
        seq.request.id,
        seq.sample,
        verdict.tokens,
        verdict.logprobs,
        verdict.finish,
        verdict.prompt_logprobs,
        stats=seq.stats if verdict.finish else None,
        sources=draft.sources[: verdict.accepted],
        drafted=len(draft.tokens),
    )
