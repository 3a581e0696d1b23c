"""The loop as programs made by torch's compiler ahead of time: in the few rows of a decoding step a call of
an operation costs as much as its work.

One row, and few rows, of a text that lies in consecutive slots have programs that call the library's
attention kernel. The others write the pages, too, and call back for attention. How programs are made depends
on how weights lie. In rows, they are the loop's own and the products the library's; and few rows of each of
several texts have a program in which they share a call of the kernel.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from inspect import getfile
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.export import Dim, export

from speculon.batch import Batch, as_tensor
from speculon.core import LayerSpec
from speculon.kv.store import SpanView, View, as_index
from speculon.models.attention import attend_written, fold, unfold
from speculon.models.block import Block, CannotReplace, Norm, Stock, Tables, rotate, tables_of
from speculon.models.compare import close
from speculon.models.grouping import FOLD_ROWS, joint_call, visible_keys
from speculon.models.linear import Linear, Packed, Product, layout_of
from speculon.models.loop import Loop
from speculon.models.masks import MASKS
from speculon.models.taps import Taps
from speculon.models.target import Target

Settings = dict[str, Any]
# weights as the loop has them
SHARED: Settings = {"cpp.weight_prepack": False, "aot_inductor.package_constants_in_so": False}
FOLDED: Settings = {"freezing": True}  # weights packed: each program holds a copy of them
# products in kernels of the compiler's own, by time
TUNED = FOLDED | {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
COPIES = 5
# Of a call that texts share: how many times their own rows and keys it may take, and what it may fill for a
# layer (all guesses).
WASTED_ROWS, WASTED_KEYS, JOINT_BYTES = 4, 2, 32 << 20
MOST = 1 << 40  # rows or slots: no limit

Given = list[Tensor | None]  # the arguments of `Layers`
Program = Callable[..., Tensor]  # of them


@dataclass(frozen=True, slots=True)
class Making:
    """How the programs are made."""

    settings: dict[str, Settings]
    few: int  # rows


IN_ROWS = Making({"one": SHARED, "few": SHARED, "joint": SHARED, "many": SHARED}, few=FOLD_ROWS)
# Beyond 12 rows the library's products catch up with the compiler's own.
IN_BLOCKS = Making({"one": TUNED, "few": TUNED, "scattered": TUNED, "many": FOLDED}, few=12)

_view: ContextVar[View] = ContextVar("speculon_compiled_view")


@torch.library.custom_op("speculon::attend", mutates_args=())
def attend(query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
    """`attend_written` on the pages of the step that runs.

    They are arguments so that rows are written first.
    """
    return attend_written(_view.get(), layer, query, scaling).contiguous()


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, layer: int, scaling: float) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[-1])


def attend_back(keys: Tensor, values: Tensor, slots: Tensor, layer: int, *given: Any) -> Tensor:  # [T, H, Dv]
    """Rows of texts that lie anywhere: what they see is found outside of the program."""
    query, key, value, scaling = given
    return torch.ops.speculon.attend(
        query, keys.index_copy_(0, slots, key), values.index_copy_(0, slots, value), layer, scaling
    )


# [T, H, Dv]
def attend_joint(keys: Tensor, values: Tensor, slots: Tensor, joint: Sequence[Tensor], *given: Any) -> Tensor:
    """Rows of texts that share one call of the kernel; `joint` is what `Compiled.joint` gives, of one kind of
    layer.
    """
    (query, key, value, scaling), (rows, order, where, mask) = given, joint
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    # [B, Hkv, n * g, Dk]
    q = query[rows].unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    k = keys.index_copy_(0, slots, key)[where].transpose(1, 2)
    v = values.index_copy_(0, slots, value)[where].transpose(1, 2)
    mask = mask.repeat_interleave(group, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling).unflatten(2, (-1, group))
    return out.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)[order]


def attend_alone(keys: Tensor, values: Tensor, mask: Tensor | None, *given: Any) -> Tensor:  # [T, H, Dv]
    """The rows of one text: they go to the last of the slots that it sees, which are views of the pages."""
    query, key, value, scaling = given
    group, before = query.shape[1] // key.shape[1], keys.shape[0] - key.shape[0]  # len() would be a constant
    keys[before:] = key
    values[before:] = value
    k, v = (slots.transpose(0, 1)[None] for slots in (keys, values))
    mask = None if mask is None else mask.repeat_interleave(group, 0)
    return unfold(
        F.scaled_dot_product_attention(fold(query, 1, group), k, v, attn_mask=mask, scale=scaling), group
    )


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
            raise CannotReplace("not compiled: its layers are more than products and plain attention")
        self.heads, self.kv_heads, self.head_dim = of.heads, of.kv_heads, of.head_dim
        self.scaling, self.rotates, self.act = of.scaling, of.rotates, mlp.act
        self.qkv, self.out = linear_of(of.qkv), linear_of(of.out)
        self.gate_up, self.down = linear_of(mlp.gate_up), linear_of(mlp.down)
        self.head_norm = nn.Identity() if of.norm is None else DenseNorm(of.norm)
        before, after, before_mlp, after_mlp = (
            nn.Identity() if norm is None else DenseNorm(norm) for norm in block.norms
        )
        self.before, self.after, self.before_mlp, self.after_mlp = before, after, before_mlp, after_mlp

    def forward(self, x: Tensor, tables: Tables, attend: Callable[..., Tensor]) -> Tensor:  # [T, D] -> [T, D]
        states = self.qkv(self.before(x)).view(x.shape[0], -1, self.head_dim)
        both = self.heads + self.kv_heads
        turned = self.head_norm(states[:, :both])
        turned = rotate(turned, tables) if self.rotates else turned
        query, key, value = turned[:, : self.heads], turned[:, self.heads :], states[:, both:]
        found = attend(query, key, value, self.scaling)
        x = x + self.after(self.out(found.reshape(x.shape[0], -1)))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.after_mlp(self.down(self.act(gate) * up))


class Layers(nn.Module):
    """`Loop` again, in the compiler's terms: logits [R, V]."""

    def __init__(self, loop: Loop, kinds: list[int]):
        super().__init__()
        self.embed, self.rotary, self.head_dim = loop.embed, loop.rotary, loop.blocks[0].attention.head_dim
        self.layers, self.kinds = nn.ModuleList(map(Layer, loop.blocks)), kinds
        self.norm, self.head = DenseNorm(loop.norm), linear_of(loop.head)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, scored: Tensor, slots: Tensor | None, *pages: Tensor
    ) -> Tensor:
        """`scored`: which rows, [R]; `slots`: where their keys and values go, [T]; `pages`: the keys of all
        slots for each layer, their values, and for texts that share one call of the kernel, what
        `Compiled.joint` gives.

        Without `slots` the pages are those of one text, and if it has several rows, masks of each kind of
        layer follow.
        """
        x = self.embed(input_ids[None])
        cos, sin = self.rotary(x, position_ids[None])
        tables, x = tables_of(cos, sin, self.head_dim), x[0]
        count, kinds = len(self.kinds), len(set(self.kinds))
        more = pages[2 * count :]
        for number, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            lies = pages[number], pages[count + number]
            if slots is None:
                attend = partial(attend_alone, *lies, more[kind] if more else None)
            elif more:
                attend = partial(
                    attend_joint, *lies, slots, (more[0], more[1], more[2 + kind], more[2 + kinds + kind])
                )
            else:
                attend = partial(attend_back, *lies, slots, number)
            x = layer(x, tables, attend)
        return self.head(self.norm(x[scored]))


