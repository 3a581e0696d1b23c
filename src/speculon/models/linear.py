"""Linear layers laid out for the machine: those of one input as one product, in the layout that the library's kernels like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COPIED_HEAD = 0.1  # of the weights: the largest head that is worth a second copy

Product = Callable[[Tensor], Tensor]  # [T, D] -> [T, O]

if torch.backends.mkldnn.is_available():  # not on every machine: a build for Macs has no such operations
    packed_product = torch.ops.mkldnn._linear_pointwise.default  # looked up once: that alone is 2 % of a step


@dataclass(slots=True)
class Linear:
    """x W^T + b with W as it lies in the checkpoint."""

    weight: Tensor  # [O, D]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Packed:
    """The same with W in blocks (oneDNN): on CPU 1.4 to 2 times as fast for the few rows of a decoding step."""

    weight: Tensor  # opaque
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return packed_product(x, self.weight, self.bias, "none", [], "")


@dataclass(slots=True)
class Beside:
    """Products of one input, their results side by side: for weights that must stay where they are."""

    parts: Sequence[Linear]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def plain(module: object) -> bool:
    """Whether a module is a linear layer and nothing more: not quantised, not adapted, not hooked."""
    return type(module) is nn.Linear and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches what goes through a module, or changes it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@torch.no_grad()
def joined(stock: Sequence[nn.Linear], share: bool) -> Product:
    """One product for linear layers of the same input. With `share` their weights are used where they are, else laid out anew."""
    parts = [Linear(layer.weight.detach(), None if layer.bias is None else layer.bias.detach()) for layer in stock]
    if share:
        return parts[0] if len(parts) == 1 else Beside(parts)
    bias = None
    if any(part.bias is not None for part in parts):
        bias = torch.cat([part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts])
    weight = parts[0].weight if len(parts) == 1 else torch.cat([part.weight for part in parts])
    return packed(weight, bias) if packable(weight.dtype, weight.device) else Linear(weight, bias)


def packable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library multiplies by packed weights of this kind here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def head_is_copied(head: int, weights: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a head of so many bytes is packed. Meanwhile it lies here twice; for good, where it is the embedding too."""
    return packable(dtype, device) and head <= COPIED_HEAD * weights


def packed(weight: Tensor, bias: Tensor | None) -> Packed:
    """`weight` copied into blocks for any number of rows."""
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)
