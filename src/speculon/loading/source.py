"""A drafter's folder before it is understood: its config, and its tensors' shapes under common names."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculon.core.errors import MissingWeights
from speculon.loading.headers import parameters_by_dtype, read_config, read_header, weight_files

FIRST_Q = "layers.0.self_attn.q_proj.weight"
PREFIX = re.compile(r"(?:(?:model|speculator|draft_model)\.)+")
OLD_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",
}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """A drafter's config and the shapes of its tensors, under the names used here."""

    folder: Path
    files: tuple[Path, ...]
    pickled: bool
    config: dict[str, Any]
    shapes: Shapes  # empty for pickles
    names: dict[str, str]  # name here -> name in the files
    sizes: Counter[str]  # parameters by dtype
    twice: tuple[str, ...]  # pairs of names in the files that are one name here

    @property
    def speculators_type(self) -> str | None:
        """The algorithm that the speculators format names."""
        return self.config.get("speculators_model_type")

    @property
    def architecture(self) -> str:
        return " ".join(name for name in self.config.get("architectures") or () if isinstance(name, str))

    def part(self, name: str) -> dict[str, Any]:
        """A nested table of the config, empty where it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def body(self) -> dict[str, Any]:
        """The config with its nested tables of layer sizes laid over it."""
        return {**self.config, **self.part("model"), **self.part("transformer_layer_config")}

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise MissingWeights(f"{self.folder}: no tensor {name}")
        return self.shapes[name]


def open_source(folder: Path) -> Source:
    """Reads config and headers. Raises `ModelError` for damaged files."""
    config = read_config(folder)
    files, pickled = weight_files(folder)
    shapes: Shapes = {}
    names: dict[str, str] = {}
    sizes: Counter[str] = Counter()
    twice = []
    for file in () if pickled else files:
        sizes.update(parameters_by_dtype(file))
        for theirs, tensor in read_header(file)[0].items():
            ours = own_name(theirs)
            if ours in names:
                twice.append(f"{names[ours]} and {theirs}")
            shapes[ours], names[ours] = tuple(tensor["shape"]), theirs
    return Source(folder, files, pickled, config, shapes, names, sizes, tuple(twice))


def own_name(theirs: str) -> str:
    bare = PREFIX.sub("", theirs, count=1) if PREFIX.match(theirs) else theirs
    return next(
        (new + bare.removeprefix(old) for old, new in OLD_NAMES.items() if bare.startswith(old)), bare
    )
