"""The drafts of one vLLM engine: our lookups and policies, called once per step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any

from speculon.core.config import SamplingParams
from speculon.core.telemetry import RequestStats
from speculon.core.types import CallCost, Draft, Load, Reason, SpanOutcome, Timing, Verdict, shared_length
from speculon.decoding.rounds import Budget, Judged, Span, grants
from speculon.decoding.sequence import Ending, Request, Rules, Sequence
from speculon.speculation.control.policies import Policies
from speculon.speculation.drafting import Drafting
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.compose import Proposers
from speculon.speculation.vllm.requests import Requests, Seen
from speculon.speculation.vllm.settings import VllmSettings
from speculon.speculation.vllm.statistics import VllmStatistics


class VllmDrafter:
    """Drafts for the rows of each step, and learns from the next step what became of them.

    The time between two calls is the step's. vLLM tells neither a request's parameters nor its end.
    """

    def __init__(self, settings: VllmSettings, clock: Callable[[], float] = perf_counter) -> None:
        config = settings.speculation
        self.settings, self._clock, self._ids = settings, clock, count()
        self.proposers = Proposers(config, TargetFacts(settings.vocab_size, settings.max_len))
        for method in settings.methods:
            self.proposers.lacking(method)  # builds it
        self.policy = Policies(config)
        self.requests = Requests(self._admit, settings.eos_ids, settings.stages)
        self._statistics = VllmStatistics(settings.options.log_seconds, clock)
        self._calls: dict[str, CallCost] = {}  # of the latest call, by method
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
            max_drafts=dict.fromkeys(settings.methods, settings.most) if settings.most else {},
            lookups=frozenset(settings.methods),
            off=Reason.OFF_CONFIG,
            policy=config.policy,
            chained=config.chained_drafts,
            pool=settings.options.pool,
        )
        return Sequence(number, request, tokens, RequestStats())

    def _learn(self, seen: Seen, step_ms: float) -> None:
        """Tells policy and statistics of the step, and what became of each draft."""
        judged = [
            Judged(known.drafted, verdict_of(known.drafted.draft, known.new))
            for known in seen.going_on
            if known.drafted is not None
        ]
        if judged:
            self.policy.observe(judged, Timing(step_ms if seen.decoding_only else None, self._calls))
            self._statistics.count(judged)

    def _draft(self, seen: Seen) -> list[list[int]]:
        decoding = [known for known in seen.rows if known is not None]
        spans = [Span.of(known.seq, known.seq.committed, 1) for known in decoding]
        wanted = [span.most_drafts for span in spans]
        # with more rows vLLM would leave requests out of a step
        granted = grants(wanted, max(0, self.settings.max_rows - len(seen.rows)))
        budgets = [*map(Budget.of, spans, granted)]
        decisions = self.policy.decide(budgets, Load(len(spans), 0, 0))
        drafting = Drafting(self.proposers, self.policy, budgets, decisions)
        drafting.ask_lookups()
        self._calls = drafting.calls
        for known, drafted in zip(decoding, drafting.drafted, strict=True):
            known.drafted = drafted
        return [[*known.drafted.draft.tokens] if known and known.drafted else [] for known in seen.rows]


def verdict_of(draft: Draft, new: list[int]) -> Verdict:
    """What a step of vLLM says of a draft. It may have verified fewer drafts than it was given."""
    same = shared_length(draft.tokens, new)
    # nothing was rejected: the last token is the target's own, and the draft had it
    stopped = same == len(new)
    return Verdict(tuple(new), same, SpanOutcome.STOP if stopped else draft.outcome(same))
