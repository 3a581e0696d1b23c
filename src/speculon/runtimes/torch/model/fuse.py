"""Chooses how a target runs: fused blocks in the place of its layers, and a loop in that of its forward.

Each is compared with the original first, and so are compiled operations and the captured loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from speculon.checkpoints.reading import release_memory
from speculon.runtimes.torch.model.block import (
    UNKNOWN,
    CannotReplace,
    Fused,
    FusedLayer,
    FusedNorm,
    FusedRows,
    Loop,
    fused_block,
    fused_norm,
)
from speculon.runtimes.torch.model.captured import RECORDERS, CaptureSizes, captured_loop
from speculon.runtimes.torch.model.compare import close, nearly
from speculon.runtimes.torch.model.compiled import compile_parts
from speculon.runtimes.torch.model.linear import head_is_packed, hooked, joined, plain
from speculon.runtimes.torch.model.quantized import Unpacked, head_product, in_numbers, layers_of
from speculon.runtimes.torch.model.remembered import passed, passes
from speculon.runtimes.torch.model.target import Runner, Target, stock_forward
from speculon.runtimes.torch.model.trial import Trial

ModulePlace = tuple[nn.Module, str]  # a module's parent, and its name there
OF_NORMS = 3e-5  # of the largest logit: a third of what the load check allows


def fuse(target: Target, *, share: bool, compile: bool = False, mapped: bool = True) -> None:
    """Fuses the target's layers where the result is the same, and gives it the runner with the fastest form.

    With `share` the weights are not copied; else they are laid out anew, layer by layer, and what is left of
    those that may be `mapped` from a file is copied.
    """
    tapped = target.taps.layers if target.taps else ()
    target.capture(())  # layers with hooks are not fused
    trial, runner = Trial.of(target), Runner(target.runner.run, len(target.layers))
    target.runner = runner
    with torch.inference_mode():
        fuse_layers(target, trial, share)
        replace_norms(target)
        if not share:
            pack_head(target, trial)
            pack_rest(target.model)
        if mapped and not share and runner.fused == runner.layers:
            unmap_file(target.model)  # before capturing, which keeps references to the tensors
        try:
            choose_loop(target, trial, compile=compile)
        except CannotReplace as reason:
            runner.refused[str(reason)] += 1
    target.capture(tapped)


def fuse_layers(target: Target, trial: Trial, share: bool) -> None:
    runner, places = target.runner, dict(layer_places(target.model))
    if passed("all layers"):  # no layer is compared, so none needs arguments
        layers = places
    else:
        unscored = replace(trial.batch, score_rows=trial.batch.score_rows[:0])  # it needs no head
        with recorded(target.model, trial) as layers:
            stock_forward(target.model, unscored, trial.view)
    for number, (parent, name) in layers.items():
        stock, spec = getattr(parent, name), target.layers[number]
        try:
            fused = FusedLayer(fused_block(stock, number, spec.heads, spec.k_dim, share))
            check(stock, fused, trial, number)
        except CannotReplace as reason:
            runner.refused[str(reason)] += 1
        except UNKNOWN as error:
            runner.refused[f"{type(stock).__name__} has another structure ({type(error).__name__})"] += 1
        else:
            setattr(parent, name, fused)
            runner.fused += 1
    if runner.fused == runner.layers and places == layers:
        passes("all layers")


def choose_loop(target: Target, trial: Trial, *, compile: bool) -> None:
    """Replaces the forward by a loop, compiled or captured if asked for. Raises `CannotReplace`."""
    runner, config = target.runner, target.model.config.get_text_config()
    runner.run = loop = make_loop(target, trial)
    runner.form = "loop"
    if not compile:
        return
    if target.device.type in RECORDERS:
        if len({*loop.kinds}) > 1:
            raise CannotReplace("not captured: several rotary tables")
        runner.run = captured_loop(loop, target)
        runner.form = "captured"
        runner.num_bytes += CaptureSizes.of_target(config, target.layers).num_bytes(target.dtype)
    elif target.device.type == "cpu":
        compile_parts(loop)
        runner.form = "compiled"
    else:
        raise CannotReplace(f"not compiled: {target.device.type} was never measured")


def layer_places(model: nn.Module) -> Iterator[tuple[int, ModulePlace]]:
    """Each layer's number and place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            number = getattr(getattr(child, "self_attn", None), "layer_idx", None)
            if number is not None:
                yield number, (parent, name)


@contextmanager
def recorded(model: nn.Module, trial: Trial) -> Iterator[dict[int, ModulePlace]]:
    """The layers called within the context, unlike those for images; their arguments go to `trial`."""
    called: dict[int, ModulePlace] = {}

    def record(number: int, place: ModulePlace) -> Callable[..., None]:
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
    stock = in_numbers(stock)
    expected, results = trial.run_layer(stock, number), trial.run_layer(fused, number)
    truth = finer_layer(stock, trial, number)
    if truth is None:
        differ = any(not close(a, b) for a, b in zip(results, expected, strict=True))
    else:
        differ = any(not nearly(a, b, t) for a, b, t in zip(results, expected, truth, strict=True))
    release_memory()  # the next layer's tensors do not fit into all places of those that were freed
    if differ:
        raise CannotReplace(f"{type(stock).__name__} computes something else")
    passes(name)


