"""The loop through torch.compile: for the few rows of a decoding step, where a call of an operation costs as much as its work."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

from speculon.batch import Batch
from speculon.kv.store import View
from speculon.models.attention import attend_rows
from speculon.models.block import Block, Norm, NotThisKind, Stock, Tables, rotate, tables_of
from speculon.models.compare import close
from speculon.models.linear import Linear, Packed, Product
from speculon.models.loop import Loop
from speculon.models.taps import Taps
from speculon.models.target import Target

FEW_ROWS = 6  # beyond it the compiled products were no faster than the packed ones
# Products folded into kernels of the compiler's own, tuned by time. Each of the two compiled forms holds a copy of the weights.
SETTINGS = {"freezing": True, "cpp_wrapper": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
COPIES = 3
FORMS = 256  # of all models of a process; beyond the compiler's own limit of 8 it would run them as they are, and say nothing

_view: ContextVar[View] = ContextVar("speculon_compiled_view")


@torch.library.custom_op("speculon::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    """`attend_rows` on the pages of the step that runs; the compiler, if it saw them, would copy the pool to write a row."""
    return attend_rows(_view.get(), layer, query, key, value, scaling).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


class DenseNorm(nn.Module):
    """A norm in small operations, for the compiler to join."""

    def __init__(self, norm: Norm):
        super().__init__()
        self.weight, self.eps = nn.Parameter(norm.weight, requires_grad=False), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """A block over parameters that the compiler may fold: `Block` and `Attention` again, in its terms."""

    def __init__(self, block: Block):
        super().__init__()
        of, mlp = block.attention, block.mlp
        if isinstance(mlp, Stock) or of.softcap is not None or of.sinks is not None:
            raise NotThisKind("not compiled: its layers are more than products and plain attention")
        self.layer, self.heads, self.kv_heads, self.head_dim = of.layer, of.heads, of.kv_heads, of.head_dim
        self.scaling, self.rotates, self.act = of.scaling, of.rotates, mlp.act
        self.qkv, self.out = linear_of(of.qkv), linear_of(of.out)
        self.gate_up, self.down = linear_of(mlp.gate_up), linear_of(mlp.down)
        self.head_norm = nn.Identity() if of.norm is None else DenseNorm(of.norm)
        before, after, before_mlp, after_mlp = (nn.Identity() if norm is None else DenseNorm(norm) for norm in block.norms)
        self.before, self.after, self.before_mlp, self.after_mlp = before, after, before_mlp, after_mlp

    def forward(self, x: Tensor, tables: Tables) -> Tensor:  # [T, D] -> [T, D]
        states = self.qkv(self.before(x)).view(x.shape[0], -1, self.head_dim)
        both = self.heads + self.kv_heads
        turned = self.head_norm(states[:, :both])
        turned = rotate(turned, tables) if self.rotates else turned
        query, key, value = turned[:, : self.heads], turned[:, self.heads :], states[:, both:]
        seen = torch.ops.speculon.attend(query, key, value, self.layer, self.scaling)
        x = x + self.after(self.out(seen.view(x.shape[0], -1)))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.after_mlp(self.down(self.act(gate) * up))


class Layers(nn.Module):
    """`Loop` again, in the compiler's terms: logits [T, V] of all rows."""

    def __init__(self, loop: Loop):
        super().__init__()
        self.embed, self.rotary, self.head_dim = loop.embed, loop.rotary, loop.blocks[0].attention.head_dim
        self.layers = nn.ModuleList(map(Layer, loop.blocks))
        self.norm, self.head = DenseNorm(loop.norm), linear_of(loop.head)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:  # [T] each
        x = self.embed(input_ids[None])
        cos, sin = self.rotary(x, position_ids[None])
        tables, x = tables_of(cos, sin, self.head_dim), x[0]
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(self.norm(x))


def linear_of(product: Product) -> nn.Linear:
    """A product as the library's own layer, its weights unpacked. Raises `NotThisKind` for weights that may not be copied."""
    if isinstance(product, nn.Linear):
        return product
    if not isinstance(product, Packed | Linear):
        raise NotThisKind("not compiled: the weights of a model object stay where they are")
    weight = product.weight.to_dense() if isinstance(product, Packed) else product.weight
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=product.bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if product.bias is not None:
        layer.bias = nn.Parameter(product.bias, requires_grad=False)
    return layer


class Compiled:
    """A loop, compiled for one row and for up to `FEW_ROWS` on the threads there are; other steps take the loop as it is,
    and so do all of a model that is tapped: the compiled forms keep no states.
    """

    def __init__(self, loop: Loop):
        self.loop, self.threads, layers = loop, torch.get_num_threads(), Layers(loop)
        self.one, self.few = torch.compile(layers, dynamic=False), torch.compile(layers, dynamic=True)

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        rows = batch.input_ids.shape[1]
        if taps is not None or rows > FEW_ROWS or not batch.score_rows.numel() or torch.get_num_threads() != self.threads:
            return self.loop(batch, view, taps)
        token = _view.set(view)
        try:
            # Copies: other strides, or tensors not born in inference mode, would be compiled for once more.
            ids, positions = batch.input_ids[0].clone(), batch.position_ids[0].clone()
            logits: Tensor = (self.one if rows == 1 else self.few)(ids, positions)
            return logits.index_select(0, batch.score_rows)
        finally:
            _view.reset(token)


def measured(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiling is worth it for weights of this kind, as far as anybody knows."""
    return device.type == "cpu" and dtype is torch.float32


def compiled(loop: Loop, target: Target, batches: Iterable[tuple[Batch, View]]) -> Compiled:
    """The loop compiled, which takes a minute, and equal to it on every batch given: one of one row, and one of several.

    Raises `NotThisKind` where it cannot be compiled, or differs.
    """
    if not measured(target.dtype, target.device):
        raise NotThisKind(f"not compiled: {target.dtype} on {target.device.type} was never measured")
    try:
        with warnings.catch_warnings(), inductor.patch(SETTINGS), dynamo.patch(recompile_limit=FORMS):
            warnings.simplefilter("ignore")
            made = Compiled(loop)
            for batch, view in batches:
                expected, found = loop(batch, view), made(batch, view)
                if expected is None or found is None or not close(found, expected):
                    raise NotThisKind("not compiled: it computes something else")
    except RuntimeError as error:  # no C++ compiler, for one
        raise NotThisKind(f"not compiled: {next(iter(str(error).splitlines()), type(error).__name__)[:120]}") from error
    return made
