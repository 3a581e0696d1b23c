"""The values of one round, each made once and handed on unchanged. No torch here.

The scheduler plans a `Span` for each sequence. The runtime grants room for drafts, which bounds the `Budget`.
Within the budget the policy decides and the proposers draft, which makes a `Drafted`. The target's verdict
turns it into a `Judged`. After the commit, statistics and records read the `Round`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from speculon.core.types import (
    NO_DRAFT,
    UNDECIDED,
    CallCost,
    Decision,
    Draft,
    Estimate,
    Load,
    Reason,
    Timing,
    Verdict,
)
from speculon.decoding.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive positions of one sequence in one forward: a prompt chunk, or its last token, after which
    drafts may follow.
    """

    seq: Sequence
    start: int  # position of the first row = tokens that are computed already
    length: int  # rows without the drafts
    samples: bool  # whether it reaches the last token, so that its last row is sampled
    decodes: bool  # whether drafts may follow it; by default only if it is the last token alone
    wanted: Mapping[str, int]  # method -> the most drafts that could be useful in this round
    given: int | None = None  # the number of drafts that a caller brings itself; None: none

    @classmethod
    def of(cls, seq: Sequence, start: int, length: int, decodes: bool = False) -> Span:
        samples = start + length == len(seq.tokens)
        decodes = decodes or (samples and length == 1)
        wanted = wanted_drafts(seq, start + length) if decodes else {}
        return cls(seq, start, length, samples, decodes, wanted)

    @property
    def end(self) -> int:
        """The position after its last row, where drafts begin."""
        return self.start + self.length

    @property
    def scores_prompt(self) -> bool:
        """Whether all of its rows are scored, for log-probabilities of the prompt."""
        seq = self.seq
        missing = seq.prompt_scored < min(self.end, seq.request.prompt_len - 1)
        return missing and seq.wants_prompt_logprobs

    @property
    def most_drafts(self) -> int:
        """The most drafts for which it may need room."""
        if self.given is not None:
            return self.given
        return max(self.wanted.values(), default=0)


def wanted_drafts(seq: Sequence, end: int) -> dict[str, int]:
    """The most drafts of each method that could be useful after `end` tokens.

    The number is bounded by the setting and the drafter (`Request.max_drafts`), by the drafter's context, and
    by the tokens left to generate, the last of which the target makes itself.
    """
    if seq.off:
        return {}
    request, room = seq.request, seq.tokens_left - 1
    left = {method: limit - end for method, limit in request.max_context.items()}
    return {m: max(0, min(k, room, left.get(m, room))) for m, k in request.max_drafts.items()}


class Grant(NamedTuple):
    """For how many drafts of one sequence the runtime has room in this round."""

    drafts: int
    reason: Reason | None = None  # why there are none: `no_pages` or `load`


def grants(wanted: list[int], rows: int) -> list[Grant]:
    """Grants at most `rows` drafts in all. If more are wanted, the longest ones shrink to one limit."""
    limit = max(wanted, default=0)
    while limit and sum(min(k, limit) for k in wanted) > rows:
        limit -= 1
    return [Grant(min(k, limit), Reason.LOAD if k and not limit else None) for k in wanted]


@dataclass(frozen=True, slots=True, eq=False)
class Budget:
    """The bounds within which the policy of one sequence decides in this round."""

    span: Span
    max_drafts: Mapping[str, int]  # method -> drafts, in the order in which the methods are asked
    reason: Reason | None = None  # why no method may draft; None: one may
    # tokens that a drafter with weights computes before it drafts, beyond the last one
    unread: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, span: Span, grant: Grant, unread: Mapping[str, int] | None = None) -> Budget:
        max_drafts = {method: min(k, grant.drafts) for method, k in span.wanted.items()}
        return cls(span, max_drafts, why_none(span, grant), unread or {})

    @property
    def seq(self) -> Sequence:
        return self.span.seq


def why_none(span: Span, grant: Grant) -> Reason | None:
    """Why no method may draft for a sequence, whatever its policy decides; None: one may."""
    if span.seq.off:
        return span.seq.off
    if span.seq.tokens_left <= 1:  # the last token needs no draft: the target's own one is enough
        return Reason.MAX_TOKENS
    if span.seq.request.max_context and not any(span.wanted.values()):
        return Reason.CONTEXT_LIMIT
    return None if grant.drafts else grant.reason


class Proposed(NamedTuple):
    """The draft of one method, before a lookup continues it and the policy trims it. It may be empty."""

    method: str
    k: int  # the number of tokens that the method was asked for
    draft: Draft


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """A span and the draft that the target judges with it, or why there is none."""

    span: Span
    draft: Draft = NO_DRAFT
    reason: Reason | None = None  # None with a draft, and for prompt chunks
    decision: Decision = UNDECIDED
    proposals: tuple[Proposed, ...] = ()  # in the order they were made
    estimate: Estimate | None = None  # of the draft, if its policy has one

    @property
    def seq(self) -> Sequence:
        return self.span.seq

    @property
    def method(self) -> str:
        """The method that proposed the draft."""
        return self.proposals[-1].method

    @property
    def asked(self) -> tuple[str, ...]:
        """The methods that the policy asked, in order; empty if one failed and there is no draft."""
        return () if self.reason is Reason.ERROR else tuple(ask.method for ask in self.decision.asks)

    @property
    def rows(self) -> int:
        return self.span.length + len(self.draft.tokens)

    @property
    def end(self) -> int:
        """The place in memory after its last row. For a chain it is also the position."""
        return self.span.start + self.rows

    @property
    def positions(self) -> Seq[int]:
        """The positions of its rows. Drafts of a tree at the same depth share a position."""
        start, first = self.span.start, self.span.end
        if self.draft.parents is None:
            return range(start, self.end)
        return [*range(start, first), *(first + depth for depth in self.draft.depths)]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A span with its draft and the target's verdict, truncated where the sequence ends."""

    drafted: Drafted
    verdict: Verdict

    @property
    def span(self) -> Span:
        return self.drafted.span

    @property
    def seq(self) -> Sequence:
        return self.drafted.span.seq

    @property
    def draft(self) -> Draft:
        return self.drafted.draft

    @property
    def end(self) -> int:
        """The number of tokens of the sequence that are computed after the commit."""
        return self.span.end + min(self.verdict.accepted, len(self.verdict.tokens))

    @property
    def in_path_order(self) -> Judged:
        """A tree with its accepted drafts first, in the order of their path, as the commit leaves them."""
        draft, path = self.draft, self.verdict.path
        if path is None:
            return self
        others = (node for node in range(len(draft.tokens)) if node not in path)
        drafted = replace(self.drafted, draft=draft.in_order([*path, *others]))
        return Judged(drafted, replace(self.verdict, path=None))


@dataclass(frozen=True, slots=True)
class Round:
    """One committed round of the engine, as statistics and records read it."""

    load: Load  # the load before this round
    judged: list[Judged]
    calls: Mapping[str, CallCost]  # by method
    draft_ms: float
    step_ms: float | None  # ms without the proposals; None: the target was not called
    repair_ms: float = 0.0  # the part of these ms that restored recurrent states after rejected drafts

    @property
    def decoding(self) -> list[Judged]:
        return [one for one in self.judged if one.span.decodes]

    @property
    def timing(self) -> Timing:
        """The times from which a cost model may learn."""
        decoding_only = all(one.span.length == 1 for one in self.judged)
        return Timing(self.step_ms if decoding_only else None, self.calls)

    @property
    def rows(self) -> int:
        return sum(one.drafted.rows for one in self.judged)
