"""A GGUF file as a model whose layers stay in 4 bits and whose head in 4 or 8, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
import transformers.modeling_gguf_pytorch_utils as reader
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from gguf import ReaderTensor
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from speculon.core.errors import CorruptWeights, MissingWeights, UnsupportedModel
from speculon.loading.gguf.config import complete_model
from speculon.loading.headers import Checkpoint
from speculon.loading.quantization import FOUR_BITS, NUMBERS, in_bits
from speculon.loading.reading import forget_header
from speculon.target.linear import plain
from speculon.target.quantized import GROUP, MIDDLE, QuantizedLinear, fits, pack_pairs, quantize_rows, slices


@torch.inference_mode()
def load_blocks(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model of a GGUF file, read tensor by tensor; blocks stay packed where `in_bits` says so.

    Raises `MissingWeights` or `CorruptWeights`.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    linear = {f"{name}.weight": module for name, module in model.named_modules() if plain(module)}
    places, tied = PackedFile(checkpoint, config, model), tied_heads(model)
    layers: dict[str, QuantizedLinear] = {}
    for tensor in places.tensors:
        name = places.names.get(tensor.name, "")
        try:
            for weight in (name, *tied.get(name, ())):
                if weight not in linear:
                    continue
                is_head = linear[weight] is model.get_output_embeddings()
                if not in_bits(tensor.tensor_type.name, is_head, device):
                    continue
                if places.packs(tensor, linear[weight].weight):
                    layers[weight] = places.layer(tensor, dtype)
            if name and name not in layers:
                value = places.numbers(tensor, dtype)
                set_module_tensor_to_device(model, name, "cpu", value=value, dtype=dtype)
        except ValueError as error:
            raise CorruptWeights(f"{checkpoint.path}: {tensor.name}: {error}") from error
        except NotImplementedError as error:
            raise UnsupportedModel(f"{checkpoint.path}: {tensor.name}: {error}") from error
    model.tie_weights()
    for weight, layer in layers.items():
        layer.bias = linear[weight].bias
        model.set_submodule(weight.removesuffix(".weight"), layer)
    if missing := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise MissingWeights(f"{checkpoint.path}: {len(missing)} tensors are missing, first {missing[0]}")
    complete_model(checkpoint, model)
    return model.to(device)


def tied_heads(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of weights that are another one, by the name of that."""
    tied: dict[str, list[str]] = {}
    if model.config.tie_word_embeddings:
        for name, source in (model._tied_weights_keys or {}).items():
            tied.setdefault(source, []).append(name)
    return tied


class PackedFile:
    """The tensors of a GGUF file, and the names and the order of rows that a model has them in."""

    def __init__(self, checkpoint: Checkpoint, config: PreTrainedConfig, model: nn.Module):
        self.tensors: list[ReaderTensor] = gguf.GGUFReader(str(checkpoint.path)).tensors
        forget_header()
        make = reader.TENSOR_PROCESSORS.get(checkpoint.architecture, reader.TensorProcessor)
        self._processor = make(config=config.to_dict())
        self.names: dict[str, str] = reader.get_gguf_hf_weights_map(model, self._processor)

    def _process(self, name: str, weights: np.ndarray) -> np.ndarray:
        beside: dict[str, Any] = {"tensors": {}}  # what a processor puts under another name
        made = self._processor.process(
            weights=weights, name=name, tensor_key_mapping=self.names, parsed_parameters=beside
        )
        return next((value.numpy() for value in beside["tensors"].values()), made.weights)

    def numbers(self, tensor: ReaderTensor, dtype: torch.dtype) -> torch.Tensor:
        """The weights as numbers, as the model has them."""
        in_blocks = tensor.tensor_type.name not in NUMBERS and tensor.data.ndim == 2
        order = self._order(tensor) if in_blocks else None
        if order is None:
            values = self._process(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(dtype)
        return torch.cat([rows.to(dtype) for rows in self._rows(tensor, order)])

    def _rows(self, tensor: ReaderTensor, order: np.ndarray) -> Iterator[torch.Tensor]:
        """Its rows in fp32 and in this order, in parts."""
        for part in slices(len(order)):
            yield torch.from_numpy(gguf.dequantize(tensor.data[order[part]], tensor.tensor_type))

    def packs(self, tensor: ReaderTensor, weight: torch.Tensor) -> bool:
        """Whether a tensor has blocks of rows that a linear layer has, too, in some order.

        Raises `ValueError` for another shape.
        """
        if tensor.tensor_type.name in NUMBERS or self._order(tensor) is None:
            return False
        shape = tuple(map(int, reversed(tensor.shape)))
        if shape != weight.shape:
            raise ValueError(f"its shape is {shape}, the config says {tuple(weight.shape)}")
        return fits(shape)

    def _order(self, tensor: ReaderTensor) -> np.ndarray | None:  # [O]
        rows = np.arange(len(tensor.data), dtype=np.float32)[:, None]
        order = self._process(tensor.name, rows)
        moved = order.shape == rows.shape and np.array_equal(np.sort(order, 0), rows)
        return order[:, 0].astype(int) if moved else None

    def layer(self, tensor: ReaderTensor, dtype: torch.dtype) -> QuantizedLinear:
        """Its rows in 4 bits, where its groups are those of a packed layer; a head's, else, in 8 bits."""
        block_type, order = tensor.tensor_type.name, self._order(tensor)
        assert order is not None
        if block_type in FOUR_BITS:
            q, scale, low = map(torch.from_numpy, four_bits(tensor.data[order], block_type))
            zero = (low + MIDDLE * scale).to(dtype)
            layer = QuantizedLinear(pack_pairs(q), scale.to(dtype), zero, None, 4)
        else:
            layer = quantize_rows(self._rows(tensor, order), None, 8, dtype)
        layer.stored = block_type
        return layer


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
