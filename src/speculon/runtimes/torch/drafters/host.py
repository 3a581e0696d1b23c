"""What drafters are built for: the target in memory, and the largest step beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculon.decoding.text.tokenizer import Tokenizer
    from speculon.runtimes.torch.model.target import Target


@dataclass(frozen=True, slots=True)
class DrafterHost:
    """What a drafter with weights may know of the target and its settings before it is built."""

    model: Target  # whose weights it may share, and on which it is tried
    tokenizer: Tokenizer | None = None
    rows: int = 0  # T and R of the largest forward
    scored: int = 0
    sequences: int = 0  # that run at a time
    fuse: bool = True  # whether models are fused, and compiled then
    compile: bool = False
