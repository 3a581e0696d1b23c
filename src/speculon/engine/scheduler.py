"""Who runs in a step: decoding sequences first, then prompts, in chunks. Integers only: rows, and tokens of
room.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from speculon.core.types import NO_DRAFT, Draft, Finish, Load, SpanOutcome, Verdict, ceil_div
from speculon.decoding.rounds import Judged, Span
from speculon.decoding.sequence import Event, Sequence
from speculon.runtimes.base import Space

Ended = list[tuple[Sequence, Finish]]
ABORTED = Finish("abort")
AGE = attrgetter("id")  # ids are given in the order of arrival


@dataclass(slots=True)
class StepPlan:
    """What a step holds while it is planned. Room is counted here, and taken later."""

    room: int  # tokens that nobody has yet
    rows: int  # the same
    spans: list[Span] = field(default_factory=list)
    left: list[Sequence] = field(default_factory=list)  # running ones without a span, the first to go last

    def add(self, span: Span, needed: int) -> None:
        self.spans.append(span)
        self.rows -= span.length
        self.room -= needed


class Scheduler:
    def __init__(self, space: Space, max_num_seqs: int, max_batch_tokens: int):
        self.space, self.max_num_seqs, self.max_batch_tokens = space, max_num_seqs, max_batch_tokens
        self.waiting: deque[Sequence] = deque()  # oldest first
        self.running: list[Sequence] = []
        # first sample -> those that start from its prompt
        self._siblings: dict[int, list[Sequence]] = {}

    @property
    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), self.space.room // self.space.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def begun(self) -> list[Sequence]:
        """Those that have run and have not ended: the running ones, and preempted ones."""
        return [*self.running, *(seq for seq in self.waiting if seq.stats.preemptions)]

    def add(self, samples: list[Sequence]) -> None:
        """Queues the first of a request's samples; the others follow once its prompt is computed."""
        first, *others = samples
        self._wait(first)
        if others:
            self._siblings[first.id] = others

    def plan(self) -> list[Span]:
        """Spans within `max_batch_tokens` rows for which there is room, counted but not taken.

        When room runs out the youngest running sequence gives back all that it has and waits to be computed
        again. The oldest always runs: admission has checked that it fits alone.
        """
        step = StepPlan(self.space.room, self.max_batch_tokens)
        running = set(self.running)
        step.left = sorted(self.running, key=AGE)
        decoding = [seq for seq in step.left if seq.pending == 1]
        prompts = [seq for seq in step.left if seq.pending > 1]
        turns = [(seq, 0) for seq in decoding] + self._turns(prompts, step.rows - len(decoding))
        starts = True  # until the first in the queue lacks room
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
        cached = {seq: self.space.cached(seq) for seq in by_age if seq not in prompts}
        left = {seq: seq.pending - cached.get(seq, 0) for seq in by_age}
        shorter = [
            seq
            for seq in sorted(others, key=lambda seq: (left[seq], seq.id))
            if left[seq] < left[oldest]
            and (seq in started or not any(self.space.shares(seq, other) for other in started))
        ]
        shorter = self._with_room(shorter, started, rows)
        left_rows = min(rows // 2, sum(left[seq] for seq in shorter))
        if oldest.request.images.blocks:  # one of them may take all rows
            left_rows = 0
        rest = [seq for seq in others if seq not in set(shorter)]
        return [(oldest, left_rows), *((seq, 0) for seq in (*shorter, *rest))]

    def _with_room(self, seqs: list[Sequence], started: set[Sequence], rows: int) -> list[Sequence]:
        """Those of them that run, and that may start before others: these leave a place and room to the
        first in the queue, and room to those that run.
        """
        first = next((seq for seq in self.waiting if seq not in started), None)
        fixed = [seq for seq in (first, *started) if seq is not None and seq in self.waiting]
        places = self.max_num_seqs - len(self.running) - len(fixed)
        room = self.space.room - self._most_taken(rows, self.running)
        room -= sum(map(self.space.needed, {*fixed, *started}))
        fitting: list[Sequence] = []
        for seq in seqs:
            if seq not in started and seq is not first:
                places, room = places - 1, room - self.space.needed(seq)
            if seq in started or (places >= 0 and room >= 0):
                fitting.append(seq)
        return fitting

    def _most_taken(self, rows: int, seqs: list[Sequence]) -> int:
        """The most room that running sequences take with so many rows."""
        size = self.space.block_size
        each = sum(self.space.needed(seq, seq.committed + rows) for seq in seqs)
        return min(each, (ceil_div(rows, size) + len(seqs)) * size)

    def _go_on(self, seq: Sequence, rows: int, step: StepPlan) -> bool:
        """Gives a running sequence its rows and room; returns whether nobody had to give room back."""
        length = self.space.chunk(seq, rows)
        if not length:
            return True
        span = Span.of(seq, seq.committed, length)
        needed, enough = self.space.needed(seq, span.end), True
        while needed > step.room:
            victim, enough = step.left.pop(), False
            self._preempt(victim, step)
            if victim is seq:
                return False
        step.left.remove(seq)
        step.add(span, needed)
        return enough

    def _start(self, seq: Sequence, rows: int, step: StepPlan) -> bool:
        """Gives a waiting sequence a place, rows and room, if there are enough; returns whether it runs."""
        if len(self.running) == self.max_num_seqs:
            return False
        before = self.space.room
        seq.committed = self.space.open(seq)
        step.room += self.space.room - before
        needed, length = self.space.needed(seq), self.space.chunk(seq, rows)
        others = self._most_taken(step.rows, step.left) if step.left else 0
        if not length or needed > step.room - others:
            self._close(seq, step)
            return False
        if not seq.stats.preemptions:  # what it finds when it comes back was its own
            seq.stats.cached_tokens = seq.committed
        self.waiting.remove(seq)
        self.running.append(seq)
        step.add(Span.of(seq, seq.committed, length), needed)
        return True

    def _close(self, seq: Sequence, step: StepPlan | None = None) -> None:
        """Takes from a sequence all that it has; what becomes free is room of the step."""
        before = self.space.room
        self.space.close(seq)
        seq.committed = 0
        if step is not None:
            step.room += self.space.room - before

    def free_ended(self, judged: list[Judged]) -> tuple[list[Event], Ended]:
        """Frees what has ended and lets siblings in; returns the events, and which sequences ended how."""
        events: list[Event] = []
        ended: Ended = []
        for one in judged:
            seq, verdict = one.seq, one.verdict
            if verdict.tokens or verdict.finish or verdict.prompt_logprobs:
                events.append(output_event(seq, verdict, one.draft))
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
        """Raises AssertionError unless the runtime has exactly what the running sequences hold."""
        self.space.check_integrity(self.running, self.waiting)

    def _preempt(self, seq: Sequence, step: StepPlan) -> None:
        self.running.remove(seq)
        self._close(seq, step)
        seq.stats.preemptions += 1
        self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=AGE)

    def _remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._close(seq)


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
