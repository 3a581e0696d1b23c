"""The optimizers: AdamW for everything, or Muon for the matrices inside the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from speculon.core.errors import ConfigError
from speculon.loading.load import pick_dtype
from speculon.train.settings import TrainSettings

# AdamW at 1e-4 is usual for heads of width 4096
REFERENCE_WIDTH, REFERENCE_LR, MOST_LR = 4096, 1e-4, 2e-3
OUTER = ("lm_head", "embed", "markov_head", "confidence_head")  # matrices that Muon does not suit


def grouped(parameters: list[nn.Parameter], rate: float, decay: float) -> list[dict[str, Any]]:
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    made = [
        {"params": matrices, "weight_decay": decay, "peak": rate},
        {"params": others, "weight_decay": 0.0, "peak": rate},
    ]
    return [group for group in made if group["params"]]


def peak_rate(settings: TrainSettings, width: int) -> float:
    return settings.lr or min(MOST_LR, REFERENCE_LR * REFERENCE_WIDTH / width)


def adamw(module: nn.Module, settings: TrainSettings, width: int) -> list[torch.optim.Optimizer]:
    rate = peak_rate(settings, width)
    groups = grouped([p for p in module.parameters() if p.requires_grad], rate, settings.weight_decay)
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]


def muon(module: nn.Module, settings: TrainSettings, width: int) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, output heads and norms."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optimizer = 'muon': PyTorch has it from 2.9 on, this is {torch.__version__}")
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inner = [p for name, p in named.items() if p.ndim == 2 and not any(word in name for word in OUTER)]
    ours = {id(p) for p in inner}
    rate = peak_rate(settings, width)
    rest = grouped([p for p in named.values() if id(p) not in ours], rate, settings.weight_decay)
    matrices = [{"params": inner, "peak": settings.muon_lr, "weight_decay": settings.weight_decay}]
    native = pick_dtype("auto", "bfloat16", inner[0].device) is torch.bfloat16
    return [
        (torch.optim.Muon if native else in_fp32(torch.optim.Muon))(matrices, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True),
    ]


def in_fp32(optimizer: type[torch.optim.Optimizer]) -> Any:
    """Muon with fp32 products: in emulated bf16 they took 72 % of a training step (AMD EPYC, AVX2)."""

    class InFp32(optimizer):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            with Fp32ForBf16():
                return super().step(closure)

    return InFp32


class Fp32ForBf16(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.float if func is Tensor.bfloat16 else func)(*args, **(kwargs or {}))


OPTIMIZERS: Mapping[str, Callable[[nn.Module, TrainSettings, int], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
}
