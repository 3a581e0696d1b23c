"""Whether the linear layers of a model are in 4 or 8 bits, and rounding to these."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from speculon.core.config.engine import Quantization
from speculon.core.errors import UnsupportedModel
from speculon.loading.headers import Checkpoint
from speculon.loading.probe import RECURRENT_LAYERS
from speculon.target.linear import plain
from speculon.target.quantized import fits, quantize, supported

BITS: dict[Quantization, int] = {"int4": 4, "int8": 8}
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
        if fits(*layer.weight.shape, layer.weight.device):
            own = HEAD_BITS if layer is head else bits
            model.set_submodule(name, quantize(layer.weight, layer.bias, own, model.dtype))
