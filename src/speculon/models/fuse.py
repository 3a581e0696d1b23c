"""Replaces stock layers by fused blocks, each after a comparison with the original.

The blocks are in models/block and models/linear, the loop over them in models/loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from speculon.kv.store import View
from speculon.models.attention import running_view
from speculon.models.block import Block, CannotReplace, Norm, Tables, block_of, norm_of, tables_of
from speculon.models.captured import RECORDERS, Captured, alike, capture_bytes, captured, sizes
from speculon.models.compare import close, nearly
from speculon.models.fusion import Fusion
from speculon.models.grouping import FOLD_ROWS
from speculon.models.linear import head_is_packed, hooked, joined, plain
from speculon.models.loop import Loop
from speculon.models.remembered import passed, passes
from speculon.models.target import Target, stock_forward
from speculon.models.trial import Trial

if TYPE_CHECKING:
    from speculon.models.compiled import Compiled, Step

Place = tuple[nn.Module, str]  # a module's parent, and its name there
OF_NORMS = 3e-5  # of the largest logit: a third of what the load check allows
# what the modules of an unknown architecture raise
UNKNOWN = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class FusedLayer(nn.Module):
    """A block with the signature of a stock layer."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> Tensor:
        view = running_view()
        return self.block(hidden_states[0], self.tables(position_embeddings, view), view)[None]

    def tables(self, made: tuple[Tensor, Tensor] | None, view: View) -> Tables | None:
        """The rotary tables of this step, converted once for all layers that share them."""
        if made is None:
            return None
        if id(made[0]) not in view.memo:
            # `made` is kept so that its id is not reused
            view.memo[id(made[0])] = made, tables_of(*made, self.block.attention.head_dim)
        return view.memo[id(made[0])][1]


