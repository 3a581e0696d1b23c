"""The drafts of one round: lookups first, then models for the sequences that lookups left."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from speculon.cascade import ask_in_turn
from speculon.core import Decision, Draft, Proposal, Reason, Stop
from speculon.sequence import Attempt, Span

if TYPE_CHECKING:
    from speculon.control.policies import Policies
    from speculon.control.policy import Policy
    from speculon.proposers.base import Claim
    from speculon.proposers.compose import Drafts, Limits, Proposers


@dataclass(slots=True)
class Drafting:
    """Asks the methods of each attempt in turn, until the policy keeps a draft for it."""

    proposers: Proposers
    policy: Policies | Policy
    lease: Claim
    attempts: list[Attempt]
    calls: dict[str, Proposal] = field(default_factory=dict)  # by method

    @classmethod
    def of(
        cls,
        proposers: Proposers,
        policy: Policies | Policy,
        lease: Claim,
        spans: list[Span],
        decisions: list[Decision],
    ) -> Drafting:
        """Of spans and the decisions about them, as far as the lease grants these."""
        attempts = [
            Attempt(
                span, decision, k, decision.reason or refusal or Reason.CONTEXT_LIMIT
            )  # until one is asked
            for span, decision, k, refusal in zip(
                spans, decisions, lease.granted, lease.refusals, strict=True
            )
        ]
        return cls(proposers, policy, lease, attempts)

    def ask_lookups(self) -> None:
        self._ask_in_turn(lookups=True)

    def ask_models(self) -> None:
        """Asks the drafters with weights, for those without a draft; the policy weighs each again first."""
        self._ask_in_turn(lookups=False)

    def _ask_in_turn(self, lookups: bool) -> None:
        left = {i: a for i, a in enumerate(self.attempts) if a.asked and not a.done}
        asks = {
            i: [ask for ask in a.decision.asks if (ask.method in a.span.seq.request.lookups) == lookups]
            for i, a in left.items()
        }
        ask_in_turn(asks, self._ask if lookups else self._ask_model)

    def _ask_model(self, method: str, limits: Limits) -> list[int]:
        limits = self._granted(limits)
        seqs = [self.attempts[i].span.seq for i in limits]
        ks = dict(zip(limits, self.policy.confirm(method, seqs, [*limits.values()]), strict=True))
        for i in (i for i, k in ks.items() if not k):
            self.attempts[i].reason = Reason.COST
        return self._ask(method, {i: k for i, k in ks.items() if k})

    def _ask(self, method: str, limits: Limits) -> list[int]:
        """One call of a method; returns the attempts for which no other is to be asked."""
        limits = self._granted(limits)
        drafts, call = self.proposers.ask(method, limits, [a.span for a in self.attempts], self.lease)
        for i, draft in drafts.items():
            self.attempts[i].proposals.append((method, limits[i], draft))
        began = perf_counter()
        drafts = self._chain(method, drafts)
        if call is not None:
            self._book(method, call._replace(ms=call.ms + (perf_counter() - began) * 1e3))
        for i, draft in drafts.items():
            self._trim(self.attempts[i], method, draft)
        for i in limits:
            if self.attempts[i].span.seq.failed:
                self.attempts[i].reason = Reason.ERROR
        return [i for i in limits if self.attempts[i].done]

    def _granted(self, limits: Limits) -> Limits:
        return {i: min(k, self.attempts[i].granted) for i, k in limits.items()}

    def _chain(self, method: str, drafts: Drafts) -> Drafts:
        """Lookups continue the drafts of those whose decision allows it, as far as is reserved.

        Their time is booked on the method: without its drafts nobody would have asked them.
        """
        longer = {}
        for i, draft in drafts.items():
            attempt = self.attempts[i]
            limit = min(attempt.decision.chained, attempt.granted)
            longer[i] = self.proposers.extend(method, draft, limit, attempt.span.seq) if limit else draft
        return longer

    def _book(self, method: str, call: Proposal) -> None:
        if before := self.calls.get(method):
            sequences, unread = before.sequences + call.sequences, before.unread + call.unread
            call = Proposal(sequences, max(before.k, call.k), before.ms + call.ms, unread)
        self.calls[method] = call

    def _trim(self, attempt: Attempt, method: str, draft: Draft) -> None:
        """Lets the policy keep what pays of a draft, and says why where that is nothing."""
        seq, unused = attempt.span.seq, attempt.decision.unused
        kept = self.policy.trim(seq, method, draft) if draft.tokens else draft
        attempt.span.draft = kept
        attempt.estimate = self.policy.estimate(seq) if kept.tokens else None
        if len(kept.tokens) < len(draft.tokens):
            attempt.reason = unused
        elif attempt.reason is not unused:  # else there was a draft already, if not this one
            attempt.reason = Reason.NOT_READY if draft.stop is Stop.NOT_READY else Reason.NO_MATCH
