"""The drafts of one vLLM engine: our lookups and policies, called once per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from speculon.config import SamplingParams
from speculon.control.policies import Policies
from speculon.control.shadow import common
from speculon.core import Decision, Draft, Load, Proposal, Reason, SpanOutcome, Timing, Verdict, share
from speculon.engine.drafting import Drafting
from speculon.proposers.base import TargetFacts
from speculon.proposers.compose import Proposers
from speculon.sequence import Ending, Request, Rules, Sequence, Span
from speculon.telemetry import RequestStats
from speculon.vllm.requests import Known, Requests, Seen
from speculon.vllm.settings import Settings
from speculon.vllm.statistics import Statistics


@dataclass(slots=True)
class Rows:
    """The claim of a step on vLLM's rows; it has no pages of ours."""

    granted: list[int]
    refusals: list[Reason | None]

    @classmethod
    def within(cls, decisions: list[Decision], most: int) -> Rows:
        """As the decisions ask, `most` drafts in all: with more, vLLM would leave requests out of a step."""
        requested = [decision.k for decision in decisions]
        granted = share(requested, most)
        refused = (
            Reason.LOAD if k and not given else None for k, given in zip(requested, granted, strict=True)
        )
        return cls(granted, [*refused])

    def of(self, first_layer: int, method: str = "") -> Any:
        """Nothing: lookups have no pages."""


class Drafter:
    """Drafts for the rows of each step, and learns from the next step what became of them.

    The time between two calls is the step's. vLLM tells neither a request's parameters nor its end.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = perf_counter) -> None:
        config = settings.speculation
        self.settings, self._clock, self._ids = settings, clock, count()
        self.proposers = Proposers(config, TargetFacts(settings.vocab_size, settings.max_len))
        for method in settings.methods:
            self.proposers.lacking(method)  # builds it
        self.policy = Policies(config)
        self.requests = Requests(self._admit, settings.eos_ids, settings.stages)
        self._statistics = Statistics(settings.options.log_seconds, clock)
        self._calls: dict[str, Proposal] = {}  # of the latest call, by method
        self._left = 0.0  # when it returned
        self._own_ms = 0.0  # what it took without its proposals

    def step(self, new: list[list[int]], lengths: Any, table: Any) -> list[list[int]]:
        """Draft tokens by row, after the new tokens of each: `Requests.read` says what these are."""
        began = self._clock()
        seen = self.requests.read(new, lengths, table)
        self._learn(seen, (began - self._left) * 1e3 + self._own_ms)
        for seq in seen.ended:
            self.proposers.release(seq)
            self.policy.forget(seq)
        drafts = self._draft(seen)
        self._left = self._clock()
        self._own_ms = (self._left - began) * 1e3 - sum(call.ms for call in self._calls.values())
        return drafts

    def _admit(self, tokens: list[int]) -> Sequence:
        settings, number = self.settings, next(self._ids)
        config, params = settings.speculation, SamplingParams()
        request = Request(
            id=str(number),
            prompt_len=len(tokens),
            params=params,
            seed=0,
            max_len=settings.max_len,
            rules=Rules.of(params),
            ending=Ending(),
            limits=dict.fromkeys(settings.methods, settings.most) if settings.most else {},
            lookups=frozenset(settings.methods),
            off=Reason.OFF_CONFIG,
            policy=config.policy,
            chained=config.chained_drafts,
            pool=settings.options.pool,
        )
        return Sequence(number, request, tokens, RequestStats())

    def _learn(self, seen: Seen, step_ms: float) -> None:
        """Tells policy and statistics of the step, and what became of each draft."""
        rounds = [(known.attempt, known.new) for known in seen.going_on if known.attempt is not None]
        if rounds:
            spans = [attempt.span for attempt, _ in rounds]
            verdicts = [verdict_of(attempt.span.draft, new) for attempt, new in rounds]
            timing = Timing(step_ms if seen.decoding_only else None, self._calls)
            self.policy.observe(spans, verdicts, timing)
            self._statistics.count(rounds)

    def _draft(self, seen: Seen) -> list[list[int]]:
        known = [one for one in seen.rows if one is not None]
        seqs = [one.seq for one in known]
        decisions = self.policy.decide(seqs, Load(len(seqs), 0, 0))
        rows = Rows.within(decisions, max(0, self.settings.max_rows - len(seen.rows)))
        spans = [Span(seq, len(seq.tokens) - 1, 1) for seq in seqs]
        drafting = Drafting.of(self.proposers, self.policy, rows, spans, decisions)
        drafting.ask_lookups()
        self._calls = drafting.calls
        for one, attempt in zip(known, drafting.attempts, strict=True):
            one.attempt = attempt
        return [draft_of(one) for one in seen.rows]


def draft_of(known: Known | None) -> list[int]:
    return [] if known is None or known.attempt is None else [*known.attempt.span.draft.tokens]


def verdict_of(draft: Draft, new: list[int]) -> Verdict:
    """What a step of vLLM says of a draft. It may have verified fewer drafts than it was given."""
    if not draft.tokens:
        return Verdict(tuple(new))
    same = common(draft.tokens, new)
    if same == len(new):  # nothing was rejected: the last token is the target's own, and the draft had it
        outcome = SpanOutcome.STOP
    elif same == len(draft.tokens):
        outcome = SpanOutcome.FULL
    else:
        outcome = SpanOutcome.TAIL if same == len(draft.tokens) - 1 else SpanOutcome.EARLY
    return Verdict(tuple(new), same, outcome)
