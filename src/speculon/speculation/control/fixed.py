"""The same number of drafts in every round: always, or while one sequence runs alone."""

from __future__ import annotations

from speculon.core.config import MAX_DRAFTS
from speculon.core.types import Ask, Decision, Load, Reason
from speculon.decoding.sequence import Span
from speculon.speculation.control.policy import Policy


def ask_all(
    span: Span, limit: int = MAX_DRAFTS, unused: Reason = Reason.COST, chained: bool = True
) -> Decision:
    """Each method of a sequence in turn, `limit` drafts at most; or why none is asked.

    Where the request allows chained drafts, lookups continue a draft that ends early, unless `chained` is
    False.
    """
    if (why := unable(span)) is not None:
        return Decision.plain(why)
    ks = {method: min(limit, span.max_drafts(method)) for method in span.seq.methods}
    depth = span.seq.request.depth or 0
    depths = {method: depth for method in span.seq.branching if chained}
    asks = [Ask(method, k, depths.get(method, 0)) for method, k in ks.items() if k]
    return Decision.of(asks, unused, max(ks.values()) if chained and span.seq.request.chained else 0)


def unable(span: Span) -> Reason | None:
    """Why nothing may draft for a sequence under any policy."""
    if span.seq.off:
        return span.seq.off
    # the last token needs no draft: the target's own one is enough
    if span.seq.room <= 1:
        return Reason.MAX_TOKENS
    limited = span.seq.request.max_context and not any(map(span.max_drafts, span.seq.methods))
    return Reason.CONTEXT_LIMIT if limited else None


class Fixed(Policy):
    """The policy `fixed`: the same K in every round, as far as max_tokens lets it."""

    def decide(self, spans: list[Span], load: Load) -> None:
        for span in spans:
            span.decision = ask_all(span)


class Solo(Fixed):
    """The policy `solo`: as `fixed` while no other sequence runs or waits, plain decoding in a batch."""

    def decide(self, spans: list[Span], load: Load) -> None:
        super().decide(spans, load)
        if load.running + load.waiting > 1:
            for span in spans:
                if span.decision.asks:
                    span.decision = Decision.plain(Reason.SOLO)
