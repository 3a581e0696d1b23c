"""A decoder layer as few library calls, in the form that most architectures share, and a loop over layers.

x + out_1(attention(in_1(x))), then x + out_2(mlp(in_2(x))), where each of the four norms may be missing.
target/fuse compares each block with its stock layer, and the loop with the stock forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.attention import attend_rows, running_view
from speculon.runtimes.torch.model.linear import Product, hooked, joined, plain
from speculon.runtimes.torch.model.taps import EMBEDDINGS, NO_TAPS, Taps

# of an element: two roundings, since norms of heads round once more; in fp32 also another order of addition
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

# of squares in norms on CPU: rounded to fp32, a sum in fp64 has the same bits in any order of addition
SUMS = torch.float64

BEFORE = ("input_layernorm", "", "post_attention_layernorm", "")
AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

RotaryTables = tuple[Tensor, Tensor]  # cos, and sin with the sign of the rotation: [T, 1, Dh]

# what the modules of an unknown architecture raise
UNKNOWN = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class CannotReplace(Exception):
    """A stock module cannot be replaced by a faster form; the message says why."""


class FusedNorm:
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019).

    `weight` [D], or [H, D] for H heads of x [T, H, D]. A weight in fp32 is not rounded to the dtype of x.
    """

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps, width = weight, eps, weight.shape[-1]
        self.scaled = weight.float() * width**0.5
        self.floor = torch.tensor(width * eps, dtype=SUMS)  # of `few_operations`, on CPU
        # or a program (`runtimes/torch/model/compiled.py`)
        self.compute = self.few_operations if weight.device.type == "cpu" else self.native

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x)

    def native(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.dim() == 1 else None
        normed = F.rms_norm(x.to(self.weight.dtype), x.shape[-1:], weight, self.eps)
        return (normed if weight is not None else normed * self.weight).to(x.dtype)

    def few_operations(self, x: Tensor) -> Tensor:
        """With vector_norm for the squares: fewer calls, and no copy of them."""
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=SUMS)
        scale = torch.addcmul(self.floor, size, size).rsqrt_().float()
        return (wide * scale).mul_(self.scaled).to(x.dtype)


@dataclass(slots=True)
class Rotary:
    """Query and key heads [T, H + Hkv, Dh], normed where there is a norm, then rotated."""

    norm: FusedNorm | None
    rotates: bool

    def __call__(self, heads: Tensor, tables: RotaryTables | None) -> Tensor:
        if self.norm is not None:
            heads = self.norm(heads)
        return rotate(heads, tables) if self.rotates and tables is not None else heads


