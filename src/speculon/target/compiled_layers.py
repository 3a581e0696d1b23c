"""The layers of a loop as modules that torch can export and compile, and their three ways to attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.target.attention import attend_written, fold, running_view, unfold
from speculon.target.block import Block, CannotReplace, Loop, Norm, Stock, Tables, rotate, rotation_tables
from speculon.target.linear import Linear, Packed, Product

Settings = dict[str, Any]  # of the compiler
Arguments = list[Tensor | None]  # of `Exported`
Program = Callable[..., list[Tensor]]  # of them, to the results of `Exported`
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # query, key, value, scaling -> [T, H, Dh]


class DenseNorm(nn.Module):
    """A norm in small operations, which the compiler fuses."""

    def __init__(self, norm: Norm):
        super().__init__()
        self.weight, self.eps = nn.Parameter(norm.weight, requires_grad=False), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """`Block` and `Attention` as a module that can be exported and compiled."""

    def __init__(self, block: Block):
        super().__init__()
        of, mlp = block.attention, block.mlp
        if isinstance(mlp, Stock) or of.softcap is not None or of.sinks is not None:
            raise CannotReplace("not compiled: its layers are more than products and plain attention")
        self.heads, self.kv_heads, self.head_dim = of.heads, of.kv_heads, of.head_dim
        self.scaling, self.rotates, self.act = of.scaling, of.rotates, mlp.act
        self.qkv, self.out = as_linear(of.qkv), as_linear(of.out)
        self.gate_up, self.down = as_linear(mlp.gate_up), as_linear(mlp.down)
        self.head_norm = nn.Identity() if of.norm is None else DenseNorm(of.norm)
        before, after, before_mlp, after_mlp = (
            nn.Identity() if norm is None else DenseNorm(norm) for norm in block.norms
        )
        self.before, self.after, self.before_mlp, self.after_mlp = before, after, before_mlp, after_mlp

    def forward(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:  # [T, D] -> [T, D]
        x = x + self.after(self.attended(self.before(x), tables, attend))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))

    def attended(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        states = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        both = self.heads + self.kv_heads
        turned = self.head_norm(states[:, :both])
        turned = rotate(turned, tables) if self.rotates else turned
        query, key, value = turned[:, : self.heads], turned[:, self.heads :], states[:, both:]
        return self.out(attend(query, key, value, self.scaling).reshape(x.shape[0], -1))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.act(gate) * up)


class Exported(nn.Module):
    """What programs are made of: its forward takes the arguments that come with the name of a program."""

    code: ClassVar = (rotate, fold)  # functions that programs hold, beside the classes of modules
    sizes: tuple[str, ...]  # the names of the first sizes of what comes before `slots`
    layer_kinds: list[int]


class Layers(Exported):
    """`Loop` as a module that can be exported: logits [R, V], then the states [T, D] that taps may keep."""

    sizes = ("rows", "rows", "scored")

    def __init__(self, loop: Loop, layer_kinds: list[int]):
        super().__init__()
        self.embed, self.rotary, self.head_dim = loop.embed, loop.rotary, loop.blocks[0].attention.head_dim
        self.layers, self.layer_kinds = nn.ModuleList(map(Layer, loop.blocks)), layer_kinds
        self.norm, self.head = DenseNorm(loop.norm), as_linear(loop.head)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, scored: Tensor, slots: Tensor | None, *pages: Tensor
    ) -> list[Tensor]:
        """`scored` [R] are rows, `slots` [T] the places of their keys and values.

        `pages` are keys of all slots for each layer, then values, then `Compiled.joint`, if any.

        Without `slots` the pages are those of one sequence; with several rows, masks of each kind follow.
        """
        x = self.embed(input_ids[None])
        cos, sin = self.rotary(x, position_ids[None])
        tables, x = rotation_tables(cos, sin, self.head_dim), x[0]
        states = [x]
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, choose_attend(number, self.layer_kinds, slots, pages))
            states.append(x)
        return [self.head(self.norm(x[scored])), *states]


def as_linear(product: Product) -> nn.Linear:
    """A product as a linear module with unpacked weights. Raises `CannotReplace` for shared weights."""
    if isinstance(product, nn.Linear):
        return product
    if not isinstance(product, Packed | Linear):
        raise CannotReplace("not compiled: the weights of a model object stay where they are")
    weight = product.weight.to_dense() if isinstance(product, Packed) else product.weight
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=product.bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if product.bias is not None:
        layer.bias = nn.Parameter(product.bias, requires_grad=False)
    return layer


# how an exported layer attends


@torch.library.custom_op("speculon::attend", mutates_args=())
def attend(query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
    """`attend_written` on the running step; the pages are arguments so that rows are written first."""
    return attend_written(running_view(), layer, query, scaling).contiguous()


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[-1])


def attend_back(
    keys: Tensor,  # [slots, Hkv, Dh]
    values: Tensor,
    slots: Tensor,  # [T]
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
) -> Tensor:  # [T, H, Dh]
    """Rows of any sequences, written to their slots: calls back for attention outside of the program."""
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    attended: Tensor = torch.ops.speculon.attend(query, keys, values, layer, scaling)
    return attended


def attend_joint(
    keys: Tensor,  # [slots, Hkv, Dh]
    values: Tensor,
    slots: Tensor,  # [T]
    joint: Sequence[Tensor],  # of `PagedPrograms.joint`, for one kind of layer
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
) -> Tensor:  # [T, H, Dh]
    """Rows of several sequences, written to their slots: one padded kernel call for all."""
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    rows, order, where, mask = joint  # [B, n], [T], [B, S], [B, 1, n, S]
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    q = query[rows].unflatten(2, (kv_heads, group))  # [B, n, Hkv, g, Dh]
    q = q.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, Hkv, n * g, Dh]
    k, v = (pool[where].transpose(1, 2) for pool in (keys, values))  # [B, Hkv, S, Dh]
    mask = mask.repeat_interleave(group, 2)  # [B, 1, n * g, S]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)  # [B, Hkv, n * g, Dh]
    out = out.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4)  # [B, n, Hkv, g, Dh]
    return out.flatten(2, 3).flatten(0, 1)[order]


def attend_alone(
    keys: Tensor,  # [S, Hkv, Dh], a view of the pages
    values: Tensor,
    mask: Tensor | None,  # [T, S]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
) -> Tensor:  # [T, H, Dh]
    """The rows of one sequence, written to the last of its slots."""
    group, before = query.shape[1] // key.shape[1], keys.shape[0] - key.shape[0]  # len() would be a constant
    keys[before:] = key
    values[before:] = value
    k, v = (slots.transpose(0, 1)[None] for slots in (keys, values))
    mask = None if mask is None else mask.repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(fold(query, 1, group), k, v, attn_mask=mask, scale=scaling)
    return unfold(out, group)


def choose_attend(
    number: int, layer_kinds: list[int], slots: Tensor | None, pages: Sequence[Tensor]
) -> Attend:
    """How a layer attends, by what a program is given."""
    count, distinct, own = len(layer_kinds), len(set(layer_kinds)), layer_kinds[number]
    stored, more = (pages[number], pages[count + number]), pages[2 * count :]
    if slots is None:
        return partial(attend_alone, *stored, more[own] if more else None)
    if more:
        return partial(attend_joint, *stored, slots, (*more[:2], more[2 + own], more[2 + distinct + own]))
    return partial(attend_back, *stored, slots, number)
