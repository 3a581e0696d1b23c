"""A DFlash drafter over pages: one forward drafts a block of tokens (z-lab 2026).

The target's states at position j become keys and values of every layer, in slot j of the pages. A block of
rows attends to them: the anchor, which is the sequence's last token, at position n, and masks after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.kv.store import View
from speculon.models.block import Gated, Norm, Tables, rotate, tables_of
from speculon.models.dflash_attention import Sight, attend_blocks
from speculon.models.dflash_heads import Confidence, Markov
from speculon.models.linear import Product


@dataclass(slots=True)
class BlockLayer:
    """A decoder layer whose rows attend to pages and to each other."""

    layer: int
    q: Product
    kv: Product
    out: Product
    q_norm: Norm | None
    k_norm: Norm | None
    head_dim: int
    sight: Sight
    norm: Norm
    mlp_norm: Norm
    mlp: Gated

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [T, Hkv, D] of rows x [T, H]."""
        k, v = self.kv(x).view(len(x), 2, -1, self.head_dim).unbind(1)
        return rotate(k if self.k_norm is None else self.k_norm(k), tables), v

    def __call__(self, x: Tensor, tables: Tables, view: View) -> Tensor:  # [T, H] -> [T, H]
        return self.end(x, self.attend(*self.begin(x, tables), view))

    def begin(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [T, heads, D] each."""
        normed = self.norm(x)
        q = self.q(normed).view(len(x), -1, self.head_dim)
        q = rotate(q if self.q_norm is None else self.q_norm(q), tables)
        return q, *self.keys_values(normed, tables)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:  # [T, heads, D]
        return attend_blocks(view, self.layer, self.sight, q, k, v, self.head_dim**-0.5)

    def end(self, x: Tensor, seen: Tensor) -> Tensor:  # [T, H], [T, heads, D] -> [T, H]
        x = x + self.out(seen.reshape(len(x), -1))
        return x + self.mlp(self.mlp_norm(x))


@dataclass(slots=True)
class DFlashModel:
    """A DFlash or DSpark drafter in the target's dtype and on its device."""

    embed: Tensor  # [V, H]
    mask_token_id: int
    fc: Product  # k * Ht -> H
    context_norm: Norm
    layers: list[BlockLayer]
    norm: Norm
    head: Product  # H -> Vd
    rotary: nn.Module
    ids: Tensor | None  # [Vd] target id of each draft id; None: the same
    markov: Markov | None
    confidence: Confidence | None

    def write_context(self, taps: Tensor, positions: Tensor, view: View) -> None:
        """Writes keys and values of the target's states [T, k * Ht] at `positions` [T] to the pages."""
        x = self.context_norm(self.fc(taps))
        tables = self.tables(x, positions)
        for layer in self.layers:
            view.write(layer.layer, *layer.keys_values(x, tables))

    def __call__(self, ids: Tensor, positions: Tensor, view: View) -> Tensor:
        """The normed states [T, H] of the rows of blocks; ids, positions [T], and `block_view` of them."""
        x, tables = self.begin(ids, positions)
        for layer in self.layers:
            x = layer(x, tables, view)
        return self.norm(x)

    def begin(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tables]:
        """What the first layer reads [T, H], and the rotary tables of all."""
        x = F.embedding(ids, self.embed)
        return x, self.tables(x, positions)

    def tables(self, x: Tensor, positions: Tensor) -> Tables:
        cos, sin = self.rotary(x, positions[None])
        return tables_of(cos, sin, self.layers[0].head_dim)

    def widened(self, scores: Tensor, vocab_size: int) -> Tensor:  # [R, Vd] -> [R, V]
        """Logits over the target's vocabulary; minus infinity for tokens that cannot be drafted."""
        if self.ids is not None:
            return scores.new_full((len(scores), vocab_size), -math.inf).index_copy_(1, self.ids, scores)
        missing = vocab_size - scores.shape[1]  # either may be padded
        return scores if not missing else F.pad(scores, (0, missing), value=-math.inf)


@dataclass(slots=True)
class Drawing:
    """The rows of one round's blocks that draft, sampled left to right."""

    model: DFlashModel
    vocab_size: int
    states: list[Tensor]  # of each sequence [K, H]
    scores: list[Tensor]  # without the Markov head [K, Vd]
    memory: Tensor | None  # of the Markov head [B, r]
    sure: list[float]  # of the rows of the latest call; empty without a confidence head

    @classmethod
    def of(cls, model: DFlashModel, vocab_size: int, states: list[Tensor]) -> Drawing:
        sizes = [len(part) for part in states]
        scores = model.head(torch.cat(states)).float().split(sizes)
        memory = None if model.markov is None else model.markov.start(len(states))
        return cls(model, vocab_size, states, list(scores), memory, [])

    def all_logits(self) -> tuple[Tensor, list[float] | None]:
        """Those of all rows [sum of K, V], and what a confidence head says, where there is no Markov head."""
        assert self.model.markov is None
        confidence = self.model.confidence
        chances = None if confidence is None else confidence(torch.cat(self.states), None).tolist()
        return self.model.widened(torch.cat(self.scores), self.vocab_size), chances

    def logits(self, which: list[int], row: int, previous: list[int]) -> Tensor:  # [len(which), V]
        """Those of row `row` of some sequences, after these tokens; rows are asked for in rising order."""
        scores = torch.stack([self.scores[i][row] for i in which])
        markov, confidence, e = self.model.markov, self.model.confidence, None
        h = torch.stack([self.states[i][row] for i in which])
        if markov is not None:
            assert self.memory is not None
            e = markov.embed(torch.tensor(previous, device=h.device))
            at = torch.tensor(which, device=h.device)
            bias, state = markov(e, h, self.memory.index_select(0, at))
            self.memory.index_copy_(0, at, state)
            scores = scores + bias.float()
        self.sure = [] if confidence is None else confidence(h, e).tolist()
        return self.model.widened(scores, self.vocab_size)
