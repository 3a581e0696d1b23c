"""What a drafter's checkpoint holds, whichever project wrote it: one sheet of facts, in one set of names, and
whom it fits.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from speculon.checkpoints.headers import Checkpoint, read_header
from speculon.errors import CorruptWeights, ModelError, WrongPair

MAKERS = {
    "safeailab": "SafeAILab",
    "specforge": "SpecForge",
    "modelopt": "ModelOpt",
    "angelslim": "AngelSlim",
    "nebius": "nebius",
    "speculators": "speculators",
}
INTEGERS = {"I64": "q", "I32": "i"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head (Li 2025). Widths come from its tensors, the rest from its config."""

    path: Path
    files: tuple[Path, ...]
    dialect: str  # who wrote it: safeailab | specforge | modelopt | angelslim | nebius | speculators
    # the tensor's name here (`layers.0.self_attn.q_proj.weight`, `fc.weight`) -> its name in the files
    names: dict[str, str]
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
    # id j is the output of layer j, or (False) the stream that enters it; None: cannot be told
    after: bool | None
    speculative_tokens: int | None  # K that its maker suggests
    verifier: tuple[str, ...] = ()  # architectures of the target it was made for, where it says so
    notes: tuple[str, ...] = field(default=())
    dtype: str | None = None  # of most parameters
    num_bytes: int = 0  # of the weight files

    def tap_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """The taps as outputs of 0-based target layers (-1: the embeddings), the likelier reading first; one
        or two.

        Raises `WrongPair` where none of them lies within a target of so many layers.
        """
        likely = self._readings(num_layers)
        within = tuple(taps for taps in likely if taps[0] >= -1 and taps[-1] < num_layers)
        if not within:
            taps = ", ".join(map(str, likely[0]))
            raise WrongPair(
                f"{self.path}: reads layers {taps}, the target's layers go from 0 to {num_layers - 1}"
            )
        return within

    def _readings(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        usual = (1, num_layers // 2 - 1, num_layers - 4)
        if self.tap_ids is None:
            if not usual[0] < usual[1] < usual[2]:
                raise WrongPair(
                    f"{self.path}: names no layers, and the usual three need 7 of them; the target has {num_layers}"
                )
            return (usual,)
        outputs, inputs = self.tap_ids, tuple(j - 1 for j in self.tap_ids)
        if self.after is not None:
            return (outputs if self.after else inputs,)
        # Engines read these ids in two ways; where they are the usual ones of a way, that is how they were
        # meant.
        if inputs == usual:
            return (inputs,)
        return (outputs,) if outputs == usual or outputs[0] == 1 else (outputs, inputs)

    def line(self, num_layers: int | None = None) -> str:
        """What was found, for a person; `num_layers` are the target's, where it is known."""
        layers = f"{self.layers} layer{'s' * (self.layers > 1)} of {self.hidden:,}"
        taps = f"{self.taps} taps of width {self.target_hidden:,} {self.describe_taps(num_layers)}"
        tokens = f"{self.draft_vocab_size:,} of {self.vocab_size:,} tokens"
        dtype = SHORT.get(self.dtype or "", self.dtype)
        return f"EAGLE-3 head by {MAKERS[self.format]}: {layers}, {taps}, {tokens}; {dtype}, {self.num_bytes / 1e6:.1f} MB"

    def describe_taps(self, num_layers: int | None = None) -> str:
        if num_layers is not None:
            return " or ".join(
                f"after layers {', '.join(map(str, taps))}" for taps in self.tap_layouts(num_layers)
            )
        if self.tap_ids is None:
            return "after layers 1, N/2 - 1, N - 4 of N"
        ids = ", ".join(map(str, self.tap_ids))
        if self.after is None and self.tap_ids[0] != 1:
            return f"at layers {ids} (before or after them)"
        return f"before layers {ids}" if self.after is False else f"after layers {ids}"


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a drafter must know of its target."""

    hidden: int
    vocab_size: int
    num_layers: int
    architecture: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TargetShape:
        """Raises `ModelError` where the config does not say."""
        hidden, vocab, layers = checkpoint.hidden_size, checkpoint.vocab_size, checkpoint.num_layers
        if hidden is None or vocab is None or layers is None:
            raise ModelError(
                f"{checkpoint.path}: its config lacks hidden_size, vocab_size or num_hidden_layers"
            )
        return cls(hidden, vocab, layers, checkpoint.architecture)


def check_pair(sheet: Eagle3Config, target: TargetShape) -> tuple[str, ...]:
    """Raises `WrongPair` where the head cannot draft for the target; returns what is odd about the pair all
    the same.
    """
    if sheet.target_hidden != target.hidden:
        raise WrongPair(
            f"{sheet.path}: reads hidden states of width {sheet.target_hidden:,}, the target's are {target.hidden:,}"
        )
    if sheet.vocab_size != target.vocab_size:
        raise WrongPair(
            f"{sheet.path}: made for a vocabulary of {sheet.vocab_size:,}, the target's is {target.vocab_size:,}"
        )
    sheet.tap_layouts(target.num_layers)
    if sheet.verifier and target.architecture not in sheet.verifier:
        return (f"made for {', '.join(sheet.verifier)}, the target is {target.architecture}",)
    return ()


def read_offsets(sheet: Eagle3Config) -> list[int]:
    """d2t [Vd] from its file; empty where it has none. Raises `CorruptWeights` for other than integers."""
    name = sheet.names.get("d2t")
    for file in sheet.files if name else ():
        header, data = read_header(file)
        if name in header:
            kind, (first, last) = header[name]["dtype"], header[name]["data_offsets"]
            if kind not in INTEGERS:
                raise CorruptWeights(f"{file}: {name} is of {kind}, not of integers")
            with file.open("rb") as weights:
                weights.seek(data + first)
                numbers = array(INTEGERS[kind], weights.read(last - first))
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers.tolist()
    return []


def check_offsets(path: Path, offsets: Sequence[int], vocab_size: int) -> None:
    """Draft id j stands for target id j + offsets[j]: raises `CorruptWeights` unless these ascend and lie in
    the vocabulary.
    """
    ids = [j + offset for j, offset in enumerate(offsets)]
    for j, (before, after) in enumerate(pairwise(ids)):
        if before >= after:
            raise CorruptWeights(
                f"{path}: d2t sends draft ids {j} and {j + 1} to {before} and {after}, which does not ascend"
            )
    if ids and not 0 <= ids[0] <= ids[-1] < vocab_size:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise CorruptWeights(
            f"{path}: d2t sends a draft id to {wrong:,}, outside the vocabulary of {vocab_size:,}"
        )
