"""What a round took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculon.core import Proposal


@dataclass(frozen=True, slots=True)
class Timing:
    """In ms."""

    target_ms: float | None = None  # of the step without its proposals; None where it also computed prompts
    proposals: Mapping[str, Proposal] = field(default_factory=dict)  # by method
    decide_ms: float = 0.0  # that deciding took
