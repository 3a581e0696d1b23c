"""What a target's forward is made of: which layers were replaced by faster ones, and why others were not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Fusion:
    """What was fused, and why the rest was not."""

    layers: int  # that a model has
    blocks: int = 0  # of them fused
    one_loop: bool = False  # no code of the stock model is left in a step
    compiled: bool = False
    captured: bool = False  # its pieces between attentions are recorded and replayed
    refused: Counter[str] = field(default_factory=Counter)  # reason -> layers or modules

    def __str__(self) -> str:
        loop = ", one loop" * self.one_loop + ", compiled" * self.compiled + ", captured" * self.captured
        why = "".join(f"; {reason} ({count})" for reason, count in self.refused.items())
        return f"{self.blocks} of {self.layers} layers{loop}{why}"
