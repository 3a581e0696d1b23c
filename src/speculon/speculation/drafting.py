"""The drafts of one round: lookups first, then models for the sequences that lookups left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speculon.core.types import Proposal, Reason, Stop
from speculon.decoding.sequence import Span

if TYPE_CHECKING:
    from speculon.runtimes.torch.kv.lease import Lease
    from speculon.speculation.control.policies import Policies
    from speculon.speculation.control.policy import Policy
    from speculon.speculation.proposers.compose import Proposers


@dataclass(slots=True)
class Drafting:
    """Asks the methods of each span in turn, until its policy verifies a draft of one."""

    proposers: Proposers
    policy: Policies | Policy
    lease: Lease | None  # None: the methods have no pages
    spans: list[Span]
    calls: dict[str, Proposal] = field(default_factory=dict)  # by method

    def ask_lookups(self) -> None:
        self._ask_in_turn(lookups=True)

    def ask_models(self) -> None:
        """Asks the drafters with weights, for those without a draft; the policy weighs each again first."""
        self._ask_in_turn(lookups=False)

    def _ask_in_turn(self, lookups: bool) -> None:
        """One call per method and turn, for all who wait for it."""
        waiting = {
            span: iter(
                [ask for ask in span.decision.asks if (ask.method in span.seq.request.lookups) == lookups]
            )
            for span in self.spans
            if span.asked and not span.done
        }
        while waiting:
            groups: dict[str, list[Span]] = {}
            for span in list(waiting):
                if (ask := next(waiting[span], None)) is None:
                    del waiting[span]
                    continue
                span.k = min(ask.k, span.max_drafts(ask.method))
                span.depth = min(ask.depth, span.k)
                groups.setdefault(ask.method, []).append(span)
            for method, group in groups.items():
                if not lookups:
                    self.policy.confirm(method, group)
                self._ask(method, group)
                for span in group:
                    if span.done:
                        del waiting[span]

    def _ask(self, method: str, spans: list[Span]) -> None:
        """One call of a method, for those with K > 0."""
        for span in spans:
            if not span.k:
                span.reason = Reason.COST
        if drafting := [span for span in spans if span.k]:
            self._book(method, self.proposers.ask(method, drafting, self.lease))
        for span in drafting:
            self._trim(method, span)
            if span.seq.failed:
                span.reason = Reason.ERROR

    def _book(self, method: str, call: Proposal) -> None:
        if before := self.calls.get(method):
            sequences, unread = before.sequences + call.sequences, before.unread + call.unread
            call = Proposal(sequences, max(before.k, call.k), before.ms + call.ms, unread)
        self.calls[method] = call

    def _trim(self, method: str, span: Span) -> None:
        """Cuts a draft to what its policy verifies, and says why where that is nothing."""
        draft, unused = span.draft, span.decision.unused
        if draft.tokens:
            verified = self.policy.trim(method, span)
            span.draft = span.draft.cut(verified).in_preorder()
        if span.draft.tokens:
            return
        if draft.tokens:
            span.reason = unused
        elif span.reason is not unused:  # else there was a draft already, if not this one
            span.reason = Reason.NOT_READY if draft.stop is Stop.NOT_READY else Reason.NO_MATCH