class Fused(nn.Module):
    """A norm or a product in the place of a stock module."""

    def __init__(self, inner: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def fuse(target: Target, *, share: bool, compile: bool = False) -> None:
    """Fuses the target's layers where the result is the same, and reports it in `target.fusion`.

    With `share` the weights are not copied; else they are laid out anew, layer by layer.
    """
    tapped = target.taps.layers if target.taps else ()
    target.capture(())  # layers with hooks are not fused
    trial, fusion = Trial.of(target), Fusion(len(target.layers))
    with torch.inference_mode():
        fuse_layers(target, trial, fusion, share)
        replace_norms(target)
        if not share:
            pack_head(target, trial)
        if not share and fusion.blocks == fusion.layers:
            unmap_file(target.model)  # before compiling, which keeps references to the tensors
        try:
            fuse_loop(target, trial, fusion, compile=compile)
        except CannotReplace as reason:
            fusion.refused[str(reason)] += 1
    target.fusion = fusion
    target.capture(tapped)


def fuse_layers(target: Target, trial: Trial, fusion: Fusion, share: bool) -> None:
    with recorded(target.model, trial) as layers:
        stock_forward(target.model, trial.batch, trial.view)
    for number, (parent, name) in layers.items():
        stock, spec = getattr(parent, name), target.layers[number]
        try:
            fused = FusedLayer(block_of(stock, number, spec.heads, spec.k_dim, share))
            check(stock, fused, trial, number)
        except CannotReplace as reason:
            fusion.refused[str(reason)] += 1
        except UNKNOWN as error:
            fusion.refused[f"{type(stock).__name__} has another structure ({type(error).__name__})"] += 1
        else:
            setattr(parent, name, fused)
            fusion.blocks += 1


def fuse_loop(target: Target, trial: Trial, fusion: Fusion, *, compile: bool) -> None:
    """Replaces the forward by a loop, compiled or captured if asked for. Raises `CannotReplace`."""
    target.run = loop = loop_of(target, trial)
    fusion.one_loop = True
    if compile and len({*loop.kinds}) > 1:
        raise CannotReplace("not compiled: several rotary tables")
    if compile and target.device.type in RECORDERS:
        target.run = captured_loop(loop, target)
        target.num_bytes += capture_bytes(target.model.config.get_text_config(), target.layers, target.dtype)
        fusion.captured = True
    elif compile:
        target.run = compiled_loop(loop, target)
        fusion.compiled = True


def layer_places(model: nn.Module) -> Iterator[tuple[int, Place]]:
    """Each layer's number and place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            number = getattr(getattr(child, "self_attn", None), "layer_idx", None)
            if number is not None:
                yield number, (parent, name)


@contextmanager
def recorded(model: nn.Module, trial: Trial) -> Iterator[dict[int, Place]]:
    """The layers called within the context, unlike those for images; their arguments go to `trial`."""
    called: dict[int, Place] = {}

    def record(number: int, place: Place) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            called[number] = place
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            trial.arguments[number] = others

        return hook

    hooks = [
        getattr(*place).register_forward_pre_hook(record(number, place), with_kwargs=True)
        for number, place in layer_places(model)
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def check(stock: nn.Module, fused: nn.Module, trial: Trial, number: int) -> None:
    """Raises `CannotReplace` where the stock layer has hooks, or is more exact than the fused one."""
    if any(map(hooked, stock.modules())):
        raise CannotReplace(f"{type(stock).__name__} has hooks")
    if passed(name := f"layer {number}"):
        return
    expected, found = trial.run_layer(stock, number), trial.run_layer(fused, number)
    truth = finer_layer(stock, trial, number)
    if truth is None:
        differ = any(not close(a, b) for a, b in zip(found, expected, strict=True))
    else:
        differ = any(not nearly(a, b, t) for a, b, t in zip(found, expected, truth, strict=True))
    if differ:
        raise CannotReplace(f"{type(stock).__name__} computes something else")
    passes(name)


def finer_layer(stock: nn.Module, trial: Trial, number: int) -> list[Tensor] | None:
    """The layer in fp32, or where it is in fp32 in fp64; None where it cannot run in that, as on MPS."""
    finer = torch.float64 if trial.target.dtype is torch.float32 else torch.float32
    try:
        return trial.run_layer(copy.deepcopy(stock).to(finer), number, dtype=finer)
    except UNKNOWN:
        return None


@torch.inference_mode()
def fuse_norms(target: Target) -> None:
    """Fuses the norms of a target whose layers stay stock ones; none, if these read more of a norm."""
    trial = Trial.of(target)
    expected = stock_forward(target.model, trial.batch, trial.view)
    stock = replace_norms(target)
    try:
        found = stock_forward(target.model, trial.batch, trial.view)
    except UNKNOWN:
        found = None
    assert expected is not None
    # in other dtypes, norms that agree up to a rounding give other logits
    limit = OF_NORMS * expected.abs().max() if target.dtype is torch.float32 else torch.inf
    if found is None or bool((found - expected).abs().max() > limit):
        for (parent, name), norm in stock:
            setattr(parent, name, norm)


def replace_norms(target: Target) -> list[tuple[Place, nn.Module]]:
    """Replaces the norms outside of blocks and mixers: the last one, and those of stock layers.

    Returns those that were replaced.
    """
    inside = {id(part) for mixer in target.mixers for part in mixer.module.modules()}
    replaced: list[tuple[Place, nn.Module]] = []
    for parent in [module for module in target.model.modules() if id(module) not in inside]:
        for name, child in list(parent.named_children()):
            try:
                norm = norm_of(child)
            except CannotReplace:
                continue
            # in another dtype than the model's it was compared on rows that it never gets
            if child.weight.dtype is target.dtype:
                setattr(parent, name, Fused(norm))
                replaced.append(((parent, name), child))
    return replaced


def pack_head(target: Target, trial: Trial) -> None:
    """Copies a plain output head into the packed layout, where that is faster and the model only calls it."""
    head: Any = target.model.get_output_embeddings()
    if not plain(head) or not head_is_packed(target.dtype, target.device):
        return
    try:
        target.model.set_output_embeddings(Fused(joined([head], share=False)))
        stock_forward(target.model, trial.batch, trial.view)
    except UNKNOWN:  # it reads the head's weight or bias
        return target.model.set_output_embeddings(head)
    if head.weight is target.model.get_input_embeddings().weight:
        target.num_bytes += head.weight.nbytes


def unmap_file(model: nn.Module) -> None:
    """Copies the remaining parameters: a single tensor keeps the whole checkpoint mapped."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in copies:
                copies[weight] = nn.Parameter(weight.detach().clone(), requires_grad=False)
            setattr(module, name, copies[weight])


def loop_of(target: Target, trial: Trial) -> Loop:
    """The whole forward as one loop. Raises `CannotReplace` where the stock model does anything else."""
    model, base = target.model, target.model.base_model
    loop = uncompared_loop(model, base)
    if not passed("loop"):
        check_loop(model, loop, trial)
        passes("loop")
    return loop


def check_loop(model: Any, loop: Loop, trial: Trial) -> None:
    """Raises `CannotReplace` where the stock model and the loop differ."""
    try:
        expected, found = stock_forward(model, trial.batch, trial.view), loop(trial.batch, trial.view)
    except UNKNOWN as error:
        reason = f"{type(model.base_model).__name__} has another structure ({type(error).__name__})"
        raise CannotReplace(f"no loop: {reason}") from error
    assert expected is not None and found is not None  # all rows are scored
    if not close(found.float(), expected.float()):  # in any dtype: the operations are the same
        raise CannotReplace(f"no loop: {type(model).__name__} does more than its layers")


def uncompared_loop(model: Any, base: Any) -> Loop:
    """The loop over the modules of a base model. Raises `CannotReplace` where one is not fused or unknown."""
    layers, head = list(getattr(base, "layers", ())), model.get_output_embeddings()
    norm: Any = getattr(base, "norm", None)
    if not (layers and all(isinstance(layer, FusedLayer) for layer in layers)):
        raise CannotReplace("no loop: layers of the stock model are left")
    fused_norm = isinstance(norm, Fused) and isinstance(norm.inner, Norm)
    if not fused_norm or not (plain(head) or isinstance(head, Fused)) or not hasattr(base, "rotary_emb"):
        raise CannotReplace(f"no loop: {type(base).__name__} has another norm, head or rotary table")
    if hooked(model) or hooked(base):
        raise CannotReplace(f"no loop: {type(model).__name__} has hooks")
    blocks, types = [x.block for x in layers], rotary_types(base)
    product = head.inner if isinstance(head, Fused) else head
    return Loop(base.embed_tokens, base.rotary_emb, blocks, norm.inner, product, types)


def rotary_types(base: Any) -> tuple[str, ...]:
    """The type of each layer where each type has a rotary table of its own, as in Gemma 3; else none."""
    if "layer_type" not in inspect.signature(base.rotary_emb.forward).parameters:
        return ()
    return tuple(base.config.layer_types)


def compiled_loop(loop: Loop, target: Target) -> Compiled:
    """The loop compiled. Raises `CannotReplace` where that fails."""
    if any(spec.chunk for spec in target.layers):
        raise CannotReplace("not compiled: attention in chunks")
    from speculon.models.compiled import compiled, extra_bytes, row_bytes  # imports the compiler

    made = compiled(loop, target, trial_steps(loop, target))
    target.row_bytes = row_bytes(len(loop.blocks), target.hidden_size, target.dtype, target.device)
    target.num_bytes += extra_bytes(target.num_bytes, target.dtype, target.device)
    return made


def trial_steps(loop: Loop, target: Target) -> list[Step]:
    """Steps to compile and compare. The first of each program is compiled, so only one row's sizes are 1."""
    trial, batch = Trial.of(target, (8, 3)), Trial.of(target, (FOLD_ROWS + 1, 7))
    single = Trial.of(target, (1, 1))
    for each in (trial, batch):
        loop(each.batch, each.view)  # writes keys to attend to
    one, few = trial.last(1), trial.last(5)
    several, many = (trial.batch, trial.view), (batch.batch, batch.view)
    some = replace(batch.batch, score_rows=batch.batch.score_rows[3:]), batch.view
    ends = [(replace(step, score_rows=step.score_rows[-1:]), view) for step, view in (few, several, many)]
    late = [trial.last(1, 2), trial.last(2, 2, scattered=True), trial.last(1, scattered=True)]
    early = [trial.last(8), single.last(1), (single.batch, single.view)]
    return [one, few, several, many, some, *ends, *late, *early]


def captured_loop(loop: Loop, target: Target, same: Callable[[Tensor, Tensor], bool] = alike) -> Captured:
    """The loop as CUDA graphs; `same` compares its results. Raises `CannotReplace` where that fails."""
    trials = (Trial.of(target, (rows - rows // 2, rows // 2) if rows > 1 else (1,)) for rows in sizes())
    steps = ((trial.batch, trial.view) for trial in trials)
    return captured(loop, target, steps, RECORDERS[target.device.type](target.device), same)
