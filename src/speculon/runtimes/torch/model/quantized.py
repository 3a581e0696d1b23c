"""Linear layers with weights in 4 or 8 bits, and their products by torch's packed operators.

Of each row of a weight, a group of 32 columns has a scale and a zero: w = (q - 8) * scale + zero, q in 0..15.
A weight in 8 bits is the sum of two such, 16 high + low, so its product is that of the inputs twice. A head
in 8 bits is multiplied in integers, where the chip has such products.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.runtimes.torch.model.kept_weights import kept, kept_apart

GROUP = 32
MIDDLE = 8  # the q whose weight is the group's zero
MEASURED_ROWS = 512  # of inputs, for which a row was seen not to depend on the others
ROWS_AT_ONCE = 512  # of a weight as numbers, or as the int32 that torch packs; 4,096 took twice the memory
UNPACKED_BYTES = 1 << 28  # at most, in fp32, of a layer that is unpacked for its check
TILES = 2  # torch's inner tiles; on CUDA a row has a multiple of 16 * TILES columns, which is GROUP

BASE, LARGEST = 250, 127 * 250  # of an input in integers, BASE * high + low with both in -127..127
UNSIGNED = 128  # is added to these: the kernel multiplies unsigned by signed integers
TINY = 1e-30  # the least that a row or a column is scaled by, since it may be zero
ENGINES = ("x86", "fbgemm")  # of torch, that have this kernel; a build may lack both

# looked up once
integer_product: Any = getattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32", None)
cpu_product = getattr(getattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", None), "default", None)
cuda_product = torch.ops.aten._weight_int4pack_mm.default

PARTS = ("q", "scale", "zero")
Parts = tuple[Tensor, Tensor, Tensor]

_shapes_alone: ContextVar[bool] = ContextVar("speculon_shapes_alone", default=False)


@dataclass(slots=True)
class Packed4:
    """x W^T + b with W in 4 bits, in the order of torch's operator. `scales` has each scale and zero."""

    weight: Tensor  # opaque
    scales: Tensor  # [D / GROUP, O, 2], of the dtype of x
    bias: Tensor | None
    multiply: Callable[[Tensor, Tensor, int, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        result = self.multiply(x, self.weight, GROUP, self.scales)
        return result if self.bias is None else result + self.bias

    def first(self, rows: int) -> Packed4:
        """The same for at most so many rows of W, a multiple of those that torch packs together (64)."""
        all_rows = self.scales.shape[1]
        if rows >= all_rows:
            return self
        part = self.weight[: len(self.weight) * rows // all_rows].contiguous()
        bias = None if self.bias is None else self.bias[:rows]
        return replace(self, weight=part, scales=self.scales[:, :rows].contiguous(), bias=bias)


class Packed8(Packed4):
    """The same with W in 8 bits: [high, low] in 4 bits each, so D is twice the width of x."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(torch.cat([x, x], -1))


@dataclass(slots=True)
class IntegerProduct:
    """x W^T + b in integers, with w = q * scale of its row * scale of its column, q in -127..127.

    A row of x is two rows in 8 bits, BASE * high + low. Sums of integers are exact, so a row has the same
    result in every batch.
    """

    weight: Any  # opaque: q, and the scales of rows
    columns: Tensor  # [D] in fp32
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        rows, wide = x.size(0), x * self.columns
        scale = wide.abs().amax(-1, keepdim=True).clamp_(min=TINY).div_(LARGEST)
        high = wide.div_(scale).round_().div(BASE).round_()
        both = torch.cat([high, wide.sub_(high, alpha=BASE)])
        sums = integer_product(both, 1.0, UNSIGNED, self.weight)
        result = sums[rows:].add_(sums[:rows], alpha=BASE).mul_(scale).to(x.dtype)
        return result if self.bias is None else result + self.bias


class QuantizedLinear(nn.Module):
    """A linear layer with its weight [O, D] in 4 or 8 bits. Its forward multiplies by it as numbers.

    The weight is read when it is first needed: of a layer whose packed form was kept, never.
    """

    q: Tensor  # [O, D * bits / 8] uint8: two values of 4 bits, the first in the low half
    scale: Tensor  # [O, D * bits / 4 / GROUP]
    zero: Tensor
    bias: Tensor | None

    def __init__(
        self,
        read: Callable[[], Parts],
        shape: Sequence[int],
        bias: Tensor | None,
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "",
    ):
        super().__init__()
        self.bits, self.dtype, (self.out_features, self.in_features) = bits, dtype, shape
        self.device = device  # known before the weight is read
        self.name = name  # in its model, by which its packed form is kept; empty: it is not
        self.stored = ""  # the type of a GGUF file that it was made of, for people
        self.read: Callable[[], Parts] | None = read  # None once it was read
        self.register_buffer("bias", bias)

    def __getattr__(self, name: str) -> Any:
        if name in PARTS and self.read is not None:
            read, self.read = self.read, None
            for part, value in zip(PARTS, read(), strict=True):
                self.register_buffer(part, value)
        return super().__getattr__(name)

    def numbers(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:  # [O, D]
        """Rows of the weight, computed in at least fp32."""
        scale, zero = self.scale[rows], self.zero[rows]
        wide = torch.promote_types(scale.dtype, torch.float32)
        columns = unpack_pairs(self.q[rows]).to(wide).sub_(MIDDLE).view(*scale.shape, GROUP)
        columns = columns.mul_(scale[..., None].to(wide)).add_(zero[..., None].to(wide))
        parts = columns.view(len(scale), -1, self.in_features)
        return (parts[:, 0] if self.bits == 4 else parts[:, 0] + parts[:, 1]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if _shapes_alone.get():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        parts = (
            (F.linear(x, self.numbers(x.dtype, rows), None if self.bias is None else self.bias[rows]),)
            for rows in slices(self.out_features)
        )
        (outputs,) = filled(parts, self.out_features, -1)
        return outputs

    @property
    def num_parameters(self) -> int:
        return self.out_features * self.in_features + (0 if self.bias is None else self.bias.numel())

    @property
    def num_bytes(self) -> int:
        size = layer_bytes(self.out_features * self.in_features, self.bits, self.dtype)
        return size + (0 if self.bias is None else self.bias.nbytes)


class Unpacked(nn.Module):
    """A quantised layer with its weight as numbers, for several forwards: unpacking takes longer than one."""

    weight: Tensor  # [O, D]
    bias: Tensor | None

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self.register_buffer("weight", layer.numbers(torch.float32))
        self.register_buffer("bias", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def in_numbers(module: nn.Module) -> nn.Module:
    """A copy whose quantised layers are unpacked; the module itself where it has none, or too large ones."""
    layers = [layer for _, layer in layers_of(module)]
    if 4 * sum(layer.out_features * layer.in_features for layer in layers) > UNPACKED_BYTES:
        return module
    unpacked = {id(layer): Unpacked(layer) for layer in layers}
    return copy.deepcopy(module, unpacked) if unpacked else module


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Within it quantised layers return zeros, for a forward of which only shapes are read."""
    token = _shapes_alone.set(True)
    try:
        yield
    finally:
        _shapes_alone.reset(token)


def layer_bytes(size: int, bits: int, dtype: torch.dtype) -> int:
    """Of a packed layer of so many weights: each group of each 4 bits has a scale and a zero."""
    return size * bits // 8 + size * bits // 4 // GROUP * 2 * dtype.itemsize


def slices(rows: int) -> list[slice]:
    """So many rows in parts, since a head as numbers takes more memory than all packed layers."""
    return [slice(first, min(rows, first + ROWS_AT_ONCE)) for first in range(0, rows, ROWS_AT_ONCE)]


def layers_of(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantised layers of a model by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))


def describe(layers: Sequence[QuantizedLinear]) -> Iterator[str]:
    """What became of quantised layers, a line for each type and number of bits."""
    groups: dict[tuple[str, int], list[QuantizedLinear]] = {}
    for layer in layers:
        groups.setdefault((layer.stored, layer.bits), []).append(layer)
    for (stored, bits), same in groups.items():
        size = sum(layer.num_bytes for layer in same) / 1e6
        source = f" of {stored}" if stored else ""
        yield f"{len(same)} layer{'s' * (len(same) > 1)}{source} in {bits} bits, {size:.0f} MB"


def supported(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies by packed weights there: on CUDA in bf16, from compute capability 8.0 on."""
    if device.type == "cuda":
        return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and cpu_product is not None


def fits(shape: Sequence[int]) -> bool:
    """Whether torch's operators take a weight [O, D] of this shape."""
    return shape[0] % 16 == 0 and shape[1] % GROUP == 0


def quantize(
    weight: Tensor,
    bias: Tensor | None,
    bits: int,
    dtype: torch.dtype,
    *,
    name: str = "",
    device: torch.device | None = None,
) -> QuantizedLinear:
    """A layer [O, D] rounded to the nearest of `bits` bits, between the extremes of each group.

    It is rounded where the weight is, when it is first needed, and then moved to `device`.
    """

    place = device or weight.device

    def read() -> Parts:
        parts = (weight[rows].to(torch.float32, copy=True) for rows in slices(len(weight)))
        return on_device(rounded_rows(parts, len(weight), bits, dtype), place)

    return QuantizedLinear(read, weight.shape, bias, bits, dtype, place, name)


@torch.no_grad()
def rounded_rows(parts: Iterable[Tensor], rows: int, bits: int, dtype: torch.dtype) -> Parts:
    """q, scale and zero of so many rows, which come in parts in fp32 and are overwritten."""
    rounded = {4: to_nibbles, 8: to_bytes}[bits]
    made = (rounded(part.unflatten(1, (-1, GROUP)), dtype) for part in parts)
    q, scale, zero = filled(made, rows, 0)
    return q, scale, zero


def filled(parts: Iterable[tuple[Tensor, ...]], size: int, dim: int) -> tuple[Tensor, ...]:
    """Tensors whose parts come one after another, up to `size` in dimension `dim`; each is copied at once.

    Parts that are kept until all are there lie between what they were computed of, which is freed and yet too
    small for the next ones: of a head in 8 bits that took as much memory as all of it in fp32.
    """
    made, done = tuple[Tensor, ...](), 0
    for part in parts:
        if not made:
            shapes = ([*one.shape[:dim], size, *one.shape[dim:][1:]] for one in part)
            made = tuple(one.new_empty(shape) for one, shape in zip(part, shapes, strict=True))
        length = part[0].shape[dim]
        for whole, one in zip(made, part, strict=True):
            whole.narrow(dim, done, length).copy_(one)
        done += length
    return made


def on_device(parts: Parts, device: torch.device) -> Parts:
    q, scale, zero = (part.to(device) for part in parts)
    return q, scale, zero


def to_nibbles(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, scale and zero of weights [O, D / GROUP, GROUP]."""
    low, high = groups.aminmax(dim=-1)
    scale = usable((high - low) / 15, dtype)
    zero = (low + MIDDLE * scale.float()).to(dtype)
    q = (groups.sub_(zero[..., None]).div_(scale[..., None])).round_().add_(MIDDLE)
    return pack_pairs(q.clamp_(0, 15).to(torch.uint8).flatten(1)), scale, zero


def to_bytes(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same in 8 bits: w = (q - 128) * scale with q in 0..255, as [high, low]."""
    scale = usable(groups.abs().amax(-1) / 127, dtype)
    q = groups.div_(scale[..., None]).round_().add_(128).clamp_(0, 255).to(torch.uint8).flatten(1)
    scales = torch.cat([16 * scale, scale], 1)
    zeros = torch.cat([torch.zeros_like(scale), MIDDLE * scale], 1)
    return pack_pairs(torch.cat([q >> 4, q & 15], 1)), scales, zeros


def usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, and never 0: a group may be constant."""
    info = torch.finfo(dtype)
    return scale.to(dtype).clamp(min=info.tiny * info.eps)


def pack_pairs(q: Tensor) -> Tensor:  # [O, D] -> [O, D / 2]
    both = q.contiguous().view(torch.int16)
    return (both | both >> 4).to(torch.uint8)


def unpack_pairs(q: Tensor) -> Tensor:  # [O, D / 2] -> [O, D]
    both = q.to(torch.int16)  # a fifth of the time of `torch.stack`
    return both.bitwise_or_(both << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def has_integer_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU has them, for rows of this dtype: fp32 and fp16 have more bits than they have.

    Without its instructions the kernel adds in 16 bits, which overflow.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16 or integer_product is None:
        return False
    if torch.backends.quantized.engine not in ENGINES:
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_vnni"))


def head_product(layer: QuantizedLinear) -> Packed4 | IntegerProduct:
    """The product of a head: in integers where it has 8 bits and the chip has them: in half of the time."""
    exact = layer.bits == 8 and has_integer_products(layer.dtype, layer.device)
    return in_integers(layer) if exact else packed_layers([layer])


@torch.no_grad()
def in_integers(layer: QuantizedLinear) -> IntegerProduct:
    """Its product, with the weight rounded once more."""
    parts = kept_apart(f"{layer.name} in integers" if layer.name else "", lambda: integers_of(layer))
    zeros, columns = torch.zeros(layer.out_features, dtype=torch.long), parts["columns"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the tensors of this product deprecated
        quantized = torch._make_per_channel_quantized_tensor(parts["q"], parts["rows"].double(), zeros, 0)
    del parts  # a head is large, and packing copies it once more
    return IntegerProduct(torch.ops.quantized.linear_prepack(quantized, None), columns, layer.bias)


def integers_of(layer: QuantizedLinear) -> dict[str, Tensor]:
    """q [O, D] of its weight, and the scales of rows and columns.

    Its columns are first scaled to one largest value: outlying columns would set the scale of every row.
    """
    parts, width = slices(layer.out_features), layer.in_features
    columns = torch.full((width,), TINY)
    for rows in parts:
        columns = columns.maximum(layer.numbers(torch.float32, rows).abs().amax(0))
    q = torch.empty(layer.out_features, width, dtype=torch.int8)
    scale = torch.empty(layer.out_features)
    for rows in parts:
        weight = layer.numbers(torch.float32, rows).div_(columns)
        scale[rows] = weight.abs().amax(1).clamp_(min=TINY).div_(127)
        q[rows] = weight.div_(scale[rows, None]).round_().to(torch.int8)
    return {"q": q, "rows": scale, "columns": columns}


@torch.no_grad()
def packed_layers(layers: Sequence[QuantizedLinear]) -> Packed4:
    """One product for layers of one input and as many bits."""
    names = [layer.name for layer in layers]
    weight, scales = kept(" ".join(names) if all(names) else "", lambda: packed_parts(layers))
    bias = joined_biases([(layer.bias, layer.out_features) for layer in layers], scales)
    made = {4: Packed4, 8: Packed8}[layers[0].bits]
    return made(weight, scales, bias, pack_on(weight.device)[1])


def packed_parts(layers: Sequence[QuantizedLinear]) -> tuple[Tensor, Tensor]:
    """Their weights side by side as torch packs them, and the scales."""
    q, scale, zero = (concatenated([getattr(x, name) for x in layers]) for name in PARTS)
    scales = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
    return packed_rows(q, pack_on(q.device)[0]), scales


def joined_biases(biases: Sequence[tuple[Tensor | None, int]], like: Tensor) -> Tensor | None:
    """Biases of so many outputs as one, with zeros for those that are missing; None if all are."""
    if all(bias is None for bias, _ in biases):
        return None
    return torch.cat([like.new_zeros(outputs) if bias is None else bias for bias, outputs in biases])


def concatenated(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def packed_rows(q: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Packed part by part, without all parts beside the result."""
    packed, done = q.new_empty(0), 0
    for rows in q.split(ROWS_AT_ONCE):
        part = pack(rows)
        if not done:
            packed = part.new_empty(len(part) * len(q) // len(rows), *part.shape[1:])
        packed[done : done + len(part)] = part
        done += len(part)
    return packed


def pack_on(device: torch.device) -> tuple[Callable[[Tensor], Tensor], Any]:
    """How torch packs rows of q on a device, and multiplies by them."""
    if device.type == "cuda":
        pack = partial(torch.ops.aten._convert_weight_to_int4pack, innerKTiles=TILES)
        return lambda q: pack(q >> 4 | q << 4), cuda_product
    pack = partial(torch.ops.aten._convert_weight_to_int4pack_for_cpu, innerKTiles=TILES)
    return lambda q: pack(unpack_pairs(q).int()), cpu_product