def linear_of(product: Product) -> nn.Linear:
    """A product as the library's own layer, its weights unpacked.

    Raises `CannotReplace` for weights that may not be copied.
    """
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


class Compiled:
    """A loop and its programs, for the threads there were. Steps that score nothing take the loop as it is,
    and so do all of a model that is tapped: the programs keep no states.
    """

    def __init__(self, loop: Loop, kinds: list[int], making: Making):
        self.loop, self.kinds, self.making, self.threads = loop, kinds, making, torch.get_num_threads()
        self.programs: dict[str, Program] = {}
        self.firsts = [kinds.index(kind) for kind in sorted(set(kinds))]  # a layer of each kind
        self.group = loop.blocks[0].attention.heads // loop.blocks[0].attention.kv_heads

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        if taps is not None or not batch.score_rows.numel() or torch.get_num_threads() != self.threads:
            return self.loop(batch, view, taps)
        form, given = self.arguments(batch, view)
        token = _view.set(view)
        try:
            return self.programs[form](*given)
        finally:
            _view.reset(token)

    def arguments(self, batch: Batch, view: View) -> tuple[str, Given]:
        """Which program a step takes, and what it is called with."""
        rows, span = batch.input_ids.shape[1], view.spans[0]
        given = batch.input_ids[0], batch.position_ids[0], batch.score_rows
        if rows > self.making.few or len(view.spans) > 1 or not isinstance(span.where, slice):
            written: Given = [*given, as_index(view.slots, view.store.device), *view.pools(len(self.kinds))]
            if "joint" in self.making.settings and (joint := self.joint(view)):
                return "joint", [*written, *joint]
            return (
                "scattered" if rows <= self.making.few and "scattered" in self.making.settings else "many",
                written,
            )
        keys, values, masks = [], [], {}
        for layer, kind in enumerate(self.kinds):
            window = view.spec(layer).window
            length = visible_keys(span, window)
            key, value = view.slots_of(layer, span.tail(length))
            keys.append(key)
            values.append(value)
            if rows > 1 and kind not in masks:
                masks[kind] = MASKS.slice(rows, length, window, 1, key.dtype, key.device).contiguous()
        return "few" if masks else "one", [
            *given,
            None,
            *keys,
            *values,
            *(masks[kind] for kind in sorted(masks)),
        ]

    def joint(self, view: View) -> Given:
        """Which rows are in the call that all texts share, [B, n], and where each comes out of it, [T]; of
        each kind of layer the slots seen, [B, S], then the masks, [B, 1, n, S]. Nothing where they had better
        not share one.
        """
        spans, device, specs = view.spans, view.store.device, [view.spec(layer) for layer in self.firsts]
        if len(spans) == 1 or not all(shared(spans, spec, self.group) for spec in specs):
            return []
        calls = [joint_call(spans, spec.window, 1, spec.dtype, device) for spec in specs]
        texts, most = calls[0].spans, calls[0].n
        order = [i * most + row for i, span in enumerate(spans) for row in range(span.rows)]
        wheres = [as_index(call.where, device).view(texts, -1) for call in calls]
        masks = [
            torch.zeros(texts, 1, most, where.shape[1], dtype=spec.dtype) if call.mask is None else call.mask
            for spec, call, where in zip(specs, calls, wheres, strict=True)
        ]
        return [as_index(calls[0].rows, device).view(texts, most), as_tensor(order, device), *wheres, *masks]


