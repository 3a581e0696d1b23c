"""Linear layers joined into one product per input, in the weight layout that is fastest on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from math import prod
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.runtimes.torch.model.quantized import QuantizedLinear, joined_biases, packed_layers
from speculon.runtimes.torch.model.remembered import once

SAMPLE = (16, 512, 256)  # weights [O, D]: more than the caches of two cores hold
ROWS = (1, 5, 9, 40)
REPEATS = 15

log = logging.getLogger("speculon")

Product = Callable[[Tensor], Tensor]  # [T, D] -> [T, O]
WeightLayout = Callable[[Tensor, Tensor | None], Product]

if torch.backends.mkldnn.is_available():  # builds for Macs lack these operations
    packed_product = (
        torch.ops.mkldnn._linear_pointwise.default
    )  # looked up once: each time costs 2 % of a step


@dataclass(slots=True)
class Linear:
    """x W^T + b with W in rows, as in the checkpoint."""

    weight: Tensor  # [O, D]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Packed:
    """The same with W in oneDNN's blocks: for few rows 1.4 to 2 times as fast on one chip, 0.6 on another."""

    weight: Tensor  # opaque
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return packed_product(x, self.weight, self.bias, "none", [], "")


@dataclass(slots=True)
class SideBySide:
    """Products of one input, their results concatenated: for weights that may not be copied."""

    parts: Sequence[Product]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def plain(module: Any) -> bool:
    """Whether a module is a plain linear layer: not adapted, not hooked, and quantised only by speculon."""
    return type(module) in (nn.Linear, QuantizedLinear) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether hooks read or change the inputs or outputs of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@torch.no_grad()
def joined(stock: Sequence[nn.Linear | QuantizedLinear], share: bool) -> Product:
    """One product for linear layers of the same input. With `share` their weights are not copied."""
    parts = [join(list(run), share) for _, run in groupby(stock, key=bits)]
    return parts[0] if len(parts) == 1 else SideBySide(parts)


def bits(layer: nn.Linear | QuantizedLinear) -> int | None:
    return layer.bits if isinstance(layer, QuantizedLinear) else None


def join(stock: Sequence[Any], share: bool) -> Product:
    """The same for layers of as many bits."""
    if isinstance(stock[0], QuantizedLinear):
        return packed_layers(stock)
    parts = [
        Linear(layer.weight.detach(), None if layer.bias is None else layer.bias.detach()) for layer in stock
    ]
    if share:
        return parts[0] if len(parts) == 1 else SideBySide(parts)
    bias = joined_biases([(part.bias, len(part.weight)) for part in parts], parts[0].weight)
    weight = parts[0].weight if len(parts) == 1 else torch.cat([part.weight for part in parts])
    layout = fastest_layout(weight.dtype, weight.device)
    if layout is Linear and len(parts) == 1 and weight.device.type == "cpu":
        weight = weight.clone()  # it may lie in a mapped file
    return layout(weight, bias)


def fastest_layout(dtype: torch.dtype, device: torch.device) -> WeightLayout:
    """The layout of such weights: packed where that is supported and measures faster."""
    if not packable(dtype, device):
        return Linear
    threads = torch.get_num_threads()
    return packed if once(f"packed {dtype}", lambda: fastest(dtype, threads) is packed) else Linear


@cache
@torch.inference_mode()
def fastest(dtype: torch.dtype, threads: int) -> WeightLayout:
    """The faster layout for few rows, by the geometric mean over ROWS; the measurement takes 100 ms."""
    shapes = SAMPLE, *((rows, SAMPLE[-1]) for rows in ROWS)
    weights, *inputs = (torch.ones(shape, dtype=dtype, device="cpu") for shape in shapes)
    products = [[layout(weight, None) for weight in weights] for layout in (Linear, packed)]
    times = [least_times([partial(multiply, made, x) for made in products]) for x in inputs]
    in_rows, in_blocks = map(prod, zip(*times, strict=True))
    ratio = (in_blocks / in_rows) ** (1 / len(ROWS))
    log.info("weights of %s: packed, a product takes %.2f of its time", dtype, ratio)
    return packed if in_blocks < in_rows else Linear


def least_times(candidates: Sequence[Callable[[], object]]) -> list[float]:
    """The least seconds of each candidate, alternated: other load on the machine only adds to a time.

    With medians, a load beside another one chose the slower layout (30 % of a step) and remembered it.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(REPEATS):
        for candidate, times in zip(candidates, seconds, strict=True):
            start = perf_counter()
            candidate()
            times.append(perf_counter() - start)
    return [min(times) for times in seconds]


def multiply(products: Sequence[Product], x: Tensor) -> None:
    for product in products:
        product(x)


def packable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies by packed weights of this dtype here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (
        dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def head_is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a head is copied into the packed layout. Where it is also the embedding, it takes memory twice.

    One row by the heads of SmolLM2 and Gemma 3 took 0.65 and 0.59 of its time (AMD EPYC, bf16).
    """
    return fastest_layout(dtype, device) is packed


def packed(weight: Tensor, bias: Tensor | None) -> Packed:
    """`weight` copied into blocks for any number of rows."""
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)
