"""Replays a share of the answers without speculation while the engine is idle, and judges differences.

A replay has pages of its own, in which nothing of a request ever is. It drafts nothing, finds no prefix, and
tells nothing to policies, counters of requests, pools and the record of rounds.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from math import floor, isfinite
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.reach import joint_reach
from speculon.core.telemetry import MonitorCounts, RequestStats
from speculon.core.types import Finish, Reason, TokenLogprobs
from speculon.decoding.batch import Batch
from speculon.decoding.kv.blocks import BlockPool
from speculon.decoding.kv.lease import Lease, Leases
from speculon.decoding.kv.slots import StateSlots
from speculon.decoding.kv.store import PageStore
from speculon.decoding.regret import TOP, at_or_none, movement, tie_limit, token_regret
from speculon.decoding.sampling import Row
from speculon.decoding.sequence import Ending, Request, Rules, Sequence, Span
from speculon.decoding.verify import cut, scored_rows, verify
from speculon.target.budget import REPLAY_ROWS, replay_pages

if TYPE_CHECKING:
    from speculon.decoding.text.grammar import Matcher
    from speculon.target.target import Target

MAX_WAITING = 32  # guess: answers; the oldest is dropped for the next one
MEASURED = 2048  # guess: positions at which a coarse dtype's limit is measured

log = logging.getLogger("speculon")


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A sequence that has ended, as far as its replay needs it."""

    request: Request
    sample: int
    tokens: list[int]  # prompt, then output
    finish: Finish
    grammar: Matcher | None  # at the beginning of the text

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.request.prompt_len]

    @property
    def output(self) -> list[int]:
        """With the stop token that ended it: another stop is a difference, too."""
        return with_stop(self.tokens[self.request.prompt_len :], self.finish)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first differs from its answer."""

    at: int  # output position
    token: int | None  # of the answer; None where it had ended
    replayed: int | None
    logits: Tensor  # [V] of the replay's row
    row: Row

    def regret(self, limit: float) -> float | None:
        """Of the answer's token; None where an end has nothing to compare, or p is 0."""
        if self.token is None or self.replayed is None:
            return None
        regret = token_regret(self.logits, self.row, self.token, limit)
        return regret if isfinite(regret) else None


class Lane:
    """Decodes one sequence after another, plainly, in the pages of a pool that nobody else uses meanwhile."""

    def __init__(self, target: Target, pool: BlockPool, leases: Leases, rows: int):
        self.pool, self._target, self._leases, self._rows = pool, target, leases, rows

    def run(self, seq: Sequence) -> Generator[tuple[Span, Tensor], None, None]:
        """Each span with its logits [R, V] until the sequence ends; committed when the next one is due.

        Closing the generator gives the pages back.
        """
        self.pool.attach(seq)
        finish = None
        try:
            while finish is None:
                span = Span(seq, seq.committed, self.pool.chunk(seq, self._rows))
                with self._leases.reserve([span]) as lease:
                    yield span, self._ask_target(span, lease)
                    commit(lease)
                if seq.grammar is not None:
                    seq.grammar.consume(span.verdict.tokens)
                finish = span.verdict.finish
        finally:
            self.pool.release(seq)

    @torch.inference_mode()
    def _ask_target(self, span: Span, lease: Lease) -> Tensor:
        batch = Batch.pack([span], self._target.device)
        logits = self._target.forward(batch, lease.view(batch)).logits
        verify(batch, logits)
        cut([span])
        return logits


@torch.inference_mode()
def commit(lease: Lease) -> None:
    lease.commit()


