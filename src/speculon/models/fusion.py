"""Which layers of a target were replaced by fused ones, and why others were not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Fusion:
    """Counts of fused layers, and the reasons for the others."""

    layers: int  # of the model
    blocks: int = 0  # fused layers
    one_loop: bool = False  # the loop replaces the stock forward
    compiled: bool = False
    captured: bool = False  # as CUDA graphs between attentions
    refused: Counter[str] = field(default_factory=Counter)  # reason -> layers or modules

    def __str__(self) -> str:
        loop = ", one loop" * self.one_loop + ", compiled" * self.compiled + ", captured" * self.captured
        why = "".join(f"; {reason} ({count})" for reason, count in self.refused.items())
        return f"{self.blocks} of {self.layers} layers{loop}{why}"
