"""What a policy is: it decides how far to speculate, from numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from typing import Any, Protocol

from speculon.core.types import Load, Timing
from speculon.decoding.sequence import Sequence, Span


class Policy(Protocol):
    """decide -> (confirm, trim)* -> observe in each round, for those that chose it; forget at their end."""

    def decide(self, spans: list[Span], load: Load) -> None:
        """Sets each span's `decision`: K of each method, at most `Span.max_drafts`, or why nothing drafts."""
        ...

    def confirm(self, method: str, spans: list[Span]) -> None:
        """May reduce the `k` of spans that a model is about to draft for (0: none); not for lookups."""
        return None

    def trim(self, method: str, span: Span) -> int:
        """How many of the span's drafts are verified, without those that cost more than they gain; after 0
        the next method is asked. A policy that weighs a draft sets the span's `estimate`.
        """
        return len(span.draft.tokens)

    def observe(self, spans: list[Span], timing: Timing) -> None:
        """Learns from the verdicts of the round."""
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
