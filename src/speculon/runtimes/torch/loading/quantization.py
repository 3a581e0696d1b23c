"""Whether the linear layers of a model are in 4 or 8 bits, and rounding to these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from speculon.checkpoints.gguf.header import read_gguf
from speculon.checkpoints.headers import Checkpoint
from speculon.core.config.speculation import Quantization
from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.loading.probe import RECURRENT_LAYERS
from speculon.runtimes.torch.model.linear import plain
from speculon.runtimes.torch.model.quantized import GROUP, fits, layer_bytes, quantize, supported

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
BITS: dict[Quantization, int] = {"int4": 4, "int8": 8}
NUMBERS = ("F64", "F32", "F16", "BF16")  # types of tensors in a GGUF file that have no blocks
FOUR_BITS = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}  # bytes of a block of the types in groups of 32
HEAD_BITS = 8  # each rounding of the head moves a logit
LEAST = 0.5  # of the weights outside of embeddings: with fewer packed, a setting would do next to nothing


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The weights of a model that is not loaded, in elements."""

    layers: tuple[int, ...]  # of each linear layer that can be packed
    head: int  # of the head, where it can be packed
    tied: bool  # whether the head is the embedding
    total: int
    obstacle: str | None

    @classmethod
    def of(cls, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> WeightSizes:
        """Of the model that transformers makes of a config; `obstacle` says why it is not packed."""
        text = config.get_text_config()
        recurrent = RECURRENT_LAYERS & {*(getattr(text, "layer_types", None) or ())}
        reason = "recurrent mixers read their weights as numbers" if recurrent else None
        if not supported(dtype, device):
            reason = f"torch has no products of packed weights in {dtype} on this {device.type}"
        try:
            with torch.device("meta"):
                model = model_class(config).from_config(config)
        except Exception as error:  # of any model code; the loader says what is wrong
            return cls((), 0, False, 0, f"its layers are unknown ({type(error).__name__})")
        return cls.of_model(model, reason)

    @classmethod
    def of_model(cls, model: PreTrainedModel, reason: str | None) -> WeightSizes:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
        linear = [layer for _, layer in packable(model)]
        layers = tuple(x.weight.numel() for x in linear if x is not head)
        tied = head is not None and head.weight is embedding
        total = sum({id(p): p.numel() for p in model.parameters()}.values())
        weights = [p for p in text_part(model).parameters() if p is not embedding]
        rest = sum(p.numel() for p in weights if head is None or p is not head.weight)
        if reason is None and any(p.dim() > 2 for p in weights):
            reason = "experts are no linear layers"
        if reason is None and sum(layers) < LEAST * rest:
            share = f"{sum(layers):,} of {rest:,} weights"
            reason = f"{share} are in linear layers [O, D] with O a multiple of 16 and D of {GROUP}"
        in_head = head.weight.numel() if any(x is head for x in linear) else 0
        return cls(layers, in_head, tied, total, reason)


def model_class(config: PreTrainedConfig) -> Any:
    """Transformers' class of models with such a config; those that see images are no causal ones."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def text_part(model: PreTrainedModel) -> nn.Module:
    """A model without its vision tower, whose weights stay numbers."""
    return model.get_decoder() if hasattr(model.base_model, "get_image_features") else model


def packable(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """The linear layers by name that torch's packed operators take."""
    parts = {*text_part(model).modules(), model.get_output_embeddings()}
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if layer in parts and plain(layer) and fits(layer.weight.shape)
    ]


def native_bf16() -> bool:
    """Whether this CPU has instructions for bf16; without them its products take several times as long."""
    # older builds of torch have no get_capabilities: no bf16 then
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(flag) for flag in BF16_FLAGS)


def will_be_packed(
    setting: Quantization,
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether weights are rounded to 4 or 8 bits, or stay so as a GGUF file has them.

    Blocks of a file do not stay in fp32, where torch's packed products take ten times as long as others.
    """
    in_blocks = setting == "auto" and checkpoint.blocks and dtype is not torch.float32
    return (in_blocks or setting in BITS) and WeightSizes.of(config, dtype, device).obstacle is None


@torch.inference_mode()
def round_weights(
    model: PreTrainedModel, setting: Quantization, checkpoint: Checkpoint, device: torch.device
) -> None:
    """Rounds each linear layer to the bits that the setting names, and the head to 8.

    Raises `UnsupportedModel` where that cannot be.
    """
    if setting not in BITS:
        return
    reason = WeightSizes.of(model.config, model.dtype, device).obstacle
    if checkpoint.quantization is not None:
        reason = f"its weights are quantised already ({checkpoint.quantization})"
    if reason:
        raise UnsupportedModel(f"{checkpoint.path}: quantization = {setting!r}: {reason}")
    head = model.get_output_embeddings()
    for name, layer in packable(model):
        bits = HEAD_BITS if layer is head else BITS[setting]
        made = quantize(layer.weight, layer.bias, bits, model.dtype, name=name, device=device)
        model.set_submodule(name, made)


def packed_bytes(
    setting: Quantization,
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> int | None:
    """Of the weights of a model whose linear layers will be packed, before it is loaded; None for others."""
    if not will_be_packed(setting, checkpoint, config, dtype, device):
        return None
    sizes = WeightSizes.of(config, dtype, device)
    if setting == "auto":
        packed = list(sizes_in_blocks(checkpoint, sizes, device))
    else:
        packed = [(size, BITS[setting]) for size in sizes.layers] + [(sizes.head, HEAD_BITS)]
    numbers = sizes.total - sum(size for size, _ in packed) + (sizes.head if sizes.tied else 0)
    return numbers * dtype.itemsize + sum(layer_bytes(size, bits, dtype) for size, bits in packed)


def sizes_in_blocks(
    checkpoint: Checkpoint, sizes: WeightSizes, device: torch.device
) -> Iterator[tuple[int, int]]:
    """Elements and bits of the layers that stay in blocks."""
    for tensor in read_gguf(checkpoint.path).tensors:
        is_head = tensor.name.startswith("token_embd" if sizes.tied else "output.")
        if len(tensor.shape) != 2 or not fits(tensor.shape) or not in_bits(tensor.type, is_head, device):
            continue
        if sizes.head if is_head else not tensor.name.startswith("token_embd"):
            yield prod(tensor.shape), 4 if tensor.type in FOUR_BITS else 8


def in_bits(block_type: str, is_head: bool, device: torch.device) -> bool:
    """Whether a tensor of a GGUF file stays packed.

    Layers in 8 bits do not where bf16 is multiplied natively: from 4 rows on that is faster, and a prompt
    takes a quarter of the time. A head does: no other weight is as large, and of a prompt it has one row.
    """
    if block_type in FOUR_BITS or block_type in NUMBERS:
        return block_type in FOUR_BITS
    return is_head or (device.type == "cpu" and not native_bf16())
