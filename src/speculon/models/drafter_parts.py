"""Builds the parts of a drafter from the tensors of its checkpoint, in the target's dtype and device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from speculon.checkpoints.eagle3_config import Eagle3Config, check_offsets
from speculon.checkpoints.headers import read_header
from speculon.errors import MissingWeights
from speculon.models.block import Gated, Norm
from speculon.models.linear import Product, joined
from speculon.models.target import Target

if TYPE_CHECKING:
    from speculon.checkpoints.dflash_config import DFlashConfig

NOT_WEIGHTS = {"d2t", "t2d"}


@dataclass(frozen=True, slots=True)
class Parts:
    """Builds parts of a drafter from its tensors."""

    config: Eagle3Config | DFlashConfig
    target: Target
    tensors: dict[str, Tensor]

    def has(self, module: str) -> bool:
        return f"{module}.weight" in self.tensors

    def weight(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise MissingWeights(f"{self.config.path}: tensor {name} is missing")
        return self.tensors[name].to(self.target.device, self.target.dtype)

    def norm(self, name: str) -> Norm:
        return Norm(self.weight(f"{name}.weight"), self.config.eps)

    def linear(self, name: str) -> nn.Linear:
        matrix, has_bias = self.weight(f"{name}.weight"), f"{name}.bias" in self.tensors
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=has_bias, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(self.weight(f"{name}.bias"), requires_grad=False)
        return layer

    def product(self, *names: str) -> Product:
        return joined([self.linear(name) for name in names], share=False)

    def mlp(self, layer: int) -> Gated:
        at = f"layers.{layer}.mlp"
        gate_up = self.product(f"{at}.gate_proj", f"{at}.up_proj")
        return Gated(gate_up, self.product(f"{at}.down_proj"), ACT2FN[self.config.act])


def weight_bytes(config: Eagle3Config | DFlashConfig, dtype: torch.dtype) -> int:
    """The weights of a drafter in `dtype`, from the headers of its files."""
    headers = {name: entry for file in config.files for name, entry in read_header(file)[0].items()}
    sizes = (
        math.prod(headers[stored]["shape"])
        for name, stored in config.names.items()
        if name not in NOT_WEIGHTS
    )
    return sum(sizes) * dtype.itemsize


def read_tensors(config: Eagle3Config | DFlashConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names used here."""
    tensors: dict[str, Tensor] = {}
    for path in config.files:
        with safe_open(path, framework="pt") as file:
            here = set(file.keys())
            tensors |= {
                name: file.get_tensor(stored) for name, stored in config.names.items() if stored in here
            }
    return tensors


def rope_config(config: Eagle3Config | DFlashConfig) -> LlamaConfig:
    """The config that transformers' rotary table reads."""
    return LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope),
    )


def ids_of(
    path: Path, vocab_size: int, offsets: Tensor | None, device: torch.device
) -> Tensor | None:  # [Vd] -> [Vd]
    """The target's id of each draft id; d2t holds the differences."""
    if offsets is None:
        return None
    check_offsets(path, offsets.tolist(), vocab_size)
    return torch.arange(len(offsets), device=device) + offsets.to(device, torch.long)
