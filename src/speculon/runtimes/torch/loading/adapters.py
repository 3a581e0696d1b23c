"""Gives a target its LoRA adapters: checked against its layers, loaded, and tried once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors import safe_open

from speculon.checkpoints.adapter_config import AdapterCheckpoint
from speculon.checkpoints.locate import name_of
from speculon.core.errors import CorruptWeights, UnsupportedModel
from speculon.runtimes.torch.batch import AdapterRows
from speculon.runtimes.torch.model.adapters import (
    Adapted,
    Adapter,
    CannotAdapt,
    Factors,
    install,
    with_adapters,
)
from speculon.runtimes.torch.model.block import Loop, between
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.trial import Trial

log = logging.getLogger("speculon")


def add_adapters(target: Target, checkpoints: Sequence[AdapterCheckpoint]) -> None:
    """Adds adapters to a target that has none, before its products are put in pieces.

    Raises `UnsupportedModel` for layers that the target lacks or that cannot be adapted, and `CorruptWeights`
    for numbers that are not finite. A base of another name than the target's is logged.
    """
    if not checkpoints:
        return
    for checkpoint in checkpoints:
        check_layers(target, checkpoint)
        warn_of_base(target, checkpoint)
    factors = {checkpoint.name: load_factors(target, checkpoint) for checkpoint in checkpoints}
    try:
        adapted = install(target.model, target.linears, factors)
        if isinstance(loop := target.runner.run, Loop):
            loop.between = between(loop.blocks)  # a program has the products without updates
        for checkpoint in checkpoints:
            try_rows(target, checkpoint.name, adapted)
    except CannotAdapt as reason:
        raise UnsupportedModel(
            f"adapters {', '.join(map(repr, factors))} of {target.name}: {reason}"
        ) from None
    for checkpoint in checkpoints:
        num_bytes = sum(product.num_bytes(checkpoint.name) for product in adapted)
        facts = checkpoint.rank, checkpoint.targets, len(checkpoint.layers)
        target.adapters[checkpoint.name] = Adapter(*facts, num_bytes, checkpoint.digest())


def check_layers(target: Target, checkpoint: AdapterCheckpoint) -> None:
    """Raises `UnsupportedModel` where a layer is missing, has another shape, or is not multiplied row by row
    for the whole batch.
    """
    where = f"adapter {checkpoint.name!r}: {checkpoint.folder}"
    modules = dict(target.model.named_modules())
    tied = target.head, target.model.get_input_embeddings()
    ends = {name for name, module in modules.items() if module in tied}
    mixers = {
        name for name, module in modules.items() if any(module is mixer.module for mixer in target.mixers)
    }
    for name, layer in checkpoint.layers.items():
        if name in ends:
            raise UnsupportedModel(f"{where}: {name}: the embedding and the head are the base's")
        if name not in target.linears:
            raise UnsupportedModel(f"{where}: {name}: the target has no such linear layer")
        if (shape := target.linears[name]) != (layer.outputs, layer.inputs):
            ours = f"{layer.outputs} x {layer.inputs}"
            raise UnsupportedModel(
                f"{where}: {name}: made for {ours}, the target has {shape[0]} x {shape[1]}"
            )
        if any(name.startswith(f"{mixer}.") for mixer in mixers):
            raise UnsupportedModel(f"{where}: {name}: recurrent layers run apart for each group of sequences")
        if ".experts." in name:
            raise UnsupportedModel(f"{where}: {name}: an expert multiplies some rows of a batch alone")


def warn_of_base(target: Target, checkpoint: AdapterCheckpoint) -> None:
    """Logs a base whose name is not the target's: the same model may have several names."""
    known = {name_of(path) for path in (target.name, target.source) if path}
    last = {name.rpartition("/")[2] for name in known}
    if checkpoint.base and name_of(checkpoint.base).rpartition("/")[2] not in last:
        log.warning(
            "adapter %r was made for %s, and the model is %s", checkpoint.name, checkpoint.base, target.name
        )


def load_factors(target: Target, checkpoint: AdapterCheckpoint) -> dict[str, Factors]:
    """By layer, in the dtype of the target and on its device."""
    factors = {}
    with safe_open(checkpoint.file, "pt") as file:
        for name, layer in checkpoint.layers.items():
            tensor = f"base_model.model.{name}.lora_"
            a, b = (file.get_tensor(f"{tensor}{side}.weight").float() for side in "AB")
            if not (math.isfinite(a.abs().max()) and math.isfinite(b.abs().max())):
                raise CorruptWeights(f"{checkpoint.file}: {name} has numbers that are not finite")
            # scaled before it is rounded, so once
            a, b = (part.to(target.device, target.dtype) for part in (a, b * layer.scaling))
            factors[name] = Factors(a, b)
    return factors


@torch.inference_mode()
def try_rows(target: Target, name: str, adapted: Sequence[Adapted]) -> None:
    """A forward with all rows under an adapter. Raises `CannotAdapt` unless each product runs once."""
    trial = Trial.of(target)
    total = trial.batch.input_ids.shape[1]
    batch = replace(trial.batch, adapters=AdapterRows(total, ((name, 0, total),)))  # so it is not captured
    for product in adapted:
        product.calls = 0
    with with_adapters(batch.adapters):
        target.runner.run(batch, trial.view, None)
    if wrong := [product for product in adapted if product.calls != 1]:
        times = "never" if not wrong[0].calls else f"{wrong[0].calls} times"
        raise CannotAdapt(f"{wrong[0].layer} is called {times} in a step")