def finer_layer(stock: nn.Module, trial: Trial, number: int) -> list[Tensor] | None:
    """The layer in fp32, or where it is in fp32 in fp64; None where it cannot run in that, as on MPS."""
    finer = torch.float64 if trial.target.dtype is torch.float32 else torch.float32
    # weights that were unpacked, to fp32, are not copied: those of a large layer take gigabytes
    shared: dict[int, Any] = {
        id(part.weight): part.weight for part in stock.modules() if isinstance(part, Unpacked)
    }
    try:
        return trial.run_layer(copy.deepcopy(stock, shared).to(finer), number, dtype=finer)
    except UNKNOWN:
        return None


@torch.inference_mode()
def fuse_norms(target: Target) -> None:
    """Fuses the norms of a target whose layers stay stock ones; none, if these read more of a norm."""
    trial = Trial.of(target)
    expected = stock_forward(target.model, trial.batch, trial.view)
    stock = replace_norms(target)
    try:
        logits = stock_forward(target.model, trial.batch, trial.view)
    except UNKNOWN:
        logits = None
    assert expected is not None
    # in other dtypes, norms that agree up to a rounding give other logits
    limit = OF_NORMS * expected.abs().max() if target.dtype is torch.float32 else torch.inf
    if logits is None or bool((logits - expected).abs().max() > limit):
        for (parent, name), norm in stock:
            setattr(parent, name, norm)


def replace_norms(target: Target) -> list[tuple[ModulePlace, nn.Module]]:
    """Replaces the norms outside of blocks and mixers: the last one, and those of stock layers.

    Returns those that were replaced.
    """
    inside = {id(part) for mixer in target.mixers for part in mixer.module.modules()}
    replaced: list[tuple[ModulePlace, nn.Module]] = []
    for parent in [module for module in target.model.modules() if id(module) not in inside]:
        for name, child in list(parent.named_children()):
            try:
                norm = fused_norm(child)
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
    if type(head) is not nn.Linear or hooked(head) or not head_is_packed(target.dtype, target.device):
        return
    try:
        target.model.set_output_embeddings(Fused(joined([head], share=False)))
        if not passed("head"):
            stock_forward(target.model, trial.batch, trial.view)
            passes("head")
    except UNKNOWN:  # it reads the head's weight or bias
        return target.model.set_output_embeddings(head)
    if head.weight is target.model.get_input_embeddings().weight:
        target.runner.num_bytes += head.weight.nbytes


def pack_rest(model: Any) -> None:
    """Quantised layers that are in no fused block, the head among them, multiply by packed weights, too."""
    head = model.get_output_embeddings()
    for name, layer in list(layers_of(model)):
        if not hooked(layer):
            product = head_product(layer) if layer is head else joined([layer], share=False)
            model.set_submodule(name, FusedRows(product))


def unmap_file(model: nn.Module) -> None:
    """Copies the remaining parameters: a single tensor keeps the whole checkpoint mapped."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in copies:
                copies[weight] = nn.Parameter(weight.detach().clone(), requires_grad=False)
            setattr(module, name, copies[weight])


def make_loop(target: Target, trial: Trial) -> Loop:
    """The whole forward as one loop. Raises `CannotReplace` where the stock model does anything else."""
    model = target.model
    loop = uncompared_loop(model, model.get_decoder() if target.vision else model.base_model)
    if not passed("loop"):
        check_loop(model, loop, trial)
        passes("loop")
    return loop


def check_loop(model: Any, loop: Loop, trial: Trial) -> None:
    """Raises `CannotReplace` where the stock model and the loop differ."""
    try:
        expected, logits = stock_forward(model, trial.batch, trial.view), loop(trial.batch, trial.view)
    except UNKNOWN as error:
        reason = f"{type(model.base_model).__name__} has another structure ({type(error).__name__})"
        raise CannotReplace(f"no loop: {reason}") from error
    assert expected is not None and logits is not None  # all rows are scored
    if not close(logits.float(), expected.float()):  # in any dtype: the operations are the same
        raise CannotReplace(f"no loop: {type(model).__name__} does more than its layers")


def uncompared_loop(model: Any, base: Any) -> Loop:
    """The loop over the modules of a base model. Raises `CannotReplace` where one is not fused or unknown."""
    layers, head = list(getattr(base, "layers", ())), model.get_output_embeddings()
    norm: Any = getattr(base, "norm", None)
    if not (layers and all(isinstance(layer, FusedLayer) for layer in layers)):
        raise CannotReplace("no loop: layers of the stock model are left")
    fused_norm = isinstance(norm, Fused) and isinstance(norm.inner, FusedNorm)
    if not fused_norm or not (plain(head) or isinstance(head, Fused)) or not hasattr(base, "rotary_emb"):
        raise CannotReplace(f"no loop: {type(base).__name__} has another norm, head or rotary table")
    if hooked(model) or hooked(base):
        raise CannotReplace(f"no loop: {type(model).__name__} has hooks")
    blocks, types = [x.block for x in layers], rotary_types(base)
    product = head.inner if isinstance(head, Fused) else head
    own_norm = FusedNorm(norm.inner.weight, norm.inner.eps)  # a program in it takes two dimensions alone
    return Loop(base.embed_tokens, base.rotary_emb, blocks, own_norm, product, types)


def rotary_types(base: Any) -> tuple[str, ...]:
    """The type of each layer where each type has a rotary table of its own, as in Gemma 3; else none."""
    if "layer_type" not in inspect.signature(base.rotary_emb.forward).parameters:
        return ()
    return tuple(base.config.layer_types)
