"""The target as a teacher: hidden states over rows of tokens, cached on disk, and probabilities to learn."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.checkpoints.headers import read_checkpoint, refuse_unsafe
from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import quiet
from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.runtimes.torch.loading.load import load_config, load_model, pick_device, pick_dtype
from speculon.train.data import DocumentRows, digest

TapLayers = tuple[int, ...]  # layers; -1: the embeddings
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32"}
LOGIT_ROWS = 512  # positions whose logits over the whole vocabulary are in memory at once


@dataclass(frozen=True, slots=True)
class TeacherBatch:
    """Rows of tokens with the target's outputs. Position j predicts token j + 1."""

    ids: Tensor  # [B, T]
    weights: Tensor  # [B, T] of the loss
    taps: Tensor  # [B, T, k * Ht]
    p: Tensor  # [B, T, Vd], over the tokens that can be drafted; 0 where the weight is 0
    entropy: Tensor  # [B, T], of p
    best: Tensor  # [B, T], the target's best token


class Teacher:
    """A stock model, its taps and its logits. `used` [Vd] are the tokens that can be drafted."""

    def __init__(self, path: str, taps: TapLayers | None, precision: str, device: str):
        with quiet():
            checkpoint = read_checkpoint(locate(path))
            refuse_unsafe(checkpoint, allow_pickle=False)
            config = load_config(checkpoint, trust_remote_code=False)
            place = pick_device(device)
            # otherwise as `LLM` runs it
            dtype = pick_dtype("float32" if precision == "fp32" else "auto", checkpoint.dtype, place)
            model = load_model(checkpoint, config, dtype, place, trust_remote_code=False)
            self.model = model.eval().requires_grad_(False)
        self.device, self.precision = place, pick_dtype(DTYPES[precision], "bfloat16", place)
        self.config = config.get_text_config()
        self.base = self.model.get_decoder()
        count = self.config.num_hidden_layers
        lists = (module for module in self.base.modules() if isinstance(module, nn.ModuleList))
        layers = next((modules for modules in lists if len(modules) == count), None)
        if layers is None:
            raise UnsupportedModel(
                f"{type(self.base).__name__}: its {count} layers were not found, so their states cannot be "
                "recorded"
            )
        self.layers = layers
        self.taps = tap_ids(taps, len(self.layers))
        self.head: nn.Linear = self.model.get_output_embeddings()
        self.embed: Tensor = self.model.get_input_embeddings().weight
        self.used = torch.arange(self.vocab_size, device=place)
        self._refuse_other_logits()

    @property
    def vocab_size(self) -> int:
        return int(self.embed.shape[0])

    @property
    def width(self) -> int:
        return int(self.embed.shape[1])

    @property
    def norm(self) -> Tensor | None:
        """The weight of the last norm, where it is an RMSNorm of that name."""
        weight = getattr(getattr(self.base, "norm", None), "weight", None)
        return weight if isinstance(weight, Tensor) and weight.shape == (self.width,) else None

    @property
    def fingerprint(self) -> str:
        """A hash of some of its weights: a path may hold another model later."""
        weights = (self.head.weight[:64], next(self.layers[-1].parameters()))
        return digest(*(weight.detach().float().cpu().numpy() for weight in weights)).hex()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> taps and last hidden states side by side [B, T, (k + 1) * Ht]."""
        captured: dict[int, Tensor] = {}

        def keep(tap: int, value: Any) -> None:
            captured[tap] = value[0] if isinstance(value, tuple) else value

        with ExitStack() as hooks, self.autocast():
            for tap in self.taps:
                layer = self.layers[max(tap, 0)]
                hook = (
                    layer.register_forward_pre_hook(lambda module, args: keep(-1, args))
                    if tap < 0
                    else layer.register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
                )
                hooks.callback(hook.remove)
            last = self.base(ids, use_cache=False).last_hidden_state
        states = [*(captured[tap] for tap in self.taps), last]
        return torch.cat([part.to(self.precision) for part in states], -1)

    @torch.no_grad()
    def logits(self, last: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The target's logits [..., V] from its last hidden states [..., Ht], or those of `tokens` alone."""
        chosen = slice(None) if tokens is None else tokens
        weight, bias = self.head.weight[chosen], self.head.bias
        with self.autocast():
            logits = F.linear(last.to(weight.dtype), weight, None if bias is None else bias[chosen])
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def best(self, last: Tensor) -> Tensor:
        """The target's best token [..., T] after its last hidden states [..., T, Ht]."""
        parts = last.flatten(0, -2).split(LOGIT_ROWS)
        return torch.cat([self.logits(part).argmax(-1) for part in parts]).view(last.shape[:-1])

    @torch.no_grad()
    def batch(self, ids: Tensor, weights: Tensor, states: Tensor, best: Tensor) -> TeacherBatch:
        """A batch to learn from. Positions whose best token cannot be drafted get weight 0.

        p and its entropy are 0 at positions of weight 0.
        """
        taps, last = states[..., : -self.width], states[..., -self.width :]
        everything = len(self.used) == self.vocab_size
        if not everything:
            draftable = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            draftable[self.used] = True
            weights = weights * draftable[best]
        learned = weights > 0
        logits = self.logits(last[learned], None if everything else self.used).float()  # [M, Vd]
        log_total = logits.logsumexp(-1)
        p = logits.softmax(-1)
        entropy = ids.new_zeros(ids.shape, dtype=torch.float32)
        entropy[learned] = log_total - p.mul(logits).sum(-1)
        spread = last.new_zeros(*ids.shape, len(self.used), dtype=self.precision)
        spread[learned] = p.to(self.precision)
        return TeacherBatch(ids, weights, taps, spread, entropy, best)

    def _refuse_other_logits(self) -> None:
        """Raises UnsupportedModel where its logits are not its head over the last hidden state."""
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            expected = self.model(ids, use_cache=False).logits.float()
            got = self.logits(self.base(ids, use_cache=False).last_hidden_state).float()
        if (expected - got).abs().max() > 0.05 * expected.abs().max():
            raise UnsupportedModel(
                f"{type(self.model).__name__}: its logits are not its head over its last hidden state"
            )


