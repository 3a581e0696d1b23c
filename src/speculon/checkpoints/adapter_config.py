"""A LoRA adapter in the format of peft: its config and the header of its weights. Nothing is loaded.

The format is that of `save_pretrained`: adapter_config.json, and adapter_model.safetensors with the tensors
base_model.model.LAYER.lora_A.weight [r, D] and lora_B.weight [O, r] (Hu et al. 2021).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from speculon.checkpoints.headers import parameters_by_dtype, read_header, read_json
from speculon.core.errors import (
    CorruptWeights,
    MissingWeights,
    ModelError,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
READ = {"peft_type", "bias", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
# how the adapter was trained, found its layers or was saved: the tensors have the rest
WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
    *("ensure_weight_tying", "fan_in_fan_out", "init_lora_weights", "lora_dropout", "qalora_group_size"),
    *("eva_config", "loftq_config", "megatron_core", "runtime_config"),
}
# initialisations that leave the base's weights as they are; the others subtract from these
OWN_BASE = ("gaussian", "eva", "orthogonal")


class AdaptedLayer(NamedTuple):
    """What an adapter adds to one linear layer: scaling * (x A^T) B^T."""

    rank: int
    scaling: float
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """Facts about an adapter's folder."""

    name: str  # that requests choose it by
    folder: Path
    base: str | None  # the model that it was trained on, as its config names it
    layers: Mapping[str, AdaptedLayer] = field(repr=False)  # by their names in the base model
    num_parameters: int

    @property
    def file(self) -> Path:
        return self.folder / ADAPTER_WEIGHTS

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.file.stat().st_size

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def targets(self) -> tuple[str, ...]:
        """The last names of its layers."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.layers}))

    def digest(self) -> str:
        """Of all that its rows depend on; adapters of one digest are the same."""
        whole = hashlib.sha256(repr(sorted(self.layers.items())).encode())
        with self.file.open("rb") as file:
            while part := file.read(1 << 20):
                whole.update(part)
        return whole.hexdigest()[:16]


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapters(adapters: Mapping[str, str]) -> list[AdapterCheckpoint]:
    """Of each name and folder. Raises `ModelError` with name, folder and reason."""
    return [read_adapter(name, folder) for name, folder in adapters.items()]


def read_adapter(name: str, path: str | Path) -> AdapterCheckpoint:
    """Raises `ModelError` for what is missing, damaged or not supported."""
    folder = Path(path).expanduser()
    where = f"adapter {name!r}: {folder}"
    if not (folder / ADAPTER_CONFIG).is_file():
        missing = f"no {ADAPTER_CONFIG}" if folder.is_dir() else "no such folder"
        raise ModelNotFound(f"{where}: {missing}")
    config = read_json(folder / ADAPTER_CONFIG, ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{where}: {ADAPTER_CONFIG} is not a JSON object")
    refuse_others(where, config)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        if (folder / PICKLED).is_file():
            advice = "convert it with peft's save_pretrained, which writes safetensors"
            raise UnsafeCheckpoint(f"{where}: {PICKLED} is a pickle, which can run code; {advice}")
        raise MissingWeights(f"{where}: no {ADAPTER_WEIGHTS}")
    base = config.get("base_model_name_or_path")
    shapes, parameters = read_shapes(where, folder / ADAPTER_WEIGHTS)
    return AdapterCheckpoint(
        name, folder, base if isinstance(base, str) else None, layers_of(where, config, shapes), parameters
    )


def refuse_others(where: str, config: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModel` for another method than LoRA, or a variant whose sum is another one."""
    if (method := config.get("peft_type")) != "LORA":
        raise UnsupportedModel(f"{where}: peft_type {method!r} is not supported, only LORA")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModel(
            f"{where}: bias {bias!r} is not supported, only none: biases stay those of the base model"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in OWN_BASE:
        why = (
            "not supported, because it changes the weights of the base model; convert it to a plain "
            "adapter with peft"
        )
        raise UnsupportedModel(f"{where}: init_lora_weights {start!r}: {why}")
    for name, value in config.items():
        if value and name not in READ and name not in WITHOUT_EFFECT:
            raise UnsupportedModel(f"{where}: {name} = {str(value):.80} is not supported")


def read_shapes(where: str, file: Path) -> tuple[dict[str, dict[str, tuple[int, int]]], int]:
    """Layer -> side A or B -> shape, and the number of parameters, from the header of the weights.

    Raises `CorruptWeights` for a damaged file, `UnsupportedModel` for other tensors.
    """
    counts = parameters_by_dtype(file)
    if others := counts.keys() - {"float64", "float32", "float16", "bfloat16"}:
        raise UnsupportedModel(
            f"{where}: weights in {', '.join(sorted(others))} are not supported, only floating-point ones"
        )
    shapes: dict[str, dict[str, tuple[int, int]]] = {}
    for name, tensor in read_header(file)[0].items():
        match, shape = TENSOR.fullmatch(name), tensor["shape"]
        if match is None or len(shape) != 2:
            raise UnsupportedModel(
                f"{where}: tensor {name} of shape {shape} is not supported: it is not a matrix lora_A or "
                "lora_B of a layer"
            )
        shapes.setdefault(match["layer"], {})[match["side"]] = (shape[0], shape[1])
    return shapes, counts.total()


def layers_of(
    where: str, config: Mapping[str, Any], shapes: Mapping[str, Mapping[str, tuple[int, int]]]
) -> dict[str, AdaptedLayer]:
    """Raises `CorruptWeights` where config and tensors contradict each other."""
    if not shapes:
        raise MissingWeights(f"{where}: {ADAPTER_WEIGHTS} has no tensors")
    layers = {}
    for name, sides in shapes.items():
        if sides.keys() != {"A", "B"}:
            missing = "B" if "A" in sides else "A"
            raise MissingWeights(f"{where}: layer {name} has no lora_{missing}")
        rank = number(where, config, "r", "rank_pattern", name)
        alpha = number(where, config, "lora_alpha", "alpha_pattern", name)
        if not (rank >= 1 and sides["A"][0] == sides["B"][1] == rank):
            message = f"{name}: lora_A {sides['A']} and lora_B {sides['B']} are not of rank {rank:g}"
            raise CorruptWeights(f"{where}: {message}")
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        layers[name] = AdaptedLayer(int(rank), scaling, sides["A"][1], sides["B"][0])
    return layers


def number(where: str, config: Mapping[str, Any], name: str, patterns: str, layer: str) -> float:
    """Of a layer: the value of the first pattern that the end of its name matches, else the config's own."""
    value = config.get(name)
    for pattern, own in (config.get(patterns) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", layer):
                value = own
                break
        except re.error as error:
            raise ModelError(
                f"{where}: {patterns} has the pattern {pattern!r}, which is not a regular expression: {error}"
            ) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{where}: {name} = {str(value):.80}: must be a number")
    return value
