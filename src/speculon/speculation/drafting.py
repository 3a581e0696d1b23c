"""The drafts of one round: lookups first, then models for the sequences that lookups left."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speculon.core.types import NO_DRAFT, Ask, CallCost, Decision, Draft, Estimate, Reason, Stop
from speculon.decoding.rounds import Budget, Drafted, Proposed
from speculon.speculation.proposers.compose import DraftRequest

if TYPE_CHECKING:
    from speculon.speculation.control.policies import Policies
    from speculon.speculation.control.policy import Policy
    from speculon.speculation.proposers.compose import Proposers


@dataclass(slots=True, eq=False)
class Asking:
    """One sequence while its methods are asked in turn, until its policy verifies a draft of one."""

    budget: Budget
    decision: Decision
    lookups: deque[Ask] = field(init=False)
    models: deque[Ask] = field(init=False)
    proposals: list[Proposed] = field(default_factory=list)
    draft: Draft = NO_DRAFT
    reason: Reason | None = None  # why there is none
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        lookups, self.reason = self.budget.seq.request.lookups, self.decision.reason
        self.lookups = deque(ask for ask in self.decision.asks if ask.method in lookups)
        self.models = deque(ask for ask in self.decision.asks if ask.method not in lookups)

    @property
    def done(self) -> bool:
        """Whether no other method is to be asked."""
        return bool(self.draft.tokens) or self.budget.seq.failed

    @property
    def drafted(self) -> Drafted:
        reason = None if self.draft.tokens else self.reason
        return Drafted(
            self.budget.span, self.draft, reason, self.decision, tuple(self.proposals), self.estimate
        )


class Drafting:
    """Asks the methods of each sequence in turn, until its policy verifies a draft of one."""

    def __init__(
        self,
        proposers: Proposers,
        policy: Policies | Policy,
        budgets: list[Budget],
        decisions: list[Decision],
    ):
        self._proposers, self._policy = proposers, policy
        self._asking = [Asking(*pair) for pair in zip(budgets, decisions, strict=True)]
        self.calls: dict[str, CallCost] = {}  # by method

    @property
    def drafted(self) -> list[Drafted]:
        """The outcome for each sequence, in the order of the budgets."""
        return [asking.drafted for asking in self._asking]

    def ask_lookups(self) -> None:
        """One call per method and turn, for all sequences that wait for it."""
        while waiting := [one for one in self._asking if one.lookups and not one.done]:
            for method, group in by_method([(one, one.lookups.popleft()) for one in waiting]).items():
                self._ask(method, group)

    def ask_models(self) -> None:
        """Asks the drafters with weights, for those without a draft; the policy weighs each again first."""
        while waiting := [one for one in self._asking if one.models and not one.done]:
            for method, group in by_method([(one, one.models.popleft()) for one in waiting]).items():
                asks = self._policy.confirm(method, {one.budget: ask for one, ask in group.items()})
                self._ask(method, {one: asks[one.budget] for one in group})

    def _ask(self, method: str, group: dict[Asking, Ask]) -> None:
        """One call of a method, for those with K > 0."""
        for asking, ask in group.items():
            if not ask.k:
                asking.reason = Reason.COST
        asks = {asking: ask for asking, ask in group.items() if ask.k}
        if not asks:
            return
        # a policy that asked for more would take room that nobody has reserved
        assert all(ask.k <= asking.budget.max_drafts[method] for asking, ask in asks.items()), method
        requests = [
            DraftRequest(asking.budget.seq, ask.k, min(ask.depth, ask.k), asking.decision.chained)
            for asking, ask in asks.items()
        ]
        proposed, drafts, took = self._proposers.ask(method, requests)
        self._book(method, took)
        for (asking, ask), draft in zip(asks.items(), proposed, strict=False):
            asking.proposals.append(Proposed(method, ask.k, draft))
        self._trim(method, dict(zip(asks, drafts, strict=True)))

    def _book(self, method: str, call: CallCost) -> None:
        if before := self.calls.get(method):
            sequences, unread = before.sequences + call.sequences, before.unread + call.unread
            call = CallCost(sequences, max(before.k, call.k), before.ms + call.ms, unread)
        self.calls[method] = call

    def _trim(self, method: str, drafts: dict[Asking, Draft]) -> None:
        """Keeps of each draft what its policy verifies, and says why where that is nothing."""
        found = {asking.budget: draft for asking, draft in drafts.items() if draft.tokens}
        trimmed = self._policy.trim(method, found) if found else {}
        for asking, draft in drafts.items():
            if draft.tokens:
                verified, asking.estimate = trimmed[asking.budget]
                asking.draft = draft.truncated(verified).in_preorder()
            if asking.budget.seq.failed:
                asking.reason = Reason.ERROR
            elif draft.tokens:
                asking.reason = asking.decision.unused
            # else there was a draft already, if not this one
            elif asking.reason is not asking.decision.unused:
                asking.reason = Reason.NOT_READY if draft.stop is Stop.NOT_READY else Reason.NO_MATCH


def by_method(asks: list[tuple[Asking, Ask]]) -> dict[str, dict[Asking, Ask]]:
    groups: dict[str, dict[Asking, Ask]] = {}
    for asking, ask in asks:
        groups.setdefault(ask.method, {})[asking] = ask
    return groups
