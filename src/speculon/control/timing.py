"""What a round took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """In ms."""

    target_ms: float | None = None  # of the step without its proposals; None where it also computed prompts
    proposals: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)  # method -> texts, most drafts of one, ms
