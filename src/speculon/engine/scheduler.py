"""Who runs in a step: decoding sequences first, then prompts, in chunks. Integers only."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from speculon.core.types import NO_DRAFT, Draft, Finish, Load, SpanOutcome, Verdict, ceil_div
from speculon.decoding.sequence import Event, Sequence, Span
from speculon.runtimes.torch.kv.blocks import BlockPool

Ended = list[tuple[Sequence, Finish]]
ABORTED = Finish("abort")
AGE = attrgetter("id")  # ids are given in the order of arrival


@dataclass(slots=True)
class StepPlan:
    """What a step holds while it is planned."""

    pool: BlockPool
    rows: int  # that nobody has yet
    spans: list[Span] = field(default_factory=list)
    reserved: int = 0  # pages
    left: list[Sequence] = field(default_factory=list)  # running ones without a span, the first to go last

    @property
    def free(self) -> int:
        """Pages that may still be reserved."""
        return self.pool.available - self.reserved

    @property
    def max_pages(self) -> int:
        """The most pages that those without a span may take."""
        return ceil_div(self.rows, self.pool.block_size) + len(self.left) if self.left else 0

    def add(self, span: Span, pages: int) -> None:
        self.spans.append(span)
        self.rows -= span.length
        self.reserved += pages


class Scheduler:
    def __init__(self, pool: BlockPool, max_num_seqs: int, max_batch_tokens: int):
        self.pool, self.max_num_seqs, self.max_batch_tokens = pool, max_num_seqs, max_batch_tokens
        self.waiting: deque[Sequence] = deque()  # oldest first
        self.running: list[Sequence] = []
        # first sample -> those that start from its prompt's pages
        self._siblings: dict[int, list[Sequence]] = {}

    @property
    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), self.pool.available)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def begun(self) -> list[Sequence]:
        """Those that have run and have not ended: the running ones, and preempted ones."""
        return [*self.running, *(seq for seq in self.waiting if seq.stats.preemptions)]

    def add(self, samples: list[Sequence]) -> None:
        """Queues the first of a request's samples; the others follow once its prompt is in pages."""
        first, *others = samples
        self._wait(first)
        if others:
            self._siblings[first.id] = others

    def plan(self) -> list[Span]:
        """Spans within `max_batch_tokens` rows whose pages are there, counted but not taken.

        When pages run out the youngest running sequence gives all of its own back and waits to be computed
        again. The oldest always runs: admission has checked that it fits alone.
        """
        step = StepPlan(self.pool, self.max_batch_tokens)
        running = set(self.running)
        step.left = sorted(self.running, key=AGE)
        decoding = [seq for seq in step.left if seq.pending == 1]
        prompts = [seq for seq in step.left if seq.pending > 1]
        turns = [(seq, 0) for seq in decoding] + self._turns(prompts, step.rows - len(decoding))
        starts = True  # until the first in the queue lacks pages
        for seq, left_rows in turns:
            rows = step.rows - left_rows
            if rows <= 0:
                break
            if seq not in running:
                starts = starts and self._start(seq, rows, step)
            elif seq in step.left and not self._go_on(seq, rows, step):
                starts = False
        return step.spans

    def _turns(self, prompts: list[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """Prompts in the order in which they get rows, with the rows that each leaves to those after it.

        By age, but the oldest leaves half of the rows to those with fewer tokens left, shortest first. So a
        long prompt delays no short ones, and none of them keeps it from running.
        """
        places = self.max_num_seqs - len(self.running)
        waiting = islice(self.waiting, self.max_num_seqs if places else 0)
        by_age = sorted((*prompts, *waiting), key=AGE)
        if len(by_age) < 2:
            return [(seq, 0) for seq in by_age]
        oldest, *others = by_age
        started = {*prompts, oldest}
        cached = {seq: self.pool.cached(seq) for seq in by_age if seq not in prompts}
        left = {seq: seq.pending - cached.get(seq, 0) for seq in by_age}
        shorter = [
            seq
            for seq in sorted(others, key=lambda seq: (left[seq], seq.id))
            if left[seq] < left[oldest]
            and (seq in started or not any(self.pool.shares_page(seq, other) for other in started))
        ]
        shorter = self._with_room(shorter, started, rows)
        left_rows = min(rows // 2, sum(left[seq] for seq in shorter))
        if oldest.request.images.blocks:  # one of them may take all rows
            left_rows = 0
        rest = [seq for seq in others if seq not in set(shorter)]
        return [(oldest, left_rows), *((seq, 0) for seq in (*shorter, *rest))]

    def _with_room(self, seqs: list[Sequence], started: set[Sequence], rows: int) -> list[Sequence]:
        """Those of them that run, and that may start before others: these leave a place and pages to the
        first in the queue, and pages to those that run.
        """
        first = next((seq for seq in self.waiting if seq not in started), None)
        fixed = [seq for seq in (first, *started) if seq is not None and seq in self.waiting]
        places = self.max_num_seqs - len(self.running) - len(fixed)
        pages = self.pool.available - ceil_div(rows, self.pool.block_size) - len(self.running)
        pages -= sum(self._max_pages(seq) - self.pool.held(seq) for seq in {*fixed, *started})
        fitting: list[Sequence] = []
        for seq in seqs:
            if seq not in started and seq is not first:
                places, pages = places - 1, pages - self._max_pages(seq)
            if seq in started or (places >= 0 and pages >= 0):
                fitting.append(seq)
        return fitting

    def _go_on(self, seq: Sequence, rows: int, step: StepPlan) -> bool:
        """Gives a running sequence its rows and pages; returns whether nobody had to give pages back."""
        length = self.pool.chunk(seq, rows)
        if not length:
            return True
        span = Span(seq, seq.committed, length)
        missing, enough = self.pool.missing(seq, span.end), True
        while missing > step.free:
            victim, enough = step.left.pop(), False
            self._preempt(victim)
            if victim is seq:
                return False
        step.left.remove(seq)
        step.add(span, missing)
        return enough

    def _start(self, seq: Sequence, rows: int, step: StepPlan) -> bool:
        """Gives a waiting sequence a place, rows and pages, if there are enough; returns whether it runs."""
        if len(self.running) == self.max_num_seqs:
            return False
        cached = self.pool.attach(seq)
        missing, length = self._max_pages(seq) - self.pool.held(seq), self.pool.chunk(seq, rows)
        if not length or missing > step.free - step.max_pages:
            self.pool.release(seq)
            return False
        if not seq.stats.preemptions:  # what it finds when it comes back was its own
            seq.stats.cached_tokens = cached
        self.waiting.remove(seq)
        self.running.append(seq)
        step.add(Span(seq, seq.committed, length), missing)
        return True

    def _max_pages(self, seq: Sequence) -> int:
        """The most pages that it holds at once until its tokens are computed."""
        return self.pool.max_pages(len(seq.tokens), self.max_batch_tokens)

    def free_ended(self, spans: list[Span]) -> tuple[list[Event], Ended]:
        """Frees what has ended and lets siblings in; returns the events, and which sequences ended how."""
        events: list[Event] = []
        ended: Ended = []
        for span in spans:
            seq, verdict = span.seq, span.verdict
            if verdict.tokens or verdict.finish or verdict.prompt_logprobs:
                events.append(output_event(seq, verdict, span.draft))
            if seq.committed >= seq.request.prompt_len:
                for sibling in self._siblings.pop(seq.id, ()):
                    self._wait(sibling)
            if verdict.finish:
                self._remove(seq)
                ended.append((seq, verdict.finish))
        return events, ended

    def abort(self, request_id: str, finish: Finish = ABORTED) -> tuple[list[Event], Ended]:
        """Ends every sample of a request now; unknown ids are ignored."""
        everyone = [*self.running, *self.waiting, *(s for group in self._siblings.values() for s in group)]
        aborted = [seq for seq in everyone if seq.request.id == request_id]
        for seq in aborted:
            self._siblings.pop(seq.id, None)
            self._remove(seq)
        events = [output_event(seq, Verdict((), finish=finish)) for seq in aborted]
        return events, [(seq, finish) for seq in aborted]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the pool is exactly what the running sequences hold."""
        for seq in self.waiting:
            assert not seq.table, f"sequence {seq.id} waits and holds pages"
        self.pool.check_integrity(self.running)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq)
        seq.stats.preemptions += 1
        self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=AGE)

    def _remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.pool.release(seq)


def output_event(seq: Sequence, verdict: Verdict, draft: Draft = NO_DRAFT) -> Event:
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
        full=verdict.outcome is SpanOutcome.FULL,
    )
