"""The config of an EAGLE-3 head in one set of names, whichever project wrote it, and the targets it fits."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculon.checkpoints.headers import Checkpoint, read_header
from speculon.checkpoints.names import AUTHORS, DTYPE_NAMES
from speculon.errors import CorruptWeights, ModelError, WrongPair

if TYPE_CHECKING:
    from speculon.checkpoints.dflash_config import DFlashConfig
    from speculon.checkpoints.source import Source

INTEGERS = {"I64": "q", "I32": "i"}
MASKS = {"BOOL": "B", "U8": "B"}
ASSUMED = "assumed: its config names no layers"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head (Li 2025). Widths come from its tensors, the rest from its config."""

    path: Path
    files: tuple[Path, ...]
    format: str  # of which project: safeailab | specforge | modelopt | angelslim | nebius | speculators
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
    after: bool | None  # id j is the output of layer j (True) or its input (False); None: unknown
    speculative_tokens: int | None  # K that its author suggests
    max_context: int | None = None  # positions, where its config names them
    verifier: tuple[str, ...] = ()  # architectures of the target it was trained for, where stated
    notes: tuple[str, ...] = field(default=())
    dtype: str | None = None  # of most parameters
    num_bytes: int = 0  # of the weight files

    def tap_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """One or two sets of 0-based target layers whose outputs are tapped (-1: embeddings), likelier first.

        Raises `WrongPair` where none lies within a target of `num_layers` layers.
        """
        layouts = self._likely_layouts(num_layers)
        within = tuple(taps for taps in layouts if taps[0] >= -1 and taps[-1] < num_layers)
        if not within:
            taps = ", ".join(map(str, layouts[0]))
            raise WrongPair(
                f"{self.path}: reads layers {taps}, the target's layers go from 0 to {num_layers - 1}"
            )
        return within

    def _likely_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        usual = (1, num_layers // 2 - 1, num_layers - 4)
        if self.tap_ids is None:
            if not usual[0] < usual[1] < usual[2]:
                needed = f"the usual three need 7 of them; the target has {num_layers}"
                raise WrongPair(f"{self.path}: names no layers, and {needed}")
            return (usual,)
        outputs, inputs = self.tap_ids, tuple(j - 1 for j in self.tap_ids)
        if self.after is not None:
            return (outputs if self.after else inputs,)
        # Projects number outputs or inputs; the usual ids of one convention show that it was meant.
        if inputs == usual:
            return (inputs,)
        return (outputs,) if outputs == usual or outputs[0] == 1 else (outputs, inputs)

    def summary(self, num_layers: int | None = None) -> str:
        """One line for people; `num_layers` is the target's, where it is known."""
        layers = f"{self.layers} layer{'s' * (self.layers > 1)} of {self.hidden:,}"
        taps = f"{self.taps} taps of width {self.target_hidden:,} {self.describe_taps(num_layers)}"
        tokens = f"{self.draft_vocab_size:,} of {self.vocab_size:,} tokens"
        dtype = DTYPE_NAMES.get(self.dtype or "", self.dtype)
        size = f"{dtype}, {self.num_bytes / 1e6:.1f} MB"
        return f"EAGLE-3 head by {AUTHORS[self.format]}: {layers}, {taps}, {tokens}; {size}"

    def describe_taps(self, num_layers: int | None = None) -> str:
        if num_layers is not None:
            layouts = (", ".join(map(str, taps)) for taps in self.tap_layouts(num_layers))
            found = " or ".join(f"after layers {layout}" for layout in layouts)
            return f"{found} ({ASSUMED})" if self.tap_ids is None else found
        if self.tap_ids is None:
            return f"after layers 1, N/2 - 1, N - 4 of N ({ASSUMED})"
        ids = ", ".join(map(str, self.tap_ids))
        if self.after is None and self.tap_ids[0] != 1:
            return f"at layers {ids} (before or after them)"
        return f"before layers {ids}" if self.after is False else f"after layers {ids}"


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The target's numbers that a drafter must agree with."""

    hidden: int
    vocab_size: int
    num_layers: int
    architecture: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TargetShape:
        """Raises `ModelError` where the config lacks one of them."""
        hidden, vocab, layers = checkpoint.hidden_size, checkpoint.vocab_size, checkpoint.num_layers
        if hidden is None or vocab is None or layers is None:
            raise ModelError(
                f"{checkpoint.path}: its config lacks hidden_size, vocab_size or num_hidden_layers"
            )
        return cls(hidden, vocab, layers, checkpoint.architecture)


def check_pair(config: Eagle3Config | DFlashConfig, target: TargetShape) -> tuple[str, ...]:
    """Warnings about the pair. Raises `WrongPair` where the drafter cannot draft for the target."""
    if config.target_hidden != target.hidden:
        widths = f"width {config.target_hidden:,}, the target's are {target.hidden:,}"
        raise WrongPair(f"{config.path}: reads hidden states of {widths}")
    if config.vocab_size not in (None, target.vocab_size):
        sizes = f"{config.vocab_size:,}, the target's is {target.vocab_size:,}"
        raise WrongPair(f"{config.path}: made for a vocabulary of {sizes}")
    config.tap_layouts(target.num_layers)
    if config.verifier and target.architecture not in config.verifier:
        return (f"made for {', '.join(config.verifier)}, the target is {target.architecture}",)
    return ()


def read_offsets(config: Eagle3Config | DFlashConfig) -> list[int]:
    """d2t [Vd] from its file; empty where it has none. Raises `CorruptWeights` for another dtype."""
    return read_numbers(config.files, config.names.get("d2t"), INTEGERS)


def read_numbers(files: Sequence[Path], name: str | None, kinds: Mapping[str, str]) -> list[int]:
    """A tensor of one of these dtypes; empty where there is none. Raises `CorruptWeights` for another."""
    for file in files if name else ():
        header, data = read_header(file)
        if name in header:
            kind, (first, last) = header[name]["dtype"], header[name]["data_offsets"]
            if kind not in kinds:
                raise CorruptWeights(f"{file}: {name} is of {kind}, not of {' or '.join(kinds)}")
            with file.open("rb") as weights:
                weights.seek(data + first)
                numbers = array(kinds[kind], weights.read(last - first))
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers.tolist()
    return []


def check_draft_ids(source: Source) -> None:
    """Raises `CorruptWeights` where d2t and t2d name other tokens as those that are drafted."""
    if source.pickled or not {"d2t", "t2d"} <= source.names.keys():
        return
    offsets = read_numbers(source.files, source.names["d2t"], INTEGERS)
    mask = read_numbers(source.files, source.names["t2d"], MASKS | INTEGERS)
    check_offsets(source.folder, offsets, len(mask))
    mapped = [j + offset for j, offset in enumerate(offsets)]
    drafted = [token for token, used in enumerate(mask) if used]
    if len(mapped) != len(drafted):
        counts = f"d2t has {len(mapped):,} tokens, t2d {len(drafted):,}"
        raise CorruptWeights(f"{source.folder}: {counts}")
    for j, (one, other) in enumerate(zip(mapped, drafted, strict=True)):
        if one != other:
            raise CorruptWeights(f"{source.folder}: draft id {j} is {one:,} by d2t, {other:,} by t2d")


def check_offsets(path: Path, offsets: Sequence[int], vocab_size: int) -> None:
    """Raises `CorruptWeights` unless the target ids j + offsets[j] ascend and lie in the vocabulary."""
    ids = [j + offset for j, offset in enumerate(offsets)]
    for j, (before, after) in enumerate(pairwise(ids)):
        if before >= after:
            ids_of = f"draft ids {j} and {j + 1} to {before} and {after}"
            raise CorruptWeights(f"{path}: d2t maps {ids_of}, which does not ascend")
    if ids and not 0 <= ids[0] <= ids[-1] < vocab_size:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise CorruptWeights(
            f"{path}: d2t maps a draft id to {wrong:,}, outside the vocabulary of {vocab_size:,}"
        )
