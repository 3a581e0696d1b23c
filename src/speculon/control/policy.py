"""How far to speculate. A policy sees numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from typing import Protocol

from speculon.core import Decision, Draft, Load, Reason, Sequence, Span, Verdict


class Policy(Protocol):
    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        """Method and K for each decoding sequence, or the reason for none."""
        ...

    def trim(self, drafts: list[Draft], load: Load) -> list[Draft]:
        """Drops positions that would cost more than they bring."""
        ...

    def observe(self, spans: list[Span], decisions: list[Decision], verdicts: list[Verdict], step_ms: float) -> None:
        """Learns from the round."""


class Fixed:
    """The same K in every round, as far as max_tokens lets it."""

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        return [self._one(seq) for seq in seqs]

    def trim(self, drafts: list[Draft], load: Load) -> list[Draft]:
        return drafts

    def observe(self, spans: list[Span], decisions: list[Decision], verdicts: list[Verdict], step_ms: float) -> None:
        """A fixed policy does not learn."""

    def _one(self, seq: Sequence) -> Decision:
        if seq.plain:
            return Decision(None, 0, seq.off)
        k = min(max(seq.k, seq.given_k), seq.room - 1)  # the last token needs no draft: the target's own one is enough
        return Decision(seq.method or seq.given[0], k) if k > 0 else Decision(None, 0, Reason.MAX_TOKENS)


POLICIES: dict[str, type[Policy]] = {"fixed": Fixed}
