"""Layers for multi-token prediction (MTP) in a target's own checkpoint, found by the names of its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculon.checkpoints.headers import Checkpoint, read_checkpoint, read_header
from speculon.core.errors import MissingWeights, ModelError, UnsupportedModel

MTP = "mtp"  # the method
PARTS = ("embed_norm", "state_norm", "proj", "norm")  # what each module needs beside its layer
UNPACKED = ("F64", "F32", "F16", "BF16")
WRAPPERS = r"(?:model\.|language_model\.)*"
# tensors that belong to prediction layers of any layout
OTHERS = re.compile(rf"{WRAPPERS}mtp[._]")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one family of models names its modules; a tensor that `names` lacks belongs to the layer."""

    family: str
    begin: re.Pattern[str]  # the tensor that every module has, up to its prefix; `k` numbers the modules
    names: Mapping[str, str]  # stored -> here
    hidden_first: bool = False  # the hidden state comes before the embedding


LAYOUTS = (
    TensorLayout(
        "DeepSeek",
        re.compile(rf"(?P<at>{WRAPPERS}layers\.(?P<k>\d+)\.)eh_proj\.weight"),
        {
            "enorm": "embed_norm",
            "hnorm": "state_norm",
            "eh_proj": "proj",
            "shared_head.norm": "norm",
            "shared_head.head": "head",
            "embed_tokens": "embed",
        },
    ),
    TensorLayout(
        "Qwen",
        re.compile(r"(?P<at>mtp\.)fc\.weight"),
        {
            "pre_fc_norm_embedding": "embed_norm",
            "pre_fc_norm_hidden": "state_norm",
            "fc": "proj",
            "norm": "norm",
            "lm_head": "head",
            "embed_tokens": "embed",
            "layers.0": "layer",
        },
    ),
    TensorLayout(
        "MiMo",
        re.compile(rf"(?P<at>{WRAPPERS}mtp_layers\.(?P<k>\d+)\.)input_proj\.weight"),
        {
            "token_layernorm": "embed_norm",
            "hidden_layernorm": "state_norm",
            "input_proj": "proj",
            "final_layernorm": "norm",
        },
        hidden_first=True,
    ),
)


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The prediction modules of one checkpoint, in the order in which they draft."""

    path: Path
    family: str
    hidden_first: bool
    hidden: int
    modules: tuple[Mapping[str, str], ...]  # of each module: name here -> name in the files
    num_parameters: int
    files: tuple[Path, ...]

    def has(self, part: str) -> bool:
        """Whether every module has a tensor of this part."""
        return all(f"{part}.weight" in module for module in self.modules)

    def has_experts(self, module: int) -> bool:
        return any(".experts." in name for name in self.modules[module])

    def summary(self) -> str:
        count = f"{len(self.modules)} module{'s' * (len(self.modules) != 1)}"
        return f"MTP, {count} named as {self.family}'s, {self.num_parameters:,} parameters"


def find_mtp(folder: str | Path) -> MtpConfig | None:
    """The prediction modules in a model's folder; None where it has none.

    Raises `ModelError` for a folder that cannot be read, `UnsupportedModel` for modules that cannot be used.
    """
    checkpoint = read_checkpoint(folder)
    if checkpoint.pickled or checkpoint.tensor_types is not None:  # a GGUF file with such tensors is refused
        return None
    tensors = {name: entry for file in checkpoint.files for name, entry in read_header(file)[0].items()}
    for layout in LAYOUTS:
        if prefixes := prefixes_of(layout, tensors, checkpoint):
            modules = tuple(module_of(layout, prefix, tensors, checkpoint.path) for prefix in prefixes)
            return checked(layout, modules, tensors, checkpoint)
    if other := next((name for name in tensors if OTHERS.match(name)), None):
        raise UnsupportedModel(f"{checkpoint.path}: the layout of its MTP tensors ({other}) is not supported")
    return None


def mtp_of(folder: str | Path) -> MtpConfig:
    """The prediction modules in a model's folder. Raises `UnsupportedModel` where it has none."""
    modules = find_mtp(folder)
    if modules is None:
        raise UnsupportedModel(f"{folder}: method {MTP} needs MTP layers, and this checkpoint has none")
    return modules


def mtp_alone(folder: Path, names: Collection[str]) -> MtpConfig | None:
    """The modules in a folder whose tensors `names` are nothing else, so that it is a drafter.

    Raises `ModelError` for modules that cannot be used.
    """
    begins = tuple(
        match["at"] for name in names for layout in LAYOUTS if (match := layout.begin.fullmatch(name))
    )
    alone = bool(begins) and all(name.startswith(begins) for name in names)
    return find_mtp(folder) if alone else None


def prefixes_of(layout: TensorLayout, tensors: Mapping[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Where each module begins in the files, in order."""
    prefixes = sorted(
        (int(match.groupdict().get("k") or 0), match["at"])
        for name in tensors
        if (match := layout.begin.fullmatch(name))
    )
    # DeepSeek numbers them after the target's own layers
    first = (checkpoint.num_layers or 0) if layout.family == "DeepSeek" else 0
    numbers = [number for number, _ in prefixes]
    if prefixes and numbers != [*range(first, first + len(prefixes))]:
        raise UnsupportedModel(
            f"{checkpoint.path}: MTP modules are numbered {numbers}, not from {first} on; "
            f"the config has {checkpoint.num_layers} layers"
        )
    return [prefix for _, prefix in prefixes]


def module_of(layout: TensorLayout, prefix: str, tensors: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Name here -> stored name, of one module."""
    names = {renamed(layout, name.removeprefix(prefix)): name for name in tensors if name.startswith(prefix)}
    if layout.family == "Qwen" and (more := next((n for n in names if n.startswith("layer.layers.")), None)):
        raise UnsupportedModel(
            f"{path}: {names[more]}: more than one MTP layer after one fc is not supported"
        )
    for part in PARTS:
        if f"{part}.weight" not in names:
            stored = next(old for old, new in layout.names.items() if new == part)
            raise MissingWeights(f"{path}: tensor {prefix}{stored}.weight is missing")
    return names


def renamed(layout: TensorLayout, name: str) -> str:
    for stored, here in layout.names.items():
        if name.startswith(f"{stored}."):
            return f"{here}{name.removeprefix(stored)}"
    return f"layer.{name}"


def checked(
    layout: TensorLayout,
    modules: tuple[dict[str, str], ...],
    tensors: Mapping[str, Any],
    checkpoint: Checkpoint,
) -> MtpConfig:
    """The config of modules whose shapes fit. Raises `ModelError` where they do not."""
    stored = [name for module in modules for name in module.values()]
    if packed := next((name for name in stored if tensors[name]["dtype"] not in UNPACKED), None):
        raise UnsupportedModel(
            f"{checkpoint.path}: {packed} is stored as {tensors[packed]['dtype']}; "
            f"quantised MTP layers are not supported"
        )
    hidden = checkpoint.hidden_size or 0
    for name, shape in shapes_of(hidden):
        for module in modules:
            stored_shape = tensors[module[name]]["shape"]
            if stored_shape != shape:
                raise ModelError(f"{checkpoint.path}: {module[name]} is {stored_shape}, expected {shape}")
    return MtpConfig(
        checkpoint.path,
        layout.family,
        layout.hidden_first,
        hidden,
        modules,
        sum(math.prod(tensors[name]["shape"]) for name in stored),
        checkpoint.files,
    )


def shapes_of(hidden: int) -> Iterator[tuple[str, list[int]]]:
    for part in PARTS:
        yield f"{part}.weight", [hidden, 2 * hidden] if part == "proj" else [hidden]
