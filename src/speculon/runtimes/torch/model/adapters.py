"""LoRA adapters beside the products of a target: y = x W^T + scaling * (x A^T) B^T (Hu et al. 2021).

Rows of one adapter are consecutive in the flat batch (`Batch.pack`). The product of all rows stays as it is,
joined, packed or in pieces; the update is added to the rows of each adapter, at the columns of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speculon.runtimes.torch.batch import NO_ADAPTERS, AdapterRows
from speculon.runtimes.torch.model.block import FusedLayer, PagedLayer, Stock
from speculon.runtimes.torch.model.linear import Linear, Product

# a stock module of a fused layer -> the part of the block, its product, and the modules before it there
FUSED: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "self_attn.qkv_proj": ("attention", "qkv", ()),
    "self_attn.q_proj": ("attention", "qkv", ()),
    "self_attn.k_proj": ("attention", "qkv", ("self_attn.q_proj",)),
    "self_attn.v_proj": ("attention", "qkv", ("self_attn.q_proj", "self_attn.k_proj")),
    "self_attn.o_proj": ("attention", "out", ()),
    "mlp.gate_up_proj": ("mlp", "gate_up", ()),
    "mlp.gate_proj": ("mlp", "gate_up", ()),
    "mlp.up_proj": ("mlp", "gate_up", ("mlp.gate_proj",)),
    "mlp.down_proj": ("mlp", "down", ()),
}

_rows: ContextVar[AdapterRows] = ContextVar("speculon_adapters", default=NO_ADAPTERS)

LinearShapes = Mapping[str, tuple[int, int]]  # of the linear layers of a model by name: outputs, inputs


class CannotAdapt(Exception):
    """A layer has no place for an update; the message says why."""


class Factors(NamedTuple):
    """The update of one layer."""

    a: Tensor  # [r, D]
    b: Tensor  # [O, r], scaled


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that a target has, as people see it."""

    rank: int  # the largest
    targets: tuple[str, ...]
    layers: int
    num_bytes: int
    digest: str  # adapters of one digest are the same

    def __str__(self) -> str:
        where = f"{self.layers} layers ({', '.join(self.targets)})"
        return f"rank {self.rank}, {where}, {self.num_bytes / 1e6:.1f} MB"


@contextmanager
def with_adapters(rows: AdapterRows) -> Iterator[None]:
    """Within the context, these rows of the forward that runs take the updates of adapters."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


@dataclass(slots=True)
class LowRank:
    """(x A^T) B^T, scaled."""

    a: Product  # [n, D] -> [n, r]
    b: Product  # [n, r] -> [n, O]

    def __call__(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@dataclass(slots=True)
class Adapted:
    """A product of all rows [.., T, D], with updates by adapter. Raises `CannotAdapt` for other rows."""

    product: Product
    updates: dict[str, LowRank]
    layer: str  # the first of those that it multiplies for, by name
    calls: int = 0  # with rows of adapters

    def num_bytes(self, name: str) -> int:
        """Of one adapter."""
        update: Any = self.updates.get(name)
        return 0 if update is None else update.a.weight.nbytes + update.b.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x)
        total, runs = _rows.get()
        if not runs:
            return y
        if x.shape[-2] != total or x.numel() != total * x.shape[-1]:
            raise CannotAdapt(f"{self.layer} does not multiply each row of a step once")
        self.calls += 1
        rows, sums = x.reshape(total, -1), y.view(total, -1)
        for name, first, last in runs:
            if (update := self.updates.get(name)) is not None:
                sums[first:last] += update(rows[first:last])
        return y


class AdaptedModule(nn.Module):
    """A linear layer of the stock model with updates."""

    def __init__(self, stock: nn.Module, adapted: Adapted):
        super().__init__()
        self.stock, self.adapted = stock, adapted

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(x)


@dataclass(slots=True)
class UpdatePlace:
    """Where the updates of some layers are added: the owner of one product, and the product's name."""

    owner: Any
    name: str
    outputs: int
    offsets: dict[str, int]  # layer -> its first column

    def install(self, adapters: Mapping[str, Mapping[str, Factors]]) -> Adapted:
        """Puts the updates of all adapters beside the product."""
        product, updates = getattr(self.owner, self.name), {}
        for adapter, layers in adapters.items():
            parts = [(at, layers[layer]) for layer, at in self.offsets.items() if layer in layers]
            if parts:
                a, b = joined_factors(parts, self.outputs)
                updates[adapter] = LowRank(Linear(a), Linear(b))
        adapted = Adapted(product, updates, min(self.offsets))
        is_module = isinstance(product, nn.Module) and isinstance(self.owner, nn.Module)
        setattr(self.owner, self.name, AdaptedModule(product, adapted) if is_module else adapted)
        return adapted


def joined_factors(parts: list[tuple[int, Factors]], outputs: int) -> Factors:
    """The factors of layers with one input, whose outputs begin at these columns, as those of one layer."""
    a = torch.cat([factors.a for _, factors in parts])
    b, rank = a.new_zeros(outputs, len(a)), 0
    for at, factors in parts:
        rows, width = factors.b.shape
        b[at : at + rows, rank : rank + width] = factors.b
        rank += width
    return Factors(a, b)


@torch.no_grad()
def install(
    model: nn.Module, linears: LinearShapes, adapters: Mapping[str, Mapping[str, Factors]]
) -> list[Adapted]:
    """Adds the updates of each adapter, by layer, to a target's model that has none. `linears` are the layers
    of its stock form.

    Raises `CannotAdapt` for a layer that has no place.
    """
    places: dict[tuple[int, str], UpdatePlace] = {}
    for layer in sorted({layer for layers in adapters.values() for layer in layers}):
        place = place_of(model, linears, layer)
        known = places.setdefault((id(place.owner), place.name), place)
        known.offsets |= place.offsets
    return [place.install(adapters) for place in places.values()]


def place_of(model: nn.Module, linears: LinearShapes, layer: str) -> UpdatePlace:
    """Of one layer, by its name in the stock model."""
    prefix, block = block_of(model, layer)
    if block is None:
        return module_place(model, layer, layer, linears)
    inside = layer.removeprefix(f"{prefix}.")
    if isinstance(block.mlp, Stock) and inside.startswith("mlp."):
        return module_place(block.mlp.module, inside.removeprefix("mlp."), layer, linears)
    if inside not in FUSED:
        raise CannotAdapt(f"{layer} is in no product of its fused layer")
    part, name, before = FUSED[inside]
    offset = sum(linears[f"{prefix}.{other}"][0] for other in before)
    together = [other for other, (*product, _) in FUSED.items() if product == [part, name]]
    outputs = sum(linears.get(f"{prefix}.{other}", (0, 0))[0] for other in together)
    return UpdatePlace(getattr(block, part), name, outputs, {layer: offset})


def block_of(model: nn.Module, layer: str) -> tuple[str, PagedLayer | None]:
    """The fused layer that a stock module was in, and its name; None where the module is still there."""
    names = layer.split(".")
    for end in range(1, len(names)):
        prefix = ".".join(names[:end])
        if isinstance(module := model.get_submodule(prefix), FusedLayer):
            return prefix, module.block
    return "", None


def module_place(root: nn.Module, path: str, layer: str, shapes: LinearShapes) -> UpdatePlace:
    """A module that is still there."""
    parent, _, name = path.rpartition(".")
    return UpdatePlace(root.get_submodule(parent), name, shapes[layer][0], {layer: 0})
