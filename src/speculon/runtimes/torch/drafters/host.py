"""What a drafter is built for: the loaded target, and the size of the largest step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculon.decoding.text.tokenizer import Tokenizer
    from speculon.runtimes.torch.model.target import Target


@dataclass(frozen=True, slots=True)
class DrafterHost:
    """What a drafter with weights gets to know of the target and the settings when it is built."""

    model: Target  # the drafter may share its weights, and is tried on it
    tokenizer: Tokenizer | None = None
    rows: int = 0  # T, the rows of the largest forward
    scored: int = 0  # R, the scored rows of the largest forward
    sequences: int = 0  # the most sequences that run at a time
    fuse: bool = True  # whether models are fused, and with `compile` also compiled
    compile: bool = False
