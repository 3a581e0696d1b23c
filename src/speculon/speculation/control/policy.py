"""What a policy is: it decides how far to speculate, from numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from speculon.core.types import Ask, Decision, Draft, Estimate, Load, Timing
from speculon.decoding.rounds import Budget, Judged
from speculon.decoding.sequence import Sequence


class Trimmed(NamedTuple):
    """How many tokens of a draft are verified."""

    drafts: int
    estimate: Estimate | None = None  # what they are expected to bring, if the policy weighs drafts


class Policy(Protocol):
    """decide -> (confirm, trim)* -> observe in each round, for those that chose it; forget at their end."""

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        """K of each method for each sequence, at most that of its budget, or why nothing drafts."""
        ...

    def confirm(self, method: str, asks: Mapping[Budget, Ask]) -> Mapping[Budget, Ask]:
        """The same asks of a model that is about to draft, some with fewer tokens (0: none)."""
        return asks

    def trim(self, method: str, drafts: Mapping[Budget, Draft]) -> Mapping[Budget, Trimmed]:
        """How many tokens of each draft are verified, without those that cost more than they gain.

        `drafts` are all that one method has made now for sequences of this policy, none of them empty; each
        has an entry in the result. A sequence of whose draft nothing is verified goes on to its next method.
        """
        return {budget: Trimmed(len(draft.tokens)) for budget, draft in drafts.items()}

    def observe(self, judged: list[Judged], timing: Timing) -> None:
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
