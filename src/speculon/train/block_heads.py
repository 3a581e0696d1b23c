"""The heads of DSpark as they learn: a bias of the logits by the drafts before, and predicted acceptance."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """A bias of the logits by the token before, of low rank: w2 m, with m = w1[token]."""

    markov_type = "vanilla"

    def __init__(self, vocab_size: int, hidden: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def start_from(self, embed: Tensor, head: Tensor) -> None:
        """No bias at first."""
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """m [..., K, r] of drafts with states [..., K, H] after `tokens` [..., K]."""
        e: Tensor = self.markov_w1(tokens)
        return e


class GatedMarkovHead(MarkovHead):
    """m = sigmoid(gate [h; e]) * e"""

    markov_type = "gated"

    def __init__(self, vocab_size: int, hidden: int, rank: int):
        super().__init__(vocab_size, hidden, rank)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        e = self.markov_w1(tokens)
        return self.gate_proj(torch.cat([hidden, e], -1)).sigmoid() * e


class RecurrentMarkovHead(MarkovHead):
    """g, c, o = joint [s; e; h]; m = tanh(o); the next s is sigmoid(g) s + (1 - sigmoid(g)) tanh(c).

    Where the rank is the target's width, w1 and w2 start as its embeddings and output head.
    """

    markov_type = "rnn"

    def __init__(self, vocab_size: int, hidden: int, rank: int):
        super().__init__(vocab_size, hidden, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def start_from(self, embed: Tensor, head: Tensor) -> None:
        """No bias at first, since m is 0."""
        nn.init.zeros_(self.joint_proj.weight)
        nn.init.zeros_(self.joint_proj.bias)
        if embed.shape == self.markov_w1.weight.shape:
            self.markov_w1.weight.copy_(embed)
            self.markov_w2.weight.copy_(head)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        rank, e = self.markov_w1.embedding_dim, self.markov_w1(tokens)
        by_state = self.joint_proj.weight[:, :rank]
        rest = F.linear(torch.cat([e, hidden], -1), self.joint_proj.weight[:, rank:], self.joint_proj.bias)
        state, found = e.new_zeros(*e.shape[:-2], rank), []
        for each in rest.unbind(-2):
            g, c, o = (each + F.linear(state, by_state)).chunk(3, -1)
            found.append(o.tanh())
            state = c.tanh() + g.sigmoid() * (state - c.tanh())
        return torch.stack(found, -2)


MARKOV_HEADS: Mapping[str, type[MarkovHead]] = {
    each.markov_type: each for each in (MarkovHead, GatedMarkovHead, RecurrentMarkovHead)
}


class ConfidenceHead(nn.Module):
    """The logit of the probability that a draft is accepted, from its state and the token before."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)
