"""Training method `eagle3`: an EAGLE-3 head for the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculon.checkpoints.headers import parameters_by_dtype, read_config
from speculon.checkpoints.locate import locate
from speculon.errors import InvalidParameter, UnsupportedModel
from speculon.train.data import Rows
from speculon.train.eagle3_head import Eagle3Head, HeadForm
from speculon.train.export import WEIGHTS, write_head
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
        """Raises InvalidParameter for a form that does not fit the target, or the head to start from."""
        form = form_of(self.settings, teacher)
        if self.settings.start is not None:
            refuse_other_form(self.settings.start, form, self.settings.draft_vocab or teacher.vocab_size)
        count = self.settings.draft_vocab or 0
        if count > teacher.vocab_size:
            raise InvalidParameter("draft_vocab", count, f"the target has {teacher.vocab_size} tokens")

    def drafter(self, teacher: Teacher, rows: Rows) -> Eagle3Head:
        """Random layers between the target's embeddings and output head, or the head that it starts from."""
        before = {} if self.settings.start is None else load_file(locate(self.settings.start) / WEIGHTS)
        if "d2t" in before:
            used = before["d2t"] + torch.arange(len(before["d2t"]))
        else:
            used = most_used(rows, self.settings.draft_vocab, teacher)
        teacher.used = used.to(teacher.device)
        head = Eagle3Head(form_of(self.settings, teacher), self.settings.ttt, self.settings.decay).to(
            teacher.device
        )
        head.start_from(teacher.embed, teacher.norm, teacher.head.weight, teacher.used)
        if before:
            copy_into(head, before, self.settings.start)
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


def refuse_other_form(start: str, form: HeadForm, vocab: int) -> None:
    """Raises InvalidParameter where `start` is no head of this form, ModelError where it is damaged."""
    folder = locate(start)
    if not all((folder / name).is_file() for name in ("config.json", WEIGHTS)):
        raise InvalidParameter("start", str(start), f"has no config.json and {WEIGHTS}")
    config = read_config(folder)
    parameters_by_dtype(folder / WEIGHTS)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    here = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in form.taps], "draft_vocab_size": vocab}
    for name, value in {**here, **{flag: getattr(form, flag) for flag in flags}}.items():
        if config.get(name) != value:
            reason = f"{name} is {config.get(name)} there and {value} here: give that head's settings"
            raise InvalidParameter("start", str(start), reason)


@torch.no_grad()
def copy_into(head: Eagle3Head, before: Mapping[str, Tensor], source: str | None) -> None:
    """Copies the weights of a head of the same shape. Raises InvalidParameter for another one."""
    for name, parameter in head.named_parameters():
        shape = list(before[name].shape) if name in before else "missing"
        if shape != list(parameter.shape):
            reason = (
                f"{name} is {shape} there and {list(parameter.shape)} here: give the settings of that head"
            )
            raise InvalidParameter("start", str(source), reason)
        parameter.copy_(before[name])


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
