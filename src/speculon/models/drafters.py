"""What a drafter's checkpoint holds, whichever project wrote it: one sheet of facts, in one set of names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Eagle3:
    """An EAGLE-3 head (Li 2025). Widths come from its tensors, the rest from its config."""

    path: Path
    files: tuple[Path, ...]
    dialect: str  # who wrote it: safeailab | specforge | modelopt | angelslim | nebius | speculators
    names: dict[str, str]  # the tensor's name here (`layers.0.self_attn.q_proj.weight`, `fc.weight`) -> its name in the files
    hidden: int  # H
    target_hidden: int  # Ht
    taps: int  # k: fc.weight is [H, k * Ht]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int  # V
    draft_vocab_size: int  # Vd; V where all of it is drafted from
    eps: float
    act: str
    rope: dict[str, Any]  # as transformers' `rope_parameters`; the drafter's own, never the target's
    windows: tuple[int | None, ...]  # of each layer's attention
    norm_before_residual: bool
    norm_before_fc: bool  # `input_norm` [k * Ht]
    fc_norm: bool  # `fc_norm.{i}` [Ht]
    norm_output: bool
    logit_scale: float
    tap_ids: tuple[int, ...] | None  # as the config has them
    after: bool | None  # id j is the output of layer j, or (False) the stream that enters it; None: cannot be told
    speculative_tokens: int | None  # K that its maker suggests
    verifier: tuple[str, ...] = ()  # architectures of the target it was made for, where it says so
    notes: tuple[str, ...] = field(default=())

    def readings(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """The taps as outputs of 0-based target layers (-1: the embeddings), the likelier reading first; one or two."""
        raise NotImplementedError