class Monitor:
    """Takes every (1 / share)-th answer that can be replayed exactly, and replays it a forward at a time.

    Between two forwards requests may run: a replay that has begun continues after them.
    """

    @classmethod
    def of(
        cls, target: Target, config: EngineConfig, max_context: int, counts: MonitorCounts
    ) -> Monitor | None:
        """None where nothing is to be monitored: then no page is taken."""
        if not config.monitor_share:
            return None
        rows, reach = min(REPLAY_ROWS, config.max_batch_tokens), joint_reach(target.layers)
        pages = replay_pages(config, max_context, target.layers)
        slots = StateSlots(int(target.recurrent), 0, rows, target.by_row)
        pool = BlockPool(pages, config.block_size, False, slots, target.prompts_apart, reach)
        store = PageStore(target.layers, pages, config.block_size, target.device)
        lane = Lane(target, pool, Leases(pool, store, 0, target.states(slots.count)), rows)
        return cls(target, lane, config.monitor_share, config.monitor_max_tokens, counts)

    def __init__(self, target: Target, lane: Lane, share: float, max_tokens: int, counts: MonitorCounts):
        self.counts = counts
        self.lane, self._share, self._max_tokens = lane, share, max_tokens
        self._top = min(TOP, target.vocab_size)
        self._invariant = target.batch_invariant
        self.coarse = target.dtype.itemsize < 4 and not target.batch_invariant
        self._moved, self.positions = 0.0, 0  # the largest change of a gap, and where it was measured
        self._seen = 0  # answers that could be replayed
        self.waiting: deque[FinishedSequence] = deque()
        self._replay: Generator[None, None, None] | None = None
        self._ids = itertools.count()
        counts.limit = self.limit

    @property
    def limit(self) -> float:
        """The largest regret of a tie, in nat."""
        return tie_limit(self._moved, coarse=self.coarse, invariant=self._invariant)

    @property
    def has_work(self) -> bool:
        return bool(self._replay or self.waiting)

    def take(self, seq: Sequence, finish: Finish) -> None:
        """Queues an answer that has just ended, if it is its turn; the oldest gives way to it."""
        if not self._exact(seq, finish):
            return
        self._seen += 1
        # evenly spread, and the same answers in every run
        if floor(self._seen * self._share) == floor((self._seen - 1) * self._share):
            return
        if len(self.waiting) == MAX_WAITING:
            self.waiting.popleft()
            self.counts.dropped += 1
        try:
            grammar = None if seq.grammar is None else seq.grammar.anew()
            answer = FinishedSequence(seq.request, seq.sample, list(seq.tokens), finish, grammar)
            self.waiting.append(answer)
        except Exception:  # the request's own end must not depend on it
            log.exception("the monitor: %s cannot be replayed", seq.request.id)
            self.counts.dropped += 1
        self.counts.waiting = len(self.waiting)

    def _exact(self, seq: Sequence, finish: Finish) -> bool:
        """Whether plain decoding has to write the same tokens, and has pages for them."""
        request = seq.request
        fixed = request.params.greedy or request.params.seed is not None
        ended = finish.reason in ("stop", "length") and (seq.num_output > 0 or finish.matched is not None)
        repeats = fixed and not request.needs_q and request.params.logits_processor is None
        repeats = repeats and not request.images.blocks  # one may take more rows than a replay has
        return repeats and ended and len(seq.tokens) <= self._max_tokens

    def step(self) -> None:
        """One forward of a replay. An error costs this replay, and nothing else."""
        if self._replay is None:
            if not self.waiting:
                return
            self._replay = self._run_replay(self.waiting.popleft())
        began = perf_counter()
        try:
            if next(self._replay, True):  # True: it has ended
                self._replay = None
        except Exception:
            log.exception("the monitor: a replay failed")
            self.counts.dropped += 1
            self._replay = None
        self.counts.waiting = len(self.waiting)
        self.counts.ms += (perf_counter() - began) * 1e3

    def forget(self, tenant: str, pool: str | None) -> None:
        """Drops the answers that wait, of one pool or of all of a tenant."""

        def stays(request: Request) -> bool:
            return request.tenant != tenant or pool not in (None, request.pool)

        self.waiting = deque(answer for answer in self.waiting if stays(answer.request))
        self.counts.waiting = len(self.waiting)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page of its own is free between two replays."""
        if self._replay is None:
            self.lane.pool.check_integrity([])

    def _run_replay(self, answer: FinishedSequence) -> Generator[None, None, None]:
        difference, decoded = yield from self._decode(answer, compares=True)
        if self._measures:
            if difference:  # the tokens before it may be too few to measure a limit
                _, decoded = yield from self._decode(answer, compares=False)
            yield from self._measure(answer, decoded)
        self._count(answer, difference)

    def _decode(
        self, answer: FinishedSequence, compares: bool
    ) -> Generator[None, None, tuple[Difference | None, list[TokenLogprobs]]]:
        """Writes an answer again, up to the first difference where it `compares`."""
        output, decoded = answer.output, list[TokenLogprobs]()
        with closing(self.lane.run(self._sequence(answer))) as steps:
            for span, logits in steps:
                if compares and (difference := differs(output, answer.finish, span, logits)):
                    return difference, decoded
                decoded += span.verdict.logprobs or ()
                yield
        return None, decoded

    @property
    def _measures(self) -> bool:
        """Whether the limit is not known yet."""
        return self.coarse and self.positions < MEASURED

    def _sequence(self, answer: FinishedSequence) -> Sequence:
        """The same request, without anything that drafts; it may exceed its answer by one token."""
        request = answer.request
        top = self._top if self._measures else None
        params = request.params.model_copy(update={"n": 1, "logprobs": top, "prompt_logprobs": None})
        plain = replace(
            request,
            params=params,
            max_len=min(request.max_len, len(answer.tokens) + 1),
            max_drafts={},
            lookups=frozenset(),
            from_request=(),
            off=Reason.OFF_REQUEST,
            prediction=(),
            pool="",
            prefix_cache=False,
        )
        grammar = None if answer.grammar is None else answer.grammar.anew()
        return Sequence(next(self._ids), plain, answer.prompt, RequestStats(), answer.sample, grammar=grammar)

    def _measure(self, answer: FinishedSequence, decoded: list[TokenLogprobs]) -> Generator[None, None, None]:
        """How far the gaps of the replay's best tokens move when one forward computes all of them."""
        if not decoded:
            return
        tokens = [*answer.prompt, *(before.token for before in decoded)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=self._top)
        request = replace(
            self._sequence(answer).request,
            params=params,
            rules=Rules.of(params),
            ending=Ending(),
            prompt_len=len(tokens),
            max_len=len(tokens) + 1,
        )
        fresh: list[TokenLogprobs] = []  # of each token but the first
        with closing(self.lane.run(Sequence(next(self._ids), request, tokens, RequestStats()))) as steps:
            for span, _ in steps:
                fresh += span.verdict.prompt_logprobs or ()
                yield
        for before, after in zip(decoded, fresh[-len(decoded) :], strict=True):
            self._moved = max(self._moved, movement(before, after) or 0.0)
        self.positions += len(decoded)
        self.counts.limit = self.limit

    def _count(self, answer: FinishedSequence, difference: Difference | None) -> None:
        counts = self.counts
        counts.replayed += 1
        if difference is None:
            counts.equal += 1
            return
        limit = self.limit
        regret = difference.regret(limit)
        tie = regret is not None and regret < limit
        counts.ties += tie
        counts.faults += not tie
        log.log(
            logging.INFO if tie else logging.ERROR,
            "the monitor: %s, sample %d, differs from plain decoding at token %d: %s, regret %s, limit %.2g",
            answer.request.id,
            answer.sample,
            difference.at,
            "a tie" if tie else "a fault",
            "none" if regret is None else f"{regret:.2g} nat",
            limit,
        )


def differs(output: list[int], finish: Finish, span: Span, logits: Tensor) -> Difference | None:
    """Whether the one token of a plain step, or the end after it, is not that of an answer."""
    if not span.samples:
        return None
    at, verdict = span.seq.num_output, span.verdict
    token, replayed = at_or_none(output, at), at_or_none(with_stop([*verdict.tokens], verdict.finish), 0)
    if token == replayed:
        if verdict.finish == (finish if at + 1 == len(output) else None):
            return None
        token = None  # the same token, and only one of them ends there
    logits, rows = scored_rows([span], logits)
    return Difference(at, token, replayed, logits[-1], rows[-1])


def with_stop(tokens: list[int], finish: Finish | None) -> list[int]:
    return [*tokens, finish.matched] if finish and isinstance(finish.matched, int) else tokens