def shared(spans: list[SpanView], spec: LayerSpec, group: int) -> bool:
    """Whether one call for all texts, which pads rows and keys to the most there are and copies the keys, is
    worth it: within a program it took 0.64 to 1.01 of the time of calls back (2 to 8 texts, contexts of 300
    to 1300)."""
    rows, keys = [span.rows for span in spans], [visible_keys(span, spec.window) for span in spans]
    padded, most = len(spans) * max(keys), max(rows)
    if most > FOLD_ROWS or len(spans) * most > WASTED_ROWS * sum(rows) or padded > WASTED_KEYS * sum(keys):
        return False
    masks = most * (1 + group) * spec.dtype.itemsize  # to a key: as it is given, and for each query head
    return padded * (spec.bytes_per_token + masks) <= JOINT_BYTES


def program(layers: Layers, form: str, settings: Settings, given: Given, key: str) -> Program:
    """The layers compiled for arguments like these, of any length where more than one row or slot is given."""
    # of pages each store has another number
    shapes = [None if x is None else x.shape[x.dim() > 2 :] for x in given]
    name = hashlib.sha256(f"{key} {form} {settings} {shapes}".encode()).hexdigest()
    path = Path(cache_dir()) / "speculon" / f"{name}.pt2"
    if path.exists():
        with suppress(RuntimeError):  # a damaged file: it is made anew
            return loaded(path, layers, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    # here, unlike pages, which inference mode made
    born = tuple(None if x is None else x.clone() for x in given)
    made = export(layers, born, dynamic_shapes=sizes_of(given, layers.kinds), strict=False)
    # of what another process makes nobody sees half
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        os.replace(
            aoti_compile_and_package(made, package_path=f"{folder}/{path.name}", inductor_configs=settings),
            path,
        )
    return loaded(path, layers, settings)


def loaded(path: Path, layers: Layers, settings: Settings) -> Program:
    """A program of the file, over the weights of `layers` where it has none of its own."""
    package = aoti_load_package(str(path), run_single_threaded=True)
    run = package.loader.boxed_run
    if settings is not SHARED:
        return partial(call, run)
    weights = dict(
        chain(layers.named_parameters(remove_duplicate=False), layers.named_buffers(remove_duplicate=False))
    )
    wanted = package.get_constant_fqns()
    if missing := set(wanted) - weights.keys():
        raise CannotReplace(f"not compiled: {min(missing)} is a constant, but no weight")
    given = {name: weights[name].detach() for name in wanted}  # which the package keeps for good
    package.load_constants(given, check_full_update=True, user_managed=True)
    return partial(call, run)


def call(run: Callable[[list[Tensor]], list[Tensor]], *given: Tensor | None) -> Tensor:
    """What the package's own call does, less the trees of its arguments: a twelfth of a step of one row."""
    return run([x for x in given if x is not None])[0]


def sizes_of(given: Given, kinds: list[int]) -> tuple[Any, ...]:
    """Which sizes of the arguments differ from call to call: rows, texts, the most rows of one, and the slots
    of each layer.
    """
    ids, _, _, slots, *pages = given
    rows, scored = (
        {0: Dim(name, min=2, max=MOST)} if ids is not None and len(ids) > 1 else {}
        for name in ("rows", "scored")
    )
    of_kind = {kind: Dim(f"slots_{kind}", min=2, max=MOST) for kind in sorted(set(kinds))}
    if slots is None:
        keys = [{0: of_kind[kind]} for kind in kinds]
        masks = [{**rows, 1: of_kind[kind]} for kind in of_kind]
        return rows, rows, scored, None, (*keys, *keys, *masks)[: len(pages)]
    pool = [{0: Dim("slots", min=2, max=MOST)}] * len(kinds)
    texts, most = Dim("texts", min=2, max=MOST), Dim("most", min=2, max=MOST)
    wheres = [{0: texts, 1: seen} for seen in of_kind.values()]
    masks = [{0: texts, 2: most, 3: seen} for seen in of_kind.values()]
    return rows, rows, scored, rows, (*pool, *pool, {0: texts, 1: most}, rows, *wheres, *masks)[: len(pages)]


def making_of(dtype: torch.dtype, device: torch.device) -> Making:
    """How programs are made for weights of this kind: where they lie in rows, all share them."""
    return IN_ROWS if layout_of(dtype, device) is Linear else IN_BLOCKS


def bytes_more(weights: int, dtype: torch.dtype, device: torch.device) -> int:
    """What compiling takes beside weights of so many bytes."""
    if not measured(dtype, device):
        return 0
    return JOINT_BYTES if making_of(dtype, device) is IN_ROWS else COPIES * weights


def key_of(layers: Layers) -> str:
    """What tells programs apart that the compiler's cache keeps: weights, machine, and how they are made."""
    versions = torch.__version__, transformers.__version__
    machine: tuple[object, ...] = (str(pick_vec_isa()), getattr(torch.cpu, "get_capabilities", dict)())
    how: tuple[object, ...] = (layers, versions, machine, torch.get_num_threads())
    key = hashlib.sha256(
        f"{how}".encode() + b"".join(Path(getfile(part)).read_bytes() for part in (Layers, rotate, fold))
    )
    # numbers become constants of a program: eps, scaling, kinds of layers
    for name, module in layers.named_modules():
        key.update(
            f"{name} {[(x, y) for x, y in vars(module).items() if isinstance(y, int | float | list)]}".encode()
        )
        key.update(f"{getattr(vars(module).get('act'), '__qualname__', '')}".encode())
    # rotary tables are no state
    for name, weight in {**layers.state_dict(), **dict(layers.named_buffers())}.items():
        key.update(f"{name} {weight.shape}".encode())
        key.update(weight.contiguous().numpy())
    return key.hexdigest()


def written(view: View, layers: int) -> list[Tensor]:
    """Keys and values of a step's rows, [T, Hkv, D] for each layer."""
    return [rows.clone() for layer in range(layers) for rows in view.slots_of(layer, view.slots)]


def measured(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiling is worth it for weights of this kind, as far as anybody knows."""
    return device.type == "cpu" and dtype is torch.float32


def compiled(loop: Loop, target: Target, batches: Iterable[tuple[Batch, View]]) -> Compiled:
    """The loop compiled for steps of the kinds given, which takes half a minute each, and equal to it on all,
    pages included.

    Raises `CannotReplace` where it cannot be compiled, or differs.
    """
    if not measured(target.dtype, target.device):
        raise CannotReplace(f"not compiled: {target.dtype} on {target.device.type} was never measured")
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")
            batches = list(batches)
            kinds = [batches[0][1].kind(layer) for layer in range(len(loop.blocks))]
            making = making_of(target.dtype, target.device)
            layers, made = (
                Layers(loop, [sorted(set(kinds)).index(kind) for kind in kinds]),
                Compiled(loop, kinds, making),
            )
            key = key_of(layers)  # before any is made: that leaves traces in them
            for batch, view in batches:
                form, given = made.arguments(batch, view)
                if form not in made.programs:
                    made.programs[form] = program(layers, form, making.settings[form], given, key)
        if made.programs.keys() != making.settings.keys():
            raise CannotReplace(
                f"not compiled: no step was tried for {sorted(making.settings.keys() - made.programs.keys())}"
            )
        for batch, view in batches:
            expected = [loop(batch, view), *written(view, len(kinds))]
            for layer in range(len(kinds)):  # a row forgotten must show
                view.write(layer, *(torch.full_like(x, torch.nan) for x in view.slots_of(layer, view.slots)))
            found = [made(batch, view), *written(view, len(kinds))]
            if any(a is None or b is None or not close(a, b) for a, b in zip(found, expected, strict=True)):
                raise CannotReplace("not compiled: it computes something else")
    except CannotReplace:
        raise
    except Exception as error:  # no C++ compiler, a folder that cannot be written, or whatever else the compiler's parts raise
        raise CannotReplace(
            f"not compiled: {next(iter(str(error).splitlines()), type(error).__name__)[:120]}"
        ) from error
    return made
