"""The same number of drafts in every round: always, or while one sequence runs alone."""

from __future__ import annotations

from speculon.core.config import MAX_DRAFTS
from speculon.core.types import Ask, Decision, Load, Reason
from speculon.decoding.rounds import Budget
from speculon.speculation.control.policy import Policy


def ask_all(
    budget: Budget, limit: int = MAX_DRAFTS, unused: Reason = Reason.COST, chained: bool = True
) -> Decision:
    """Each method of a sequence in turn, `limit` drafts at most; or why none is asked.

    Where the request allows chained drafts, lookups continue a draft that ends early, unless `chained` is
    False.
    """
    if budget.reason is not None:
        return Decision.plain(budget.reason)
    request = budget.seq.request
    ks = {method: min(limit, k) for method, k in budget.max_drafts.items()}
    depths = dict.fromkeys(budget.seq.branching if chained else (), request.depth or 0)
    asks = [Ask(method, k, depths.get(method, 0)) for method, k in ks.items() if k]
    return Decision.of(asks, unused, max(ks.values()) if chained and request.chained else 0)


class Fixed(Policy):
    """The policy `fixed`: the same K in every round, as far as max_tokens lets it."""

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        return [ask_all(budget) for budget in budgets]


class Solo(Fixed):
    """The policy `solo`: as `fixed` while no other sequence runs or waits, plain decoding in a batch."""

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        if load.running + load.waiting > 1:
            return [Decision.plain(budget.reason or Reason.SOLO) for budget in budgets]
        return super().decide(budgets, load)
