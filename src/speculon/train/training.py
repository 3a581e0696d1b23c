"""What the training methods have in common, and what they differ in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from speculon.core.errors import InvalidParameter
from speculon.drafters.layers import Network
from speculon.train.data import Rows
from speculon.train.record import write_json
from speculon.train.settings import BlockShape, HeadSettings
from speculon.train.teacher import Taps, Teacher

WEIGHTS = "model.safetensors"
Settings = TypeVar("Settings")
Drafter = TypeVar("Drafter", bound=nn.Module)


class Training(Generic[Settings, Drafter]):
    """A training method: how it makes its drafter, and writes it at the end."""

    method: ClassVar[str]  # its name on the command line
    proposer: ClassVar[str]  # that drafts with what is written
    taps: Taps = ()

    def __init__(self, settings: Settings):
        self.settings = settings

    @property
    def spare(self) -> int:
        """Tokens at the end of a row that predict nothing."""
        raise NotImplementedError

    @property
    def drafts(self) -> int:
        """Per round, when it is evaluated."""
        return self.spare

    def check(self, teacher: Teacher) -> None:
        """Raises InvalidParameter or ModelError for settings that do not fit the target."""
        raise NotImplementedError

    def drafter(self, teacher: Teacher, rows: Rows) -> Drafter:
        raise NotImplementedError

    def write(self, drafter: Drafter, teacher: Teacher, target: str, folder: Path) -> None:
        raise NotImplementedError

    def speculation(self, folder: Path) -> Mapping[str, Any]:
        """Settings under which `LLM` drafts with what was written."""
        draft = {self.proposer: str(folder)}
        return {"method": self.proposer, "draft": draft, "num_speculative_tokens": self.drafts}


def network_sizes(settings: HeadSettings | BlockShape, teacher: Teacher) -> dict[str, Any]:
    """Fields of `DrafterConfig`; numbers that are not set are the target's. Raises InvalidParameter."""
    config = teacher.config
    heads, kv_heads = attention_heads(settings.heads, settings.kv_heads, config)
    rope = getattr(config, "rope_parameters", None) or {}
    intermediate = settings.intermediate or getattr(config, "intermediate_size", None) or 4 * teacher.width
    return {
        "hidden": teacher.width,
        "target_hidden": teacher.width,
        "taps": len(teacher.taps),
        "layers": settings.layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or teacher.width // config.num_attention_heads,
        "intermediate": intermediate,
        "vocab_size": teacher.vocab_size,
        "draft_vocab_size": len(teacher.used),
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10_000.0)},
        "windows": (None,) * settings.layers,
        "max_context": getattr(config, "max_position_embeddings", 2048),
    }


def attention_heads(heads: int | None, kv_heads: int | None, config: Any) -> tuple[int, int]:
    """Heads and key-value heads, the target's where not set. Raises InvalidParameter."""
    heads = heads or config.num_attention_heads
    kv_heads = kv_heads or min(heads, getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise InvalidParameter("heads", heads, f"a multiple of kv_heads, {kv_heads}")
    return heads, kv_heads


def write_network(
    network: nn.Module, config: Mapping[str, Any], folder: Path, tables: Mapping[str, Tensor] | None = None
) -> None:
    """config.json, and all parameters in bf16 with more `tables`; what is the target's is not written."""
    parameters = network.named_parameters()
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in parameters}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(tables or {})}, folder / WEIGHTS, {"format": "pt"})
    known = {**config, "dtype": "bfloat16", "transformers_version": transformers.__version__}
    write_json(folder / "config.json", known)


@torch.no_grad()
def begin(network: Network, embed: Tensor, norm: Tensor | None) -> None:
    """Small random matrices; embeddings and last norm are the target's.

    Matrices that end a layer are zero, so that it adds nothing at first.
    """
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
    network.embed = embed.detach().float()
    if norm is not None:
        network.norm.weight.copy_(norm)
