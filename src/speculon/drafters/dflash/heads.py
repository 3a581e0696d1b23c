"""The heads of DSpark: logits that depend on the drafts before, and the predicted chance of acceptance."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from speculon.drafters.dflash.config import DFlashConfig, MarkovType


class MarkovHead(nn.Module):
    """A bias of the logits by the token before, of low rank: w2 m, with m = e = w1[token]."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.vocab_size is not None and config.draft_vocab_size is not None
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.draft_vocab_size, bias=False)

    def start_from(self, embed: Tensor, head: Tensor) -> None:
        """No bias at first."""
        nn.init.zeros_(self.markov_w2.weight)

    def start(self, sequences: int) -> Tensor:  # [B, r]
        """The state before the first row."""
        return self.markov_w1.weight.new_zeros(sequences, self.rank)

    def step(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """m [..., r] of rows with states h [..., H] after e [..., r], and the next state [..., r]."""
        return e, state

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """m [..., K, r] of drafts with states [..., K, H] after `tokens` [..., K]."""
        e = self.markov_w1(tokens)
        return self.step(e, hidden, e)[0]


class GatedMarkovHead(MarkovHead):
    """m = sigmoid(gate [h; e]) * e"""

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden + self.rank, self.rank)

    def step(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate_proj(torch.cat([h, e], -1)).sigmoid() * e, state


class RecurrentMarkovHead(MarkovHead):
    """g, c, o = joint [state; e; h]; m = tanh(o); the next state is s(g) state + (1 - s(g)) tanh(c), with s
    the sigmoid.

    Where the rank is the target's width, w1 and w2 start as its embeddings and output head.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden, 3 * self.rank)

    def start_from(self, embed: Tensor, head: Tensor) -> None:
        """No bias at first, since m is 0."""
        nn.init.zeros_(self.joint_proj.weight)
        nn.init.zeros_(self.joint_proj.bias)
        if embed.shape == self.markov_w1.weight.shape:
            self.markov_w1.weight.copy_(embed)
            self.markov_w2.weight.copy_(head)

    def step(self, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        g, c, o = self.joint_proj(torch.cat([state, e, h], -1)).chunk(3, -1)
        keep = g.sigmoid()
        return o.tanh(), keep * state + (1 - keep) * c.tanh()

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        e = self.markov_w1(tokens)
        state, rows = e.new_zeros(*e.shape[:-2], self.rank), []
        for each, h in zip(e.unbind(-2), hidden.unbind(-2), strict=True):
            latent, state = self.step(each, h, state)
            rows.append(latent)
        return torch.stack(rows, -2)


MARKOV_HEADS: Mapping[MarkovType, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


class ConfidenceHead(nn.Module):
    """The logit of the chance that a draft is accepted if those before it were, from h, or from h and e."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden + self.with_markov * config.markov_rank, 1)

    def forward(self, h: Tensor, e: Tensor | None) -> Tensor:  # [..., H], [..., r] -> [...]
        if self.with_markov:
            assert e is not None, "it reads the Markov head's embedding"
            h = torch.cat([h, e], -1)
        return self.proj(h).float().squeeze(-1)

    def chances(self, h: Tensor, e: Tensor | None) -> list[float]:
        return self(h, e).sigmoid().tolist()
