"""The EAGLE-3 head (Li et al. 2025): usually one layer that reads the target's hidden states.

Row i pairs the target's states g_i with token x_{i+1} and drafts x_{i+2}, at rotary position i. Over pages it
lies in slot i + 1 of its sequence, with the target's keys of that token; slot 0 is empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.runtimes.torch.drafters.eagle3.config import Eagle3Config
from speculon.runtimes.torch.drafters.layers import (
    DecoderLayer,
    Joined,
    JoinedNorm,
    Network,
    TrainedNorm,
)
from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.model.attention import attend_rows
from speculon.runtimes.torch.model.block import RotaryTables, rotate
from speculon.runtimes.torch.model.linear import Product
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import LayerSpec

PAIR_WIDTHS = 3  # widths of a state: the states that it reads, and the pairs that the first layer reads


class HeadLayer(DecoderLayer):
    """A layer over pages, as a llama's; some heads norm queries and keys."""

    def __init__(self, config: Eagle3Config, number: int, inputs: int = 1):
        super().__init__(config, number, inputs * config.hidden)
        of, self.heads, self.kv_heads = self.self_attn, config.heads, config.kv_heads
        self.qkv: Product = Joined([of.q_proj, of.k_proj, of.v_proj])
        self.head_norm: Product | None = None
        if of.q_norm is not None and of.k_norm is not None:
            self.head_norm = JoinedNorm([of.q_norm, of.k_norm], [self.heads, self.kv_heads])

    def begin(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        return self.rotated(self.input_layernorm(x), tables)

    def rotated(self, normed: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        states, both = self.qkv(normed).unflatten(-1, (-1, self.head_dim)), self.heads + self.kv_heads
        turned, value = states[..., :both, :], states[..., both:, :]
        turned = rotate(turned if self.head_norm is None else self.head_norm(turned), tables)
        return turned[..., : self.heads, :], turned[..., self.heads :, :], value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, view: View) -> Tensor:  # [T, heads, Dh]
        return attend_rows(view, self.number, query, key, value, self.scaling)


class FirstLayer(HeadLayer):
    """Attention over [embedding, state] side by side, [..., 2 H]; the sum runs over the state alone."""

    def __init__(self, config: Eagle3Config):
        super().__init__(config, 0, inputs=2)
        self.hidden_norm = TrainedNorm(config.hidden, config.eps)
        self.norm_before_residual = config.norm_before_residual

    def begin(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        embedded, state = x.chunk(2, -1)
        return self.rotated(torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1), tables)

    def end(self, x: Tensor, seen: Tensor) -> Tensor:  # [..., 2 H], [..., heads, Dh] -> [..., H]
        _, state = x.chunk(2, -1)
        return super().end(self.hidden_norm(state) if self.norm_before_residual else state, seen)


class Eagle3Network(Network):
    """A head. Its parameters have the names of the published format."""

    reads_states = True
    config: Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.norm_output, self.scale = config.norm_output, config.logit_scale
        width = config.taps * config.target_hidden
        self.fc = nn.Linear(width, config.hidden, bias="fc.bias" in config.names)
        self.input_norm = TrainedNorm(width, config.eps) if config.norm_before_fc else None
        each = [TrainedNorm(config.target_hidden, config.eps) for _ in range(config.taps * config.fc_norm)]
        self.fc_norm, self.tap_size = nn.ModuleList(each), config.target_hidden
        self.tap_norm: Product | None = JoinedNorm(each, [1] * config.taps) if each else None
        self.layers: Any = nn.ModuleList([FirstLayer(config)])
        self.layers.extend(HeadLayer(config, number) for number in range(1, config.layers))
        self.norm = TrainedNorm(config.hidden, config.eps)
        if config.has("lm_head"):
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab_size, bias=False)

    def fuse(self, taps: Tensor) -> Tensor:  # [..., k * Ht] -> [..., H]
        """The state of each row, from the target's hidden states there."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        elif self.tap_norm is not None:
            taps = self.tap_norm(taps.unflatten(-1, (-1, self.tap_size))).flatten(-2)
        return self.fc(taps)

    def begin(self, ids: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, RotaryTables]:
        """Pairs [T, 2 H]; the state after each row is what the next draft position reads."""
        embedded = F.embedding(ids, self.embed)
        return torch.cat([embedded, state], -1), self.tables(embedded, positions)

    def end(self, x: Tensor) -> Tensor:
        return super().end(x) if self.norm_output else x

    def logits(self, state: Tensor, vocab_size: int) -> Tensor:  # [R, H] -> [R, V]
        """Logits over the target's vocabulary; minus infinity for tokens that cannot be drafted."""
        scores = self.lm_head(state if self.norm_output else self.norm(state)).float()
        return self.widened(scores if self.scale == 1 else scores * self.scale, vocab_size)


@torch.inference_mode()
def agreement(
    head: Eagle3Network, target: Target, layers: tuple[LayerSpec, ...], taps: tuple[int, ...], ids: list[int]
) -> float:
    """Share of rows of `ids` where the head's best token is the target's, when it reads these taps.

    `layers` are the head's attention layers in the pages. Changes which taps the target captures.
    """
    n, device = len(ids), target.device
    store, tokens = PageStore((*target.layers, *layers), 1, n, device), torch.tensor(ids, device=device)
    logits, states = target.tapped(tokens, store, taps)
    fused = head.fuse(torch.cat([states[layer][:-1] for layer in taps], -1))
    view = store.view_of([SpanView(0, n - 1, slice(1, n), n - 1)], len(target.layers))
    after = head(tokens[1:], fused, torch.arange(n - 1, device=device), view)
    drafts = head.logits(after, target.vocab_size).argmax(-1)
    return (drafts == logits[1:].argmax(-1)).float().mean().item()
