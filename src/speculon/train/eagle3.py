"""Training method `eagle3`: an EAGLE-3 head for the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speculon.errors import InvalidParameter, UnsupportedModel
from speculon.train.data import Rows
from speculon.train.eagle3_head import Eagle3Head, HeadForm
from speculon.train.export import write_head
from speculon.train.settings import HeadSettings
from speculon.train.teacher import Teacher


class Eagle3Training:
    """How `train eagle3` makes its drafter, and writes it at the end."""

    method = "eagle3"

    def __init__(self, settings: HeadSettings):
        self.settings = settings
        self.taps = settings.tap_ids

    @property
    def spare(self) -> int:
        """Tokens at the end of a row that predict nothing."""
        return self.settings.ttt

    def check(self, teacher: Teacher) -> None:
        """Raises InvalidParameter for a form that does not fit the target."""
        form_of(self.settings, teacher)
        count = self.settings.draft_vocab or 0
        if count > teacher.vocab_size:
            raise InvalidParameter("draft_vocab", count, f"the target has {teacher.vocab_size} tokens")

    def drafter(self, teacher: Teacher, rows: Rows) -> Eagle3Head:
        """Random layers between the target's embeddings and output head."""
        teacher.used = most_used(rows, self.settings.draft_vocab, teacher).to(teacher.device)
        head = Eagle3Head(form_of(self.settings, teacher), self.settings.ttt, self.settings.decay).to(
            teacher.device
        )
        head.start_from(teacher.embed, teacher.norm, teacher.head.weight, teacher.used)
        return head

    def write(self, drafter: Eagle3Head, teacher: Teacher, target: str, folder: Path) -> None:
        write_head(drafter, teacher, target, folder)

    def speculation(self, folder: Path) -> Mapping[str, Any]:
        """Settings under which `LLM` drafts with what was written."""
        return {
            "method": self.method,
            "draft": {self.method: str(folder)},
            "num_speculative_tokens": self.settings.ttt,
        }


def form_of(settings: HeadSettings, teacher: Teacher) -> HeadForm:
    config = teacher.config
    heads, kv_heads = attention_heads(settings.heads, settings.kv_heads, config)
    intermediate = settings.intermediate or getattr(config, "intermediate_size", None) or 4 * teacher.width
    rope = getattr(config, "rope_parameters", None) or {}
    return HeadForm(
        hidden=teacher.width,
        taps=teacher.taps,
        layers=settings.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or teacher.width // config.num_attention_heads,
        intermediate=intermediate,
        vocab_size=teacher.vocab_size,
        draft_vocab_size=len(teacher.used),
        eps=getattr(config, "rms_norm_eps", 1e-6),
        theta=float(rope.get("rope_theta") or 10_000.0),
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_all,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )


def attention_heads(heads: int | None, kv_heads: int | None, config: Any) -> tuple[int, int]:
    """Heads and key-value heads, the target's where not given. Raises InvalidParameter."""
    heads = heads or config.num_attention_heads
    kv_heads = kv_heads or min(heads, getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise InvalidParameter("heads", heads, f"a multiple of kv_heads, {kv_heads}")
    return heads, kv_heads


def most_used(rows: Rows, count: int | None, teacher: Teacher) -> torch.Tensor:
    """The `count` tokens with the largest loss weight, in rising order [Vd]; None: all tokens."""
    if count is None:
        return torch.arange(teacher.vocab_size)
    counts = np.zeros(teacher.vocab_size)
    np.add.at(counts, rows.ids[:, 1:].ravel(), rows.weights[:, :-1].ravel())
    if teacher.head.weight.shape[0] != teacher.vocab_size:
        raise UnsupportedModel("the target's head and embedding have different numbers of tokens")
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
