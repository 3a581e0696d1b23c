"""A drafter of one token per step: what it learns from a row of tokens, whatever its network is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.train.losses import cross_entropy, kl
from speculon.train.teacher import Batch

Loss = Literal["kl", "ce"]


class StepDrafter:
    """Row i of step k reads token i + 1 + k and predicts token i + 2 + k: a draft at depth k."""

    steps: int
    decay: float
    goal: Loss = "kl"

    def states(self, batch: Batch) -> Iterator[Tensor]:
        """What the output head reads, of each step [B, N, H]; N = T - steps."""
        raise NotImplementedError

    def head_of(self, step: int) -> Tensor:
        """The output head of a step [Vd, H]"""
        raise NotImplementedError

    def best(self, step: int, states: Tensor) -> Tensor:
        """The target's ids of the tokens that a step drafts."""
        return F.linear(states, self.head_of(step)).argmax(-1)

    def loss(self, batch: Batch) -> Tensor:
        """sum_k decay^k l_k, each a weighted mean over rows; l is KL(p || q), or the text's cross entropy."""
        total = torch.zeros((), device=batch.ids.device)
        for k, states in enumerate(self.states(batch)):
            total = total + self.decay**k * self._loss_of(k, states, batch)
        return total

    def correct(self, batch: Batch) -> Tensor:
        """Whether the best token of each step is the target's, for rows of non-zero weight [steps, M]."""
        counts = batch.weights[:, self._positions(0, batch)] > 0  # [B, N]
        return torch.stack(
            [
                self.best(k, states[counts]) == batch.best[:, self._positions(k, batch)][counts]
                for k, states in enumerate(self.states(batch))
            ]
        )

    def _loss_of(self, step: int, states: Tensor, batch: Batch) -> Tensor:
        at, head = self._positions(step, batch), self.head_of(step)
        learned = batch.weights[:, at] > 0  # [B, N]
        hidden, weights = states[learned], batch.weights[:, at][learned]  # [M, H], [M]
        if self.goal == "kl":
            return kl(hidden, head, batch.p[:, at][learned], batch.entropy[:, at][learned], weights)
        ids = F.pad(batch.ids, (0, 1))  # the token after the row is not known: weight 0
        known = torch.arange(at.start, at.stop, device=ids.device) + 1 < batch.ids.shape[1]
        weights = weights * known.expand_as(learned)[learned]
        return cross_entropy(hidden, head, ids[:, at.start + 1 : at.stop + 1][learned], weights)

    def _positions(self, step: int, batch: Batch) -> slice:
        """The target's positions that predict the same tokens as the rows of a step."""
        return slice(step + 1, step + 1 + batch.ids.shape[1] - self.steps)
