"""The same number of drafts in every round: always, or while one sequence runs alone."""

from __future__ import annotations

from speculon.config import MAX_DRAFTS
from speculon.control.policy import Policy
from speculon.core import Ask, Decision, Load, Reason
from speculon.sequence import Sequence


def ask_all(
    seq: Sequence, limit: int = MAX_DRAFTS, unused: Reason = Reason.COST, chained: bool = True
) -> Decision:
    """Each method of a sequence in turn, `limit` drafts at most; or why none is asked.

    Where the request allows chained drafts, lookups continue a draft that ends early, unless `chained` is
    False.
    """
    if (why := unable(seq)) is not None:
        return Decision.plain(why)
    most = min(limit, seq.room - 1)
    asks = [Ask(method, min(seq.request.limits[method], most)) for method in seq.methods]
    return Decision.of(asks, unused, max(ask.k for ask in asks) if chained and seq.request.chained else 0)


def unable(seq: Sequence) -> Reason | None:
    """Why nothing may draft for a sequence under any policy."""
    if seq.off:
        return seq.off
    # the last token needs no draft: the target's own one is enough
    return Reason.MAX_TOKENS if seq.room <= 1 else None


class Fixed(Policy):
    """The policy `fixed`: the same K in every round, as far as max_tokens lets it."""

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        return [ask_all(seq) for seq in seqs]


class Solo(Fixed):
    """The policy `solo`: as `fixed` while no other sequence runs or waits, plain decoding in a batch."""

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        decisions = super().decide(seqs, load)
        if load.running + load.waiting <= 1:
            return decisions
        return [Decision.plain(Reason.SOLO) if decision.asks else decision for decision in decisions]
