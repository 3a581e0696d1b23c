"""The model of a GGUF file, read tensor by tensor: as numbers, or in 4 and 8 bits as the file has them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from speculon.checkpoints.gguf.header import PREDICTION_LAYERS, GgufHeader, Tensor, read_gguf
from speculon.checkpoints.gguf.metadata import refusal
from speculon.checkpoints.locate import first_line
from speculon.core.errors import CorruptWeights, MissingWeights, UnsupportedModel
from speculon.runtimes.torch.loading.gguf.architectures import Stored, architecture_of
from speculon.runtimes.torch.loading.gguf.config import set_ends
from speculon.runtimes.torch.loading.quantization import FOUR_BITS, NUMBERS, in_bits
from speculon.runtimes.torch.model.linear import plain
from speculon.runtimes.torch.model.quantized import (
    GROUP,
    MIDDLE,
    Parts,
    QuantizedLinear,
    fits,
    on_device,
    pack_pairs,
    rounded_rows,
    slices,
)

SUFFIX, LAYER = re.compile(r"\.(weight|bias)$"), re.compile(r"(?<=\.)\d+(?=\.)")


@torch.no_grad()
def load_gguf(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype, *, packed_on: torch.device | None = None
) -> PreTrainedModel:
    """The model of a GGUF file, on the CPU. With `packed_on`, linear layers stay packed as `in_bits` says for
    that device.

    Raises `MissingWeights`, `CorruptWeights` for another shape than the config's, and `UnsupportedModel` for
    a tensor that the model does not have.
    """
    header = read_gguf(path)
    try:
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # of its class, which checks some values
        raise UnsupportedModel(f"{path}: {first_line(error)}") from error
    tied, linear = tied_heads(model), linear_layers(model)
    sources = sources_of(model, header, {name for names in tied.values() for name in names})
    data = TensorData(header)
    layers: dict[str, QuantizedLinear] = {}
    for name, source in sources.items():
        for weight in (name, *tied.get(name, ())):
            if packed_on is None or weight not in linear or not source.packs:
                continue
            is_head = linear[weight] is model.get_output_embeddings()
            if in_bits(source.tensors[0].type, is_head, packed_on):
                layers[weight] = data.layer(source, dtype, weight.removesuffix(".weight"), packed_on)
        if name not in layers:
            set_parameter(model, name, data.numbers(source, dtype))
    model.tie_weights()
    for weight, layer in layers.items():
        layer.bias = linear[weight].bias
        model.set_submodule(weight.removesuffix(".weight"), layer)
    set_ends(path, model)
    return model


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """By the names of their weights."""
    return {f"{name}.weight": module for name, module in model.named_modules() if plain(module)}


def tied_heads(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of weights that are another one, by the name of that."""
    tied: dict[str, list[str]] = {}
    if model.config.tie_word_embeddings:
        for name, source in (model._tied_weights_keys or {}).items():
            tied.setdefault(source, []).append(name)
    return tied


def set_parameter(model: nn.Module, name: str, value: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(value))


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where the numbers of a parameter are in a file."""

    stored: Stored
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]  # of the parameter
    rows: np.ndarray | None  # of the file, in the model's order; None: as they are
    columns: np.ndarray | None  # the same

    @property
    def packs(self) -> bool:
        """Whether it has blocks of rows that a packed layer can have, too."""
        in_blocks = self.tensors[0].type not in NUMBERS and len(self.shape) == 2 and self.columns is None
        return in_blocks and self.stored.keeps_rows and fits(self.shape)


def sources_of(model: PreTrainedModel, header: GgufHeader, tied: set[str]) -> dict[str, TensorSource]:
    """The source of each parameter but the tied ones. Every tensor of the file is one, or is refused."""
    architecture, tensors = architecture_of(header), header.by_name
    sources: dict[str, TensorSource] = {}
    missing: list[str] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tied:
            continue
        stored, names = place_of(name, architecture.tensors)
        if stored is None or any(one not in tensors for one in names):
            missing.append(name)
            continue
        found = tuple(tensors[one] for one in names)
        for tensor in found:
            check_shape(header, tensor, stored_shape(stored, tuple(parameter.shape)))
        rows = stored.rows(model.config, found[0].shape[0]) if stored.rows else None
        columns = stored.columns(model.config, found[0].shape[-1]) if stored.columns else None
        sources[name] = TensorSource(stored, found, tuple(parameter.shape), rows, columns)
    if missing:
        raise MissingWeights(f"{header.path}: {len(missing)} tensors are missing, first {missing[0]}")
    used = {tensor.name for source in sources.values() for tensor in source.tensors} | {*architecture.factors}
    beyond = prediction_layers(header, model.config.num_hidden_layers)
    if unused := [one for one in tensors if one not in used and not one.startswith(beyond)]:
        raise refusal(header, f"it has a tensor {unused[0]}, for which its model has no place")
    return sources


def prediction_layers(header: GgufHeader, num_layers: int) -> tuple[str, ...]:
    """The beginnings of their tensors' names. Where an architecture has none, its config refuses the file."""
    return tuple(f"blk.{num_layers + i}." for i in range(header.number(PREDICTION_LAYERS) or 0))


def place_of(name: str, tensors: Mapping[str, Stored]) -> tuple[Stored | None, tuple[str, ...]]:
    """How a parameter is stored, and the names of its tensors; None where that is not known."""
    suffix = SUFFIX.search(name)
    layer = LAYER.search(name)
    stored = tensors.get(LAYER.sub("*", SUFFIX.sub("", name), count=1))
    if stored is None:
        return None, ()
    end = suffix[0] if suffix else ""
    return stored, tuple(one.replace("*", layer[0] if layer else "") + end for one in stored.names)


