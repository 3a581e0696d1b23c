"""The EAGLE-3 head (Li et al. 2025) over pages: usually one layer that reads the target's hidden states.

Row i pairs the target's states g_i with token x_{i+1} and drafts x_{i+2}, at rotary position i. It lies in
slot i + 1 of its sequence, with the target's keys of that token; slot 0 is empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.batch import Batch
from speculon.core import LayerSpec
from speculon.kv.store import PageStore, SpanView, View
from speculon.models.block import Attention, Block, Gated, Norm, Tables, tables_of
from speculon.models.linear import Product
from speculon.models.target import Target


@dataclass(slots=True)
class FirstLayer:
    """Attention over [embedding, state] side by side, [T, 2 H]; the sum runs over the state alone."""

    embed_norm: Norm
    state_norm: Norm
    attention: Attention  # of width 2 H
    mlp_norm: Norm
    mlp: Gated
    norm_before_residual: bool

    def __call__(self, x: Tensor, tables: Tables, view: View) -> Tensor:  # [T, 2 H] -> [T, H]
        return self.end(x, self.attend(*self.begin(x, tables), view))

    def begin(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """The part before attention; see `Attention.begin`."""
        embedded, state = x.chunk(2, -1)
        return self.attention.begin(
            torch.cat([self.embed_norm(embedded), self.state_norm(state)], -1), tables
        )

    def attend(self, rotated: Tensor, value: Tensor, view: View) -> Tensor:  # [T, heads, Dh]
        return self.attention.attend(rotated, value, view)

    def end(self, x: Tensor, seen: Tensor) -> Tensor:  # [T, 2 H], [T, heads, Dh] -> [T, H]
        """The part after attention."""
        _, state = x.chunk(2, -1)
        state = self.state_norm(state) if self.norm_before_residual else state
        x = state + self.attention.out(seen.reshape(len(seen), -1))
        return x + self.mlp(self.mlp_norm(x))


@dataclass(slots=True)
class EagleHead:
    """An EAGLE-3 head in the target's dtype and on its device."""

    embed: Tensor  # [V, H]
    fc: Product  # k * Ht -> H
    tap_norms: tuple[Norm, ...]  # one over all taps, one for each, or none
    first: FirstLayer
    more: list[Block]
    norm: Norm
    norm_output: bool
    head: Product  # H -> Vd
    scale: float
    rotary: nn.Module
    ids: Tensor | None  # [Vd] target id of each draft id; None: the same

    def fuse(self, taps: Tensor) -> Tensor:  # [T, k * Ht] -> [T, H]
        """The state of each row, from the target's hidden states there."""
        if self.tap_norms:
            parts = taps.chunk(len(self.tap_norms), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], -1)
        return self.fc(taps)

    def __call__(self, ids: Tensor, state: Tensor, positions: Tensor, view: View) -> Tensor:
        """The state [T, H] after each row, which the next draft position reads; ids, positions [T]."""
        x, tables = self.begin(ids, state, positions)
        for block in self.blocks:
            x = block(x, tables, view)
        return self.end(x)

    @property
    def blocks(self) -> list[FirstLayer | Block]:
        return [self.first, *self.more]

    def begin(self, ids: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tables]:
        """What the first layer reads [T, 2 H], and the rotary tables of all."""
        embedded = F.embedding(ids, self.embed)
        cos, sin = self.rotary(embedded, positions[None])
        return torch.cat([embedded, state], -1), tables_of(cos, sin, self.first.attention.head_dim)

    def end(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self.norm(x) if self.norm_output else x

    def logits(self, state: Tensor, vocab_size: int) -> Tensor:  # [R, H] -> [R, V]
        """Logits over the target's vocabulary; minus infinity for tokens that cannot be drafted."""
        scores = self.head(state if self.norm_output else self.norm(state)).float()
        if self.scale != 1:
            scores = scores * self.scale
        if self.ids is not None:
            return scores.new_full((len(scores), vocab_size), -math.inf).index_copy_(1, self.ids, scores)
        missing = vocab_size - scores.shape[1]  # either may be padded
        return scores if not missing else F.pad(scores, (0, missing), value=-math.inf)


@torch.inference_mode()
def agreement(
    head: EagleHead, target: Target, layers: tuple[LayerSpec, ...], taps: tuple[int, ...], ids: list[int]
) -> float:
    """Share of rows of `ids` where the head's best token is the target's, when it reads these taps.

    `layers` are the head's attention layers in the pages. Changes which taps the target captures.
    """
    n, device = len(ids), target.device
    store = PageStore((*target.layers, *layers), 1, n, device)
    rows = torch.arange(n, device=device)
    batch = Batch([], torch.tensor([ids], device=device), rows[None], rows)
    target.capture(taps)
    out = target.forward(batch, target.view_of_new(store, SpanView(0, n, slice(0, n), n)))
    assert out.taps is not None
    states = head.fuse(torch.cat([out.taps[layer][:-1] for layer in taps], -1))
    view = store.view_of([SpanView(0, n - 1, slice(1, n), n - 1)], len(target.layers))
    after = head(batch.input_ids[0, 1:], states, rows[:-1], view)
    drafts = head.logits(after, target.vocab_size).argmax(-1)
    return (drafts == out.logits[1:].argmax(-1)).float().mean().item()
