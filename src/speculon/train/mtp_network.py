"""MTP modules in training: each step's rows of a whole batch in one call, as the proposer computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from speculon.drafters.mtp.check import set_attention
from speculon.drafters.mtp.network import Module
from speculon.train.settings import MtpSettings
from speculon.train.step_drafter import StepDrafter
from speculon.train.teacher import Batch

TRAINED = ("embed_norm", "state_norm", "proj", "layer", "norm")
Rotary = Callable[[Tensor, Tensor], Any]


class MtpDrafter(StepDrafter, nn.Module):
    """Step k is that of module k; the last module makes all steps after its own, from its own states."""

    def __init__(
        self, modules: list[Module], rotary: Rotary, windows: list[int | None], settings: MtpSettings
    ):
        super().__init__()
        self.steps, self.decay, self.goal = settings.ttt, settings.decay, settings.loss
        self.chain, self.rotary, self.windows = modules, rotary, windows
        parts = [{name: getattr(module, name) for name in TRAINED} for module in modules]
        self.parts = nn.ModuleList(nn.ModuleDict(each) for each in parts).float().requires_grad_(True)

    def use_attention(self, name: str) -> None:
        """The attention function of all layers, by its name in transformers: `sdpa` or `eager`."""
        self.attention = name
        for module in self.chain:
            set_attention(module, name)

    def states(self, batch: Batch) -> Iterator[Tensor]:
        """Row i of step k reads row i of the step before, or the target's state of position i.

        A module attends to its rows up to i, of its first step, and to row i of its later steps. Its rotary
        positions are i in its first step, and one more in each later one.
        """
        rows, last = batch.ids.shape[1] - self.steps, len(self.chain) - 1
        x, cache = batch.last[:, :rows].float(), DynamicCache()
        for k in range(self.steps):
            number, again = min(k, last), max(k - last, 0)
            positions = torch.arange(again, again + rows, device=x.device)[None]
            x = self.chain[number].batch(
                batch.ids[:, k + 1 : k + 1 + rows],
                x,
                self.rotary(x, positions),
                positions,
                self._mask(rows, again, self.windows[number], x),
                cache if number == last else None,
            )
            yield x

    def head_of(self, step: int) -> Tensor:
        head: Any = self.chain[min(step, len(self.chain) - 1)].head
        weight: Tensor = head.weight
        return weight

    def _mask(self, rows: int, again: int, window: int | None, x: Tensor) -> Tensor:
        """[1, 1, N, (1 + again) * N]: the rows of the first step, then those of each later one."""
        ages = torch.arange(rows, device=x.device)[:, None] - torch.arange(rows, device=x.device)
        age = torch.cat([ages + again - step for step in range(again + 1)], -1)
        own = torch.cat([ages >= 0, *[ages == 0] * again], -1)
        seen = (own & (age < (window or 2 * rows + again)))[None, None]
        if self.attention == "sdpa":
            return seen
        return torch.zeros(seen.shape, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)
