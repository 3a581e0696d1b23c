"""Whether the linear layers of a model are in 4 or 8 bits, and rounding to these."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from speculon.core.config.speculation import Quantization
from speculon.core.errors import UnsupportedModel
from speculon.loading.gguf import read_gguf
from speculon.loading.headers import Checkpoint, read_header
from speculon.loading.probe import RECURRENT_LAYERS
from speculon.target.linear import plain
from speculon.target.quantized import GROUP, fits, quantize, supported

BITS: dict[Quantization, int] = {"int4": 4, "int8": 8}
NUMBERS = ("F64", "F32", "F16", "BF16")  # types of tensors in a GGUF file that have no blocks
FOUR_BITS = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}  # bytes of a block of the types in groups of 32
HEAD_BITS = 8  # each rounding of the head moves a logit
RECURRENT = "recurrent mixers read their weights as numbers"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # their number, in configs


def stays_in_blocks(
    setting: Quantization, checkpoint: Checkpoint, config: PreTrainedConfig, device: torch.device
) -> bool:
    """Whether the quantised tensors of a GGUF file stay so."""
    return setting == "auto" and checkpoint.blocks and obstacle(config, device) is None


def round_weights(model: PreTrainedModel, setting: Quantization, checkpoint: Checkpoint) -> None:
    """Rounds each plain linear layer to the bits that the setting names, and the head to 8.

    Raises `UnsupportedModel` where that cannot be.
    """
    if setting not in BITS:
        return
    reason = obstacle(model.config, model.device)
    if checkpoint.quantization is not None:
        reason = f"its weights are quantised already ({checkpoint.quantization})"
    if reason:
        raise UnsupportedModel(f"{checkpoint.path}: quantization = {setting!r}: {reason}")
    quantize_model(model, BITS[setting])


def obstacle(config: PreTrainedConfig, device: torch.device) -> str | None:
    """Why the linear layers of such a model are not packed there; None where they can be."""
    text = config.get_text_config()
    if not supported(device):
        return f"torch has no products of packed weights on {device.type}"
    if not getattr(text, "num_attention_heads", None):
        return RECURRENT
    if RECURRENT_LAYERS & {*(getattr(text, "layer_types", None) or ())}:
        return RECURRENT
    if any(getattr(text, name, None) for name in EXPERTS):
        return "experts are no linear layers"
    return None


@torch.inference_mode()
def quantize_model(model: PreTrainedModel, bits: int) -> None:
    head = model.get_output_embeddings()
    for name, layer in [(name, module) for name, module in model.named_modules() if plain(module)]:
        if fits(layer.weight.shape, layer.weight.device):
            own = HEAD_BITS if layer is head else bits
            model.set_submodule(name, quantize(layer.weight, layer.bias, own, model.dtype))


def packed_bytes(
    setting: Quantization,
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> int | None:
    """Of the weights of a model whose linear layers will be packed, by its headers; None for others."""
    if not stays_in_blocks(setting, checkpoint, config, device):
        if setting not in BITS or checkpoint.pickled or obstacle(config, device):
            return None
    total = 0
    for name, shape, bits in bits_by_tensor(setting, checkpoint):
        packs = bool(bits) and len(shape) == 2 and fits(shape, device)
        embedding = "embed" in name or "embd" in name  # stays numbers; a head that is tied to it is packed
        if packs and (not embedding or config.tie_word_embeddings):
            total += layer_bytes(prod(shape), bits, dtype)
        if embedding or not packs:
            total += prod(shape) * dtype.itemsize
    return total


def bits_by_tensor(
    setting: Quantization, checkpoint: Checkpoint
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Names and shapes of the stored tensors, and the bits that each has as a linear layer; 0: numbers."""
    if checkpoint.tensor_types is not None:
        shapes = [(tensor.name, tensor.shape, tensor.type) for tensor in read_gguf(checkpoint.path).tensors]
    else:
        headers = [read_header(file)[0] for file in checkpoint.files]
        shapes = [(name, tuple(x["shape"]), "") for header in headers for name, x in header.items()]
    for name, shape, kind in shapes:
        if setting in BITS:
            is_head = any(part in name for part in ("lm_head", "embed", "embd", "output.weight"))
            yield name, shape, HEAD_BITS if is_head and "attn" not in name else BITS[setting]
        else:
            yield name, shape, 0 if kind in NUMBERS else 4 if kind in FOUR_BITS else 8


def layer_bytes(size: int, bits: int, dtype: torch.dtype) -> int:
    """Of a packed layer of so many weights: each group of each 4 bits has a scale and a zero."""
    return size * bits // 8 + size * bits // 4 // GROUP * 2 * dtype.itemsize
