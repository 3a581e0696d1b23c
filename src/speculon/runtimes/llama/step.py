"""The transaction of a step: rows are computed in each sequence's stream, then what is not committed is
forgotten.
"""

from __future__ import annotations

from itertools import groupby
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from speculon.decoding.rounds import Drafted, Grant, Judged, Span, grants
from speculon.runtimes.base import Output
from speculon.runtimes.llama.model import Rows

if TYPE_CHECKING:
    from speculon.runtimes.llama.runtime import LlamaRuntime
    from speculon.runtimes.llama.streams import Stream


class LlamaStep:
    """As `runtimes.base.Step` says. A stream has room for a whole context, so only rows limit the drafts."""

    def __init__(self, runtime: LlamaRuntime, spans: list[Span]):
        self._runtime, self._model, self._spans = runtime, runtime.model, spans
        self._ends: dict[int, int] = {}  # by stream: the tokens that it may have now
        self._states: dict[int, Any] = {}  # by stream: what cannot be cut, as it was before the drafts
        self.grants = grants([span.most_drafts for span in spans], runtime.draft_rows)
        if self._model.rollback:
            self.grants = [
                Grant(min(grant.drafts, self._model.rollback), grant.reason) for grant in self.grants
            ]

    def forward(self, drafted: list[Drafted]) -> Output:
        """As `Step` says. Sequences of one adapter are computed in one call, ordered by stream.

        Where states are kept after each row, one with drafts has a call of its own: other sequences in the
        same call could move its state, and leave those of its rows where they were.
        """
        places = [(one, self._runtime.space.of(one.seq)) for one in drafted]

        def call_of(i: int) -> tuple[int, str]:
            one, stream = places[i]
            return stream.id if one.draft.tokens and self._model.rollback else -1, stream.adapter

        order = sorted(range(len(places)), key=lambda i: (*call_of(i), places[i][1].id))
        logits, ms = [], 0.0
        scored: dict[int, range] = {}
        row = 0
        for (_, adapter), group in groupby(order, key=call_of):
            parts = []
            for i in group:
                parts.append(part := self._part(*places[i]))
                scored[i] = range(row, row + part.outputs)
                row += part.outputs
            self._runtime.use_adapter(adapter)
            its_logits, its_ms = self._model.run(parts)
            logits.append(its_logits)
            ms += its_ms
        joined = logits[0] if len(logits) == 1 else torch.cat(logits)
        return Output(joined, [scored[i] for i in range(len(places))], ms)

    def _part(self, one: Drafted, stream: Stream) -> Rows:
        span = one.span
        if span.start != len(stream.tokens):  # a repair has failed before
            self._compute(stream, 0, one.seq.tokens[: span.start])
        if one.draft.tokens and self._model.recurrent and not self._model.rollback:
            self._states[stream.id] = self._model.save_state(stream.id)
        self._ends[stream.id] = one.end
        tokens = [*one.seq.tokens[span.start : span.end], *one.draft.tokens]
        first = 0 if span.scores_prompt else span.length - 1 if span.samples else one.rows
        return Rows(stream.id, span.start, tokens, first)

    def commit(self, judged: list[Judged]) -> float:
        """Forgets rejected drafts. A recurrent state that cannot go back is restored, and computes the
        accepted rows again.
        """
        began, repaired = perf_counter(), False
        for one in judged:
            stream, end = self._runtime.space.of(one.seq), one.end
            if end < self._ends[stream.id]:
                repaired |= self._undo(stream, end, [*one.seq.tokens, *one.verdict.tokens][:end])
            self._ends[stream.id] = end
        return (perf_counter() - began) * 1e3 if repaired else 0.0

    def _undo(self, stream: Stream, end: int, tokens: list[int]) -> bool:
        """Makes a stream hold exactly its first `end` tokens; whether that took computing."""
        state, held = self._states.pop(stream.id, None), stream.tokens
        # a state goes back to one of its latest rows, not to before them
        can_go_back = end > len(held) or not self._model.recurrent
        if state is None and can_go_back and self._model.cut(stream.id, end):
            return False
        if state is not None:
            self._model.restore_state(stream.id, state)
        self._compute(stream, len(held) if state is not None else 0, tokens[:end])
        stream.tokens = held
        return True

    def _compute(self, stream: Stream, start: int, tokens: list[int]) -> None:
        """Makes a stream that has the first `start` of these tokens have all of them."""
        stream.tokens = []  # if it fails, nothing is claimed
        self._model.cut(stream.id, start)
        self._runtime.use_adapter(stream.adapter)
        for first in range(start, len(tokens), self._model.batch.size):
            rows = tokens[first : first + self._model.batch.size]
            self._model.run([Rows(stream.id, first, rows, len(rows))])
        stream.tokens = [*tokens]

    def __enter__(self) -> LlamaStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The rollback: each stream that was computed in has what is committed, and no more."""
        for seq in (span.seq for span in self._spans):
            stream = self._runtime.space.of(seq)
            if self._ends.get(stream.id, seq.committed) != seq.committed:
                self._undo(stream, seq.committed, seq.tokens)
            stream.tokens += seq.tokens[len(stream.tokens) : seq.committed]
