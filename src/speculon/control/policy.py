"""What a policy is: it decides how far to speculate, from numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from typing import Any, Protocol

from speculon.core import Decision, Draft, Estimate, Load, Timing, Verdict
from speculon.sequence import Sequence, Span


class Policy(Protocol):
    """decide -> (confirm, trim)* -> observe in each round, for the sequences that chose it; forget at their
    end.
    """

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        """Who drafts how much for each decoding sequence, or the reason for nobody."""
        ...

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        """The most drafts of each sequence that a model is about to draft for; 0: it drafts none. Lookups are
        not confirmed.
        """
        return ks

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """Drops positions that cost more than they gain; after an empty draft the next method is asked."""
        return draft

    def estimate(self, seq: Sequence) -> Estimate | None:
        """Of the draft of this round; None where the policy weighs none."""
        return None

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """Learns from the round."""
        return None

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        return None

    def state(self) -> Any:
        """What outlives the process, as JSON knows it; None of a policy that learns nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        raise ValueError("this policy learns nothing")