def tap_ids(requested: TapLayers | None, layers: int) -> TapLayers:
    """Tapped layers: the requested ones, or EAGLE-3's low, middle and high one."""
    if requested is None:
        return tuple(sorted({max(-1, min(layer, layers - 1)) for layer in (1, layers // 2 - 1, layers - 4)}))
    if wrong := [tap for tap in requested if not -1 <= tap < layers]:
        raise InvalidParameter(
            "taps", wrong[0], f"must be from -1 to {layers - 1}, since the target has {layers} layers"
        )
    return requested


class Dataset:
    """Rows with the target's outputs; those of the first ones are cached, in at most `limit` bytes."""

    def __init__(self, teacher: Teacher, rows: DocumentRows, file: Path, limit: float):
        self.teacher, self.rows = teacher, rows
        width, length = (len(teacher.taps) + 1) * teacher.width, rows.ids.shape[1]
        row_bytes = length * width * teacher.precision.itemsize
        taken = file.stat().st_blocks * 512 if file.exists() else 0
        # writing to a mapped file on a full disk kills the process silently
        limit = min(limit, 0.9 * (shutil.disk_usage(file.parent).free + taken))
        self.room = min(len(rows), int(limit // row_bytes))
        self.cached, self.best, self.valid = torch.empty(0), torch.empty(0), torch.empty(0)
        if self.room:
            best, valid = file.with_suffix(".best"), file.with_suffix(".valid")
            if not (file.exists() and best.exists()):
                valid.unlink(missing_ok=True)  # it is about a deleted file
            self.cached = mapped(file, (self.room, length, width), teacher.precision)
            self.best = mapped(best, (self.room, length), torch.int32)
            self.valid = mapped(valid, (self.room,), torch.uint8)

    def batch(self, chosen: Sequence[int]) -> TeacherBatch:
        device = self.teacher.device
        ids = torch.from_numpy(self.rows.ids[list(chosen)].astype(np.int64)).to(device)
        weights = torch.from_numpy(self.rows.weights[list(chosen)]).to(device)
        return self.teacher.batch(ids, weights, *self._outputs(chosen, ids))

    def _outputs(self, chosen: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's states [B, T, (k + 1) * Ht], and its best tokens [B, T]."""
        missing = [
            place for place, row in enumerate(chosen) if not (row < self.room and bool(self.valid[row]))
        ]
        states = self.teacher.states(ids[missing]) if missing else ids.new_empty(0)
        best = self.teacher.best(states[..., -self.teacher.width :]) if missing else ids.new_empty(0)
        computed = dict(zip(missing, zip(states, best, strict=True), strict=True))
        for place, outputs in computed.items():
            row = chosen[place]
            if row < self.room:
                self.cached[row], self.best[row] = (part.cpu() for part in outputs)
                self.valid[row] = 1  # last: a killed run leaves no partial row
        outputs_by_place = [
            computed[place] if place in computed else (self.cached[row], self.best[row])
            for place, row in enumerate(chosen)
        ]
        states, best = (
            torch.stack([part.to(self.teacher.device) for part in parts])
            for parts in zip(*outputs_by_place, strict=True)
        )
        return states, best.long()


def mapped(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(file), True, prod(shape), dtype=dtype).view(shape)