@dataclass(slots=True)
class Attention:
    """Grouped-query attention over pages; q, k and v come from one product and are rotated together."""

    layer: int
    qkv: Product
    out: Product
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    rotary: Callable[[Tensor, RotaryTables | None], Tensor]  # `Rotary`, or a program
    softcap: float | None
    sinks: Tensor | None  # [H]

    def __call__(self, x: Tensor, tables: RotaryTables | None, view: View) -> Tensor:  # [T, D] -> [T, D]
        return self.out(self.attend(*self.begin(x, tables), view).reshape(len(x), -1))

    def begin(self, x: Tensor, tables: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """Query and key heads side by side, rotated [T, H + Hkv, Dh], and the values [T, Hkv, Dh]."""
        both, states = self.heads + self.kv_heads, self.states(x)
        return self.rotary(states[:, :both], tables), states[:, both:]

    def states(self, x: Tensor) -> Tensor:  # [T, H + 2 Hkv, Dh]
        return self.qkv(x).view(len(x), -1, self.head_dim)

    def attend(self, rotated: Tensor, value: Tensor, view: View) -> Tensor:  # [T, H, Dh]
        """The attention output of each row; the only part that reads spans and pages."""
        query, key = rotated[:, : self.heads], rotated[:, self.heads :]
        return attend_rows(view, self.layer, query, key, value, self.scaling, self.softcap, self.sinks)


@dataclass(slots=True)
class Gating:
    """act(gate) * up, of both side by side [T, 2 I]."""

    act: Callable[[Tensor], Tensor]

    def __call__(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return self.act(gate).mul_(up)


@dataclass(slots=True)
class Gated:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    gate_up: Product
    down: Product
    gating: Product  # `Gating`, or a program

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gating(self.gate_up(x)))


@dataclass(slots=True)
class Stock:
    """An MLP that is not fused, such as experts."""

    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        out = self.module(x[None])
        return (out[0] if isinstance(out, tuple) else out)[0]


@dataclass(slots=True)
class PagedLayer:
    """One layer: [T, D] -> [T, D]."""

    attention: Attention
    mlp: Gated | Stock
    norms: tuple[
        FusedNorm | None, FusedNorm | None, FusedNorm | None, FusedNorm | None
    ]  # before and after each of the two

    def __call__(self, x: Tensor, tables: RotaryTables | None, view: View) -> Tensor:
        return self.end(x, self.attend(*self.begin(x, tables), view))

    def begin(self, x: Tensor, tables: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """The part before attention; see `Attention.begin`."""
        before = self.norms[0]
        return self.attention.begin(before(x) if before else x, tables)

    def attend(self, rotated: Tensor, value: Tensor, view: View) -> Tensor:  # [T, H, Dh]
        return self.attention.attend(rotated, value, view)

    def end(self, x: Tensor, seen: Tensor) -> Tensor:  # [T, D], [T, H, Dh] -> [T, D]
        """The part after attention."""
        _, after, before_mlp, after_mlp = self.norms
        mixed = self.attention.out(seen.reshape(len(x), -1))
        x = x + (after(mixed) if after else mixed)
        out = self.mlp(before_mlp(x) if before_mlp else x)
        return x + (after_mlp(out) if after_mlp else out)


@dataclass(slots=True)
class Between:
    """All between the attentions of two layers, which depends on each row alone."""

    before: PagedLayer
    after: PagedLayer

    def __call__(self, x: Tensor, seen: Tensor, tables: RotaryTables | None) -> Sequence[Tensor]:
        """The input [T, D] of the later layer, and what it attends to; see `Attention.begin`."""
        x = self.before.end(x, seen)
        return x, *self.after.begin(x, tables)


def between(blocks: list[PagedLayer]) -> list[Between]:
    return [Between(before, after) for before, after in pairwise(blocks)]


@dataclass(slots=True)
class Loop:
    """A forward without the stock model's code: embedding, blocks, norm, head."""

    embed: nn.Module
    rotary: nn.Module
    blocks: list[PagedLayer]
    norm: FusedNorm
    head: Product
    layer_types: tuple[str, ...] = ()  # of each layer, where each type has a rotary table of its own
    between: Sequence[Callable[..., Sequence[Tensor]]] = field(init=False)  # `Between`, or programs

    def __post_init__(self) -> None:
        self.between = between(self.blocks)

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        x = self.embed(batch.input_ids)
        kinds, last = self.kinds, self.blocks[-1]
        tables = {kind: self.tables(x, batch.position_ids, kind) for kind in {*kinds}}
        x, keep = x[0], (taps or NO_TAPS).keep
        keep(EMBEDDINGS, x)
        rotated, value = self.blocks[0].begin(x, tables[kinds[0]])
        for number, run in enumerate(self.between):
            seen = self.blocks[number].attend(rotated, value, view)
            x, rotated, value = run(x, seen, tables[kinds[number + 1]])
            keep(number, x)
        x = last.end(x, last.attend(rotated, value, view))
        keep(len(self.between), x)
        return self.end(x, batch.score_rows) if batch.score_rows.numel() else None

    def begin(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, RotaryTables]:
        """The input [T, D] of the first layer, and its rotary tables; ids and positions are [1, T]."""
        x = self.embed(input_ids)
        return x[0], self.tables(x, position_ids, self.kinds[0])

    @property
    def kinds(self) -> tuple[str | None, ...]:
        """Whose rotary tables each layer takes."""
        return self.layer_types or (None,) * len(self.blocks)

    def tables(self, x: Tensor, position_ids: Tensor, kind: str | None) -> RotaryTables:
        cos, sin = self.rotary(x, position_ids) if kind is None else self.rotary(x, position_ids, kind)
        return rotation_tables(cos, sin, self.blocks[0].attention.head_dim)

    def end(self, x: Tensor, score_rows: Tensor) -> Tensor:  # [T, D], [R] -> [R, V]
        """Logits of the scored rows of the last layer's output."""
        return self.head(self.norm(x.index_select(0, score_rows)))


class FusedLayer(nn.Module):
    """A block with the signature of a stock layer."""

    def __init__(self, block: PagedLayer):
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> Tensor:
        view = running_view()
        return self.block(hidden_states[0], self.tables(position_embeddings, view), view)[None]

    def tables(self, made: tuple[Tensor, Tensor] | None, view: View) -> RotaryTables | None:
        """The rotary tables of this step, converted once for all layers that share them."""
        if made is None:
            return None
        if id(made[0]) not in view.memo:
            # `made` is kept so that its id is not reused
            view.memo[id(made[0])] = made, rotation_tables(*made, self.block.attention.head_dim)
        return view.memo[id(made[0])][1]


class Fused(nn.Module):
    """A norm or a product in the place of a stock module."""

    def __init__(self, inner: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class FusedRows(Fused):
    """The same for a product that takes two dimensions alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, -2).contiguous()).unflatten(0, x.shape[:-1])


def rotate(heads: Tensor, tables: RotaryTables) -> Tensor:
    """Rotary positions (Su 2021) in half-split form: x cos + swapped halves of x (-sin, sin). [T, H, Dh]."""
    cos, sin = tables
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def rotation_tables(cos: Tensor, sin: Tensor, width: int) -> RotaryTables:
    """The tables of one step for `rotate`, from those of transformers: [1, T, Dh] or [1, T, Dh / 2]."""
    if 2 * cos.shape[-1] == width:
        cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
    half = width // 2
    return cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)


def fused_block(stock: nn.Module, layer: int, kv_heads: int, head_dim: int, share: bool) -> PagedLayer:
    """A fused form of a decoder layer. Raises `CannotReplace` where a part is missing."""
    children = dict(stock.named_children())
    inner = children.pop("self_attn", None)
    mlp = children.pop("mlp", None)
    if inner is None or mlp is None:
        raise CannotReplace("no self_attn and mlp")
    attention = fused_attention(inner, layer, kv_heads, head_dim, share)
    return PagedLayer(attention, fused_mlp(mlp, share), fused_norms(children))


def fused_norms(
    children: dict[str, nn.Module],
) -> tuple[FusedNorm | None, FusedNorm | None, FusedNorm | None, FusedNorm | None]:
    """The four norms. Gemma and OLMo name the norm after attention as Llama names that before the MLP."""
    around = {"pre_feedforward_layernorm", "post_feedforward_layernorm"} & children.keys()
    names = AROUND if around else BEFORE
    norms = [fused_norm(children[name]) if name in children else None for name in names]
    before, after, before_mlp, after_mlp = norms
    return before, after, before_mlp, after_mlp


def fused_attention(stock: Any, layer: int, kv_heads: int, head_dim: int, share: bool) -> Attention:
    inputs = linears(stock, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
    if stock.training and getattr(stock, "attention_dropout", 0.0):
        raise CannotReplace("dropout in training")
    heads = sum(layer.out_features for layer in inputs) // head_dim - 2 * kv_heads
    return Attention(
        layer=layer,
        qkv=joined(inputs, share),
        out=joined(linears(stock, ("o_proj",)), share),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scaling=float(stock.scaling),
        rotary=Rotary(head_norm(stock, heads, kv_heads, head_dim), bool(getattr(stock, "use_rope", True))),
        softcap=getattr(stock, "attn_logit_softcapping", None),
        sinks=getattr(stock, "sinks", None),
    )


def head_norm(stock: Any, heads: int, kv_heads: int, head_dim: int) -> FusedNorm | None:
    """The norms of query and key heads as one, where there are such."""
    if not hasattr(stock, "q_norm") and not hasattr(stock, "k_norm"):
        return None
    query, key = fused_norm(stock.q_norm), fused_norm(stock.k_norm)
    if query.eps != key.eps or {query.weight.numel(), key.weight.numel()} != {head_dim}:
        raise CannotReplace(f"{type(stock).__name__} normalises queries and keys differently")
    return FusedNorm(torch.cat([query.weight.expand(heads, -1), key.weight.expand(kv_heads, -1)]), query.eps)


def fused_mlp(stock: Any, share: bool) -> Gated | Stock:
    try:
        gate_up = linears(stock, ("gate_up_proj",), ("gate_proj", "up_proj"))
        down = linears(stock, ("down_proj",))
    except CannotReplace:
        return Stock(stock)
    act = getattr(stock, "act_fn", None) or stock.activation_fn
    return Gated(joined(gate_up, share), joined(down, share), Gating(act))


def linears(module: Any, *choices: tuple[str, ...]) -> list[nn.Linear]:
    """The first of several groups of children that exists and consists of plain linear layers."""
    for names in choices:
        layers: list[Any] = [getattr(module, name, None) for name in names]
        if all(map(plain, layers)):
            return layers
    missing = " or ".join(", ".join(names) for names in choices)
    raise CannotReplace(f"{type(module).__name__} has no plain linear {missing}")


def fused_norm(stock: nn.Module) -> FusedNorm:
    """The native form of an RMS norm, with weight w or 1 + w. Raises `CannotReplace` if neither agrees."""
    eps = getattr(stock, "variance_epsilon", getattr(stock, "eps", None))
    named = dict(stock.named_parameters())
    one_weight = list(named) == ["weight"] and named["weight"].dim() == 1
    if "RMSNorm" not in type(stock).__name__ or eps is None or not one_weight:
        raise CannotReplace(f"{type(stock).__name__} is no RMS norm with one weight")
    if hooked(stock):
        raise CannotReplace(f"{type(stock).__name__} has hooks")
    weight = named["weight"].detach()
    plus = added_to_weight(stock, float(eps))
    # 1 + w stays in fp32: rounded to bf16 it has an error of 2^-9 of its own
    norm = FusedNorm(weight.clone() if plus == 0.0 else plus + weight.float(), float(eps))
    if same_norm(stock, norm):
        return norm
    raise CannotReplace(f"{type(stock).__name__} differs from the library's norm")


def added_to_weight(stock: nn.Module, eps: float) -> float:
    """0 or 1: what a norm adds to its weight, read with weights between -1/2 and 1/2, which separate the two.

    The weights of a checkpoint need not: next to 300, 1 is less than a rounding of bf16.
    """
    with_others: Any = copy.deepcopy(stock).float()
    own: Tensor = with_others.weight
    weight = torch.linspace(-0.5, 0.5, len(own), device=own.device)
    with_others.weight = nn.Parameter(weight, requires_grad=False)
    for plus in (0.0, 1.0):
        if same_norm(with_others, FusedNorm(plus + weight, eps)):
            return plus
    raise CannotReplace(f"{type(stock).__name__} differs from the library's norm")


@torch.inference_mode()
def same_norm(stock: nn.Module, new: FusedNorm) -> bool:
    """Whether a norm is the stock one in fp32, up to roundings of each element.

    On random rows [3, D] of small, usual and large size.
    """
    sizes = torch.tensor([1e-2, 1.0, 1e2])[:, None]
    rows = torch.randn(len(sizes), new.weight.numel(), generator=torch.Generator().manual_seed(0)) * sizes
    weight: Any = stock.weight
    x = rows.to(weight)
    try:
        dtype, truth, normed = stock(x).dtype, copy.deepcopy(stock).float()(x.float()), new(x)
    except (RuntimeError, TypeError, ValueError):
        return False  # it takes more than one tensor
    limit = ROUNDING.get(x.dtype, 0.0) * truth.abs() + torch.finfo(x.dtype).smallest_normal * 2**-9
    return normed.dtype == dtype and bool(((normed.float() - truth).abs() <= limit).all())
