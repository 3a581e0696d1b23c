"""The target as a teacher: its hidden states over rows of tokens, and the probabilities to learn."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.loading.headers import read_checkpoint, refuse_unsafe
from speculon.loading.load import load_config, load_model, pick_device, pick_dtype
from speculon.loading.locate import locate
from speculon.loading.reading import quiet
from speculon.train.data import digest

Taps = tuple[int, ...] | int | None  # layers; so many of them, evenly spread; a low, a middle, a high one
DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32"}
LOGIT_ROWS = 512  # positions whose logits over the whole vocabulary are in memory at once


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens with the target's outputs. Position j predicts token j + 1."""

    ids: Tensor  # [B, T]
    weights: Tensor  # [B, T] of the loss
    taps: Tensor  # [B, T, k * Ht]
    last: Tensor  # [B, T, Ht], the last hidden states, after the final norm
    p: Tensor  # [B, T, Vd], over the tokens that can be drafted; 0 where the weight is 0
    entropy: Tensor  # [B, T], of p
    best: Tensor  # [B, T], the target's best token
    draw: int = 0  # seed of what a drafter draws for this batch


class Teacher:
    """A stock model, its taps and its logits. `used` [Vd] are the tokens that can be drafted."""

    def __init__(self, path: str, taps: Taps, precision: str, device: str):
        with quiet():
            checkpoint = read_checkpoint(locate(path))
            refuse_unsafe(checkpoint, allow_pickle=False)
            config = load_config(checkpoint, trust_remote_code=False)
            place = pick_device(device)
            # otherwise as `LLM` runs it
            dtype = pick_dtype("float32" if precision == "fp32" else "auto", checkpoint.dtype, place)
            self.model = (
                load_model(checkpoint, config, dtype, place, trust_remote_code=False)
                .eval()
                .requires_grad_(False)
            )
        self.folder = checkpoint.path
        self.device, self.precision = place, pick_dtype(DTYPES[precision], "bfloat16", place)
        self.config = config.get_text_config()
        self.base = self.model.get_decoder()
        self.layers = decoder_layers(self.base, self.config.num_hidden_layers)
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
        return (
            torch.autocast(self.device.type, self.precision)
            if self.precision is not torch.float32
            else nullcontext()
        )

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> taps and last hidden states side by side [B, T, (k + 1) * Ht]."""
        captured: dict[int, Tensor] = {}

        def keep(tap: int, value: Any) -> None:
            captured[tap] = value[0] if isinstance(value, tuple) else value

        hooks = [
            self.layers[0].register_forward_pre_hook(lambda module, args: keep(-1, args))
            if tap < 0
            else self.layers[tap].register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
            for tap in self.taps
        ]
        try:
            with self.autocast():
                last = self.base(ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(
            [*(captured[tap].to(self.precision) for tap in self.taps), last.to(self.precision)], -1
        )

    @torch.no_grad()
    def logits(self, last: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The target's logits [..., V] from its last hidden states [..., Ht], or those of `tokens` alone."""
        chosen = slice(None) if tokens is None else tokens
        weight = self.head.weight[chosen]
        with self.autocast():
            logits = F.linear(
                last.to(weight.dtype), weight, None if self.head.bias is None else self.head.bias[chosen]
            )
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def best(self, last: Tensor) -> Tensor:
        """The target's best token [..., T] after its last hidden states [..., T, Ht]."""
        parts = last.flatten(0, -2).split(LOGIT_ROWS)
        return torch.cat([self.logits(part).argmax(-1) for part in parts]).view(last.shape[:-1])

    @torch.no_grad()
    def batch(self, ids: Tensor, weights: Tensor, states: Tensor, best: Tensor, draw: int = 0) -> Batch:
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
        return Batch(ids, weights, taps, last, spread, entropy, best, draw)

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


def decoder_layers(base: nn.Module, count: int) -> nn.ModuleList:
    found = [
        module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise UnsupportedModel(f"{type(base).__name__}: its {count} layers were not found")
    return found[0]


def tap_ids(requested: Taps, layers: int) -> tuple[int, ...]:
    """Tapped layers (-1: embeddings): the requested ones, so many evenly spread, or EAGLE-3's three."""
    if requested is None:
        return tuple(sorted({max(-1, min(layer, layers - 1)) for layer in (1, layers // 2 - 1, layers - 4)}))
    if isinstance(requested, int):
        return spread(requested, layers)
    if wrong := [tap for tap in requested if not -1 <= tap < layers]:
        raise InvalidParameter("taps", wrong[0], f"the target has {layers} layers, so -1 to {layers - 1}")
    return requested


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` layers from the second to the third from the top, evenly spread, as DFlash taps them."""
    if count == 1 or layers < 5:
        return (layers // 2,)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))
