"""What both training methods do, each in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from speculon.core.errors import InvalidParameter
from speculon.train.data import DocumentRows
from speculon.train.teacher import TapLayers, Teacher

Settings = TypeVar("Settings")
Drafter = TypeVar("Drafter", bound=nn.Module)


class Training(Generic[Settings, Drafter]):
    """A training method: how it makes its drafter, and writes it at the end."""

    method: ClassVar[str]  # its name on the command line
    proposer: ClassVar[str]  # that drafts with what is written
    taps: TapLayers | None = ()

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

    def drafter(self, teacher: Teacher, rows: DocumentRows) -> Drafter:
        raise NotImplementedError

    def write(self, drafter: Drafter, teacher: Teacher, target: str, folder: Path) -> None:
        raise NotImplementedError

    def speculation(self, folder: Path) -> Mapping[str, Any]:
        """Settings under which `LLM` drafts with what was written."""
        draft = {self.proposer: str(folder)}
        return {"method": self.proposer, "draft": draft, "num_speculative_tokens": self.drafts}


def attention_heads(heads: int | None, kv_heads: int | None, config: Any) -> tuple[int, int]:
    """Heads and key-value heads, the target's where not set. Raises InvalidParameter."""
    heads = heads or config.num_attention_heads
    kv_heads = kv_heads or min(heads, getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise InvalidParameter("heads", heads, f"must be a multiple of kv_heads, {kv_heads}")
    return heads, kv_heads