def stored_shape(stored: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each tensor of a parameter of this shape."""
    if stored.transposed:
        shape = (*shape[:-2], *reversed(shape[-2:]))
    number = len(stored.names)
    return shape if number == 1 else (shape[0], shape[1] // number, *shape[2:])


def check_shape(header: GgufHeader, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises `CorruptWeights` for another shape. The converter leaves out dimensions of 1."""
    if [n for n in tensor.shape if n != 1] != [n for n in expected if n != 1]:
        what = f"its shape is {tensor.shape}, the config says {expected}"
        raise CorruptWeights(f"{header.path}: {tensor.name}: {what}")


class TensorData:
    """The data of a file's tensors, of which no copy is kept."""

    def __init__(self, header: GgufHeader):
        self._path, self._begin = header.path, header.begin

    def _rows(self, tensor: Tensor) -> np.ndarray:  # [rows, bytes]
        """A vector of plain numbers has a row for each, as it may be in another order.

        Each tensor is mapped alone, so that what was read of the others leaves the memory.
        """
        vector = len(tensor.shape) == 1 and tensor.type in NUMBERS
        rows = tensor.size if vector else math.prod(tensor.shape[:-1])
        begin, size = self._begin + tensor.begin, (tensor.num_bytes,)
        # torch warns of arrays that are read-only
        return np.memmap(self._path, mode="c", offset=begin, shape=size).reshape(rows, -1)

    def _dequantized(self, tensor: Tensor, order: np.ndarray | None) -> Iterator[np.ndarray]:
        """Its rows in fp32 and in this order, in parts."""
        rows, kind = self._rows(tensor), gguf.GGMLQuantizationType[tensor.type]
        for part in slices(len(rows)):
            yield gguf.dequantize(rows[part] if order is None else rows[order[part]], kind)

    def numbers(self, source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
        """A parameter as the model has it."""
        with self._errors(source):
            return self._numbers(source, dtype)

    def _numbers(self, source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
        stored, values = source.stored, []
        for tensor in source.tensors:
            value, begin = torch.empty(stored_shape(stored, source.shape), dtype=dtype), 0
            for part in self._dequantized(tensor, source.rows):
                numbers = torch.from_numpy(stored.inverse(part) if stored.inverse else part)
                end = begin + numbers.numel()
                value.view(-1)[begin:end] = numbers.view(-1)
                begin = end
            values.append(value)
        if stored.alternating:
            value = torch.stack(values, 2).flatten(1, 2)
        else:
            value = torch.cat(values, 1) if len(values) > 1 else values[0]
        if source.columns is not None:
            value = value[..., torch.from_numpy(source.columns)]
        turned = stored.transposed and value.dim() > 1
        return value.transpose(-1, -2).contiguous() if turned else value

    def layer(
        self, source: TensorSource, dtype: torch.dtype, name: str, device: torch.device
    ) -> QuantizedLinear:
        """Its rows in 4 bits, where its groups are those of a packed layer; a head's, else, in 8 bits."""
        stored = source.tensors[0].type

        def read() -> Parts:
            with self._errors(source):
                return on_device(self._parts(source, dtype), device)

        bits = 4 if stored in FOUR_BITS else 8
        layer = QuantizedLinear(read, source.shape, None, bits, dtype, device, name)
        layer.stored = stored
        return layer

    @torch.no_grad()
    def _parts(self, source: TensorSource, dtype: torch.dtype) -> Parts:
        tensor, order = source.tensors[0], source.rows
        if tensor.type not in FOUR_BITS:
            rows_in_fp32 = (torch.from_numpy(part) for part in self._dequantized(tensor, order))
            return rounded_rows(rows_in_fp32, source.shape[0], 8, dtype)
        rows = self._rows(tensor)
        rows = rows if order is None else rows[order]
        q, scale, low = map(torch.from_numpy, four_bits(rows, tensor.type))
        return pack_pairs(q), scale.to(dtype), (low + MIDDLE * scale).to(dtype)

    @contextmanager
    def _errors(self, source: TensorSource) -> Iterator[None]:
        """Within it what is wrong with a tensor is said with its name."""
        where = f"{self._path}: {source.tensors[0].name}"
        try:
            yield
        except ValueError as error:
            raise CorruptWeights(f"{where}: {error}") from error
        except NotImplementedError as error:
            raise UnsupportedModel(f"{where}: {error}") from error


def four_bits(data: np.ndarray, block_type: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of rows of blocks [O, bytes]: q [O, D], and the scale and the lowest weight of each group.

    The formats are those of ggml: w = scale q + low.
    """
    blocks = data.reshape(-1, FOUR_BITS[block_type])
    if block_type == "Q4_K":  # blocks of 8 groups, whose scales have 6 bits of a common one
        whole = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
        of_scale, of_low = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
        scale, low = whole[:, :1] * of_scale, -whole[:, 1:] * of_low
    else:
        whole = np.ascontiguousarray(blocks[:, :-16]).view(np.float16).astype(np.float32)
        scale = whole[:, :1]
        low = whole[:, 1:] if block_type == "Q4_1" else -MIDDLE * scale
    codes = blocks[:, 16:] if block_type == "Q4_K" else blocks[:, -16:]
    width = min(codes.shape[1], GROUP)  # so many bytes have the low halves, then the high ones, in order
    q = codes.reshape(-1, 1, width) >> np.array([[0], [4]], dtype=np.uint8) & np.uint8(15)
    rows = len(data)
    return q.reshape(rows, -1), scale.reshape(rows, -1), low.reshape(rows, -1)
