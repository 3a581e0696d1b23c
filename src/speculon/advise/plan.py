"""The question of an advice: concurrency, the largest K, a method, repeats."""

from __future__ import annotations

from dataclasses import dataclass

from speculon.config import MAX_DRAFTS
from speculon.errors import InvalidParameter
from speculon.proposers.registry import AUTO, check_method

MAX_K = 8  # where nobody names another
LOOKUP_METHODS = ("suffix", "ngram")  # considered always: they need no drafter


@dataclass(frozen=True, slots=True)
class AdvisePlan:
    """Raises `InvalidParameter` for what cannot be."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    at_once: int = 1  # the concurrency that the settings are for
    k: int = MAX_K  # the largest K considered
    method: str = AUTO  # considered beside the shipped ones
    repeats: int = 2  # of the live measurement; 0: none

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_DRAFTS:
            reason = f"must be from 1 to {MAX_DRAFTS}: the largest K considered"
            raise InvalidParameter("num_speculative_tokens", self.k, reason)
        if self.repeats < 0:
            raise InvalidParameter("repeats", self.repeats, "must be at least 0")
        check_method(self.method)
        if not self.concurrency or min(self.concurrency) < 1:
            named = ",".join(map(str, self.concurrency))
            raise InvalidParameter("concurrency", named, "whole numbers from 1 on")
        if self.at_once not in self.batches:
            reason = f"is not among the numbers measured, {self.batches}"
            raise InvalidParameter("at_once", self.at_once, reason)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch size 1 is always among them: the others are compared with it."""
        return tuple(sorted({1, *self.concurrency}))
