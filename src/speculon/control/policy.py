"""What a policy is: it decides how far to speculate, and sees numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from speculon.core import Decision, Draft, Estimate, Load, Proposal, Sequence, Span, Verdict


@dataclass(frozen=True, slots=True)
class Timing:
    """What a round took, in ms."""

    target_ms: float | None = None  # of the step without its proposals; None where it also computed prompts
    proposals: Mapping[str, Proposal] = field(default_factory=dict)  # by method


class Policy(Protocol):
    """decide -> (confirm, trim)* -> observe in each round, for the sequences that chose it; forget at their end."""

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        """Who drafts how much for each decoding sequence, or the reason for nobody."""
        ...

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        """The most drafts for each of the sequences that a method is about to be asked for together; 0: it is not asked."""
        return ks

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """Drops positions that would cost more than they bring; an empty draft lets the next method be asked."""
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


@runtime_checkable
class Learning(Protocol):
    """A policy whose estimates outlive a process."""

    def state(self) -> Any:
        """As JSON knows it."""
        ...

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
