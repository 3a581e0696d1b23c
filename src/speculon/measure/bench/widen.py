"""A small model at the cost of a larger one: its MLPs get columns that are computed and add nothing.

So speculation is measured at the costs of a larger target, with the acceptance of the small one. It says
nothing about a larger model's text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from speculon.core.errors import ConfigError, InvalidParameter, UnsupportedModel
from speculon.loading.load_check import LOOSE, TOLERANCE, paged_logits
from speculon.target.budget import free_memory
from speculon.target.target import Target

PARTS = ("gate_proj", "up_proj", "down_proj")
STEP = 8  # columns: kernels are slow on odd widths
SCALE = 0.02  # of the random rows: an activation far from overflow, and from zero
MILLION = 1_000_000


def widen_target(target: Target, millions: int) -> None:
    """Widens the model in place; refuses one whose logits change, as with an MLP that ranks its columns."""
    if target.runner.chosen:
        advice = "load it with fuse=False and fuse it then"
        raise ConfigError(f"{target.name}: a fused target cannot be widened; {advice}")
    before = paged_logits(target)
    widen(target.model, millions, target.name)
    error = float((paged_logits(target) - before).abs().max() / before.abs().max())
    limit = TOLERANCE.get(target.dtype, LOOSE)
    if not error <= limit:  # a NaN is refused too
        raise UnsupportedModel(
            f"{target.name}: widening changed the logits by {error:.2g} of the largest one, allowed is "
            f"{limit:.2g}"
        )
    target.count()


def widen(model: nn.Module, millions: int, name: str) -> None:
    """Adds the same number of columns to every gated MLP, up to about that many parameters; in place."""
    mlps = list(gated_mlps(model))
    if not mlps:
        of_class = f"{name} ({type(model).__name__})"
        raise UnsupportedModel(f"{of_class} has no MLP of linear {', '.join(PARTS)} to be widened")
    size = sum(p.numel() for p in {p.data_ptr(): p for p in model.parameters()}.values())
    per_column = sum(part.weight.numel() // mlp.down_proj.in_features for mlp in mlps for part in parts(mlp))
    columns = (millions * MILLION - size) // per_column // STEP * STEP
    if columns < STEP:
        reason = f"{name} has {size / MILLION:.1f} million parameters already"
        raise InvalidParameter("widen", millions, reason)
    weight = parts(mlps[0])[0].weight
    needed, free = columns * per_column * weight.itemsize, free_memory(weight.device)
    if needed > free:
        raise InvalidParameter("widen", millions, f"needs {needed} bytes more, {free} are free")
    generator = torch.Generator().manual_seed(0)
    for mlp in mlps:
        widen_mlp(mlp, columns, generator)


def gated_mlps(model: nn.Module) -> Iterator[Any]:
    """Modules that compute down(act(gate(x)) * up(x)) with plain linear layers."""
    for module in model.modules():
        if all(type(getattr(module, part, None)) is nn.Linear for part in PARTS):
            yield module


def parts(mlp: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


@torch.no_grad()
def widen_mlp(mlp: nn.Module, columns: int, generator: torch.Generator) -> None:
    gate, up, down = parts(mlp)
    for part in (gate, up):
        rows = torch.randn(columns, part.in_features, generator=generator) * SCALE
        part.weight = longer(part.weight, rows, dim=0)
        part.out_features += columns
        if part.bias is not None:
            part.bias = longer(part.bias, torch.zeros(columns), dim=0)
    down.weight = longer(down.weight, torch.zeros(down.out_features, columns), dim=1)
    down.in_features += columns


def longer(weight: Tensor, more: Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(torch.cat([weight, more.to(weight)], dim), requires_grad=False)
