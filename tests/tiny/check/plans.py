"""Small checks, and a planted fault."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import Tensor

from speculon import SamplingParams
from speculon.decoding import verify as verifying
from speculon.decoding.sampling import Draw, sample
from speculon.decoding.verify import Scored

PROMPTS = (
    "def add(left, right):\n    return left",
    "class Stack:\n    class Stack",
    "for value in self.values:\n for value",
)
SMALL: dict[str, Any] = {
    "prompts": PROMPTS,
    "samplers": (SamplingParams(),),
    "max_tokens": 16,
    "runs": 64,
    "positions": 4,
    "cases": 1,
    "control": 0.9,
}
TINY = {**SMALL, "runs": 16}


def credulous(spans: list[Scored], logits: Tensor, draw: Draw | None = None) -> verifying.Accepted:
    """Every draft is accepted, whatever the target samples."""
    tokens, outcomes = iter(sample(*verifying.scored_rows(spans, logits), draw) if spans else ()), []
    for span in spans:
        *_, bonus = islice(tokens, len(span.draft.tokens) + 1)
        outcomes.append(((*span.draft.tokens, bonus), range(len(span.draft.tokens))))
    return outcomes
