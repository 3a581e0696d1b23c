"""The heads of DSpark: logits that depend on the previous draft, and the predicted chance of acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speculon.models.linear import Product


@dataclass(slots=True)
class Markov:
    """Adds to a row's logits what the token before it tells: w2 e, with e = w1[previous token]."""

    w1: Tensor  # [V, r]
    w2: Product  # r -> Vd

    def embed(self, previous: Tensor) -> Tensor:  # [B] -> [B, r]
        return F.embedding(previous, self.w1)

    def start(self, sequences: int) -> Tensor:  # [B, r]
        """The state before the first row."""
        return self.w1.new_zeros(sequences, self.w1.shape[1])

    def __call__(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias [B, Vd] of rows with states h [B, H] after e [B, r], and the next state [B, r]."""
        return self.w2(e), state


@dataclass(slots=True)
class GatedMarkov(Markov):
    """w2 (sigmoid(gate [h; e]) * e)."""

    gate: Product  # H + r -> r

    def __call__(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.w2(self.gate(torch.cat([h, e], -1)).sigmoid() * e), state


@dataclass(slots=True)
class RecurrentMarkov(Markov):
    """A gated recurrent cell over the drafts of a block: g, c, o = joint [state; e; h].

    The state becomes s(g) state + (1 - s(g)) tanh(c), with s the sigmoid; the bias is w2 tanh(o).
    """

    joint: Product  # 2 r + H -> 3 r

    def __call__(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        g, c, o = self.joint(torch.cat([state, e, h], -1)).chunk(3, -1)
        keep = g.sigmoid()
        return self.w2(o.tanh()), keep * state + (1 - keep) * c.tanh()


@dataclass(slots=True)
class Confidence:
    """The predicted chance [B] that a draft is accepted if those before it were."""

    proj: Product  # H -> 1, or H + r -> 1
    with_markov: bool

    def __call__(self, h: Tensor, e: Tensor | None) -> Tensor:  # [B, H], [B, r] -> [B]
        if self.with_markov:
            assert e is not None, "it reads the Markov head's embedding"
            h = torch.cat([h, e], -1)
        return self.proj(h)[:, 0].float().sigmoid()
