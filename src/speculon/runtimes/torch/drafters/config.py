"""What the configs of drafters with a network have in common, and the targets that these fit."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from speculon.checkpoints.headers import Checkpoint, read_header
from speculon.core.config.speculation import Quantization
from speculon.core.errors import CorruptWeights, ModelError, WrongPair

# how people call the projects that publish drafters
AUTHORS = {
    "safeailab": "SafeAILab",
    "specforge": "SpecForge",
    "modelopt": "ModelOpt",
    "angelslim": "AngelSlim",
    "nebius": "nebius",
    "speculators": "speculators",
    "z-lab": "z-lab",
    "deepspec": "DeepSpec",
    "meta": "Meta",
    "google": "Google",
}
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
INTEGERS = {"I64": "q", "I32": "i"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A drafter's network, and the checkpoint it is from. Widths come from its tensors."""

    hidden: int  # H
    target_hidden: int  # Ht
    taps: int  # k: fc.weight is [H, k * Ht]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int | None  # V; None where neither config nor tensors tell
    draft_vocab_size: int | None  # Vd; V where all of it is drafted from
    eps: float
    rope: dict[str, Any]  # as transformers' `rope_parameters`; the drafter's own, never the target's
    act: str = "silu"
    windows: tuple[int | None, ...] = ()  # W of each layer's attention
    tap_ids: tuple[int, ...] | None = None  # as the config has them
    speculative_tokens: int | None = None  # K that its author suggests
    max_context: int | None = None  # positions, where its config names them
    verifier: tuple[str, ...] = ()  # architectures of the target it was trained for, where stated
    # the tensor's name here (`layers.0.self_attn.q_proj.weight`, `fc.weight`) -> its name in the files
    names: Mapping[str, str] = field(default_factory=dict)
    path: Path = Path()
    files: tuple[Path, ...] = ()
    format: str = ""  # of which project
    notes: tuple[str, ...] = ()
    dtype: str | None = None  # of most parameters
    num_bytes: int = 0  # of the weight files
    quantization: Quantization = "auto"  # what its linear layers are rounded to: `draft_quantization`

    @property
    def max_drafts(self) -> int | None:
        """The most drafts of one forward that drafts several; None where a forward drafts one."""
        return None

    @property
    def page_windows(self) -> tuple[int | None, ...]:
        """The window of each layer over pages."""
        return self.windows

    def has(self, module: str) -> bool:
        """Whether the checkpoint has the weight of such a module."""
        return f"{module}.weight" in self.names

    def tap_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Sets of 0-based target layers whose outputs may be tapped (-1: embeddings), the likeliest first.

        Raises `WrongPair` where none lies within a target of `num_layers` layers.
        """
        layouts = self._likely_layouts(num_layers)
        within = tuple(taps for taps in layouts if min(taps) >= -1 and max(taps) < num_layers)
        if not within:
            taps = ", ".join(map(str, layouts[0]))
            raise WrongPair(
                f"{self.path}: reads layers {taps}, the target's layers go from 0 to {num_layers - 1}"
            )
        return within

    def _likely_layouts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    def check_architecture(self, name: str) -> tuple[str, ...]:
        """Warnings about the class of a target."""
        if self.verifier and name not in self.verifier:
            return (f"made for {', '.join(self.verifier)}, the target is {name}",)
        return ()

    def summary(self, num_layers: int | None = None) -> str:
        """One line for people; `num_layers` is the target's, where it is known."""
        raise NotImplementedError

    def describe_taps(self, num_layers: int | None = None) -> str:
        """Where it reads the target, for people."""
        raise NotImplementedError

    def describe_block(self) -> str | None:
        """How a block is drafted from, for people; None where a forward drafts one token."""
        return None

    @property
    def size(self) -> str:
        """Its dtype and bytes, for people."""
        return f"{DTYPE_NAMES.get(self.dtype or '', self.dtype)}, {self.num_bytes / 1e6:.1f} MB"

    @property
    def shape(self) -> str:
        """Its layers, for people."""
        return f"{self.layers} layer{'s' * (self.layers > 1)} of {self.hidden:,}"


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


def check_pair(config: DrafterConfig, target: TargetShape) -> tuple[str, ...]:
    """Warnings about the pair. Raises `WrongPair` where the drafter cannot draft for the target."""
    if config.target_hidden != target.hidden:
        widths = f"width {config.target_hidden:,}, the target's are {target.hidden:,}"
        raise WrongPair(f"{config.path}: reads hidden states of {widths}")
    if config.vocab_size not in (None, target.vocab_size):
        sizes = f"{config.vocab_size:,}, the target's is {target.vocab_size:,}"
        raise WrongPair(f"{config.path}: made for a vocabulary of {sizes}")
    config.tap_layouts(target.num_layers)
    return config.check_architecture(target.architecture)


def read_offsets(config: DrafterConfig) -> list[int]:
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
