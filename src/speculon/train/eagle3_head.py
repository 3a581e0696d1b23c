"""An EAGLE-3 head as a module, with the training-time test (Li 2025) as its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.train.layers import MLP, Norm, rope_table, rotate, small_random
from speculon.train.losses import attention
from speculon.train.step_drafter import StepDrafter
from speculon.train.teacher import Batch


@dataclass(frozen=True, slots=True)
class HeadForm:
    """The numbers that define a head. Its width H is the target's."""

    hidden: int
    taps: tuple[int, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    theta: float
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


class SelfAttention(nn.Module):
    def __init__(self, form: HeadForm, width: int):
        super().__init__()
        self.dim = form.head_dim
        self.q_proj = nn.Linear(width, form.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, form.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, form.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(form.heads * self.dim, form.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, N, width] of this step; appends its keys and values to `past`, those of earlier steps."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        widths = [part.out_features for part in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (
            t.unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in F.linear(x, weight).split(widths, -1)
        )
        past.append((rotate(k, *rope), v))  # [B, KV, N, D]
        # [B, H, N, D]
        mixed = attention(rotate(q, *rope), [key for key, _ in past], [value for _, value in past])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The first layer reads embedding and hidden state side by side; the others are a llama's."""

    def __init__(self, form: HeadForm, first: bool):
        super().__init__()
        self.norm_first = form.norm_before_residual
        self.input_layernorm = Norm(form.hidden, form.eps)
        self.hidden_norm = Norm(form.hidden, form.eps) if first else None
        self.self_attn = SelfAttention(form, form.hidden * (1 + first))
        self.post_attention_layernorm = Norm(form.hidden, form.eps)
        self.mlp = MLP(form.hidden, form.intermediate)

    def forward(
        self, x: Tensor, embedded: Tensor, rope: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        if self.hidden_norm is None:
            residual, seen = x, self.input_layernorm(x)
        else:
            normed = self.hidden_norm(x)
            residual = normed if self.norm_first else x
            seen = torch.cat([self.input_layernorm(embedded), normed], -1)  # [B, N, 2H], the embedding first
        x = residual + self.self_attn(seen, rope, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(StepDrafter):
    """Predicts from the target's hidden states. Parameters have the names of the published format."""

    def __init__(self, form: HeadForm, steps: int, decay: float):
        super().__init__(steps, decay)
        self.form = form
        self.fc = nn.Linear(len(form.taps) * form.hidden, form.hidden, bias=False)
        self.input_norm = Norm(self.fc.in_features, form.eps) if form.norm_before_fc else None
        self.fc_norm = nn.ModuleList(Norm(form.hidden, form.eps) for _ in form.taps) if form.fc_norm else None
        self.layers = nn.ModuleList(Layer(form, first=i == 0) for i in range(form.layers))
        self.norm = Norm(form.hidden, form.eps)
        self.lm_head = nn.Linear(form.hidden, form.draft_vocab_size, bias=False)
        self.embed: Tensor  # [V, H], the target's
        self.used: Tensor  # [Vd], rising: which of the target's tokens can be drafted
        self.register_buffer("embed", torch.empty(0), persistent=False)
        self.register_buffer("used", torch.arange(form.draft_vocab_size), persistent=False)

    @torch.no_grad()
    def start_from(self, embed: Tensor, norm: Tensor | None, head: Tensor, used: Tensor) -> None:
        """Small random matrices; embeddings, last norm and output head are the target's."""
        small_random(self)
        self.embed, self.used = embed.detach().float(), used
        if norm is not None:
            self.norm.weight.copy_(norm)
        self.lm_head.weight.copy_(head[used.to(head.device)])

    def project(self, taps: Tensor) -> Tensor:
        """taps [B, N, k * H] -> [B, N, H]"""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        elif self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(taps).float()

    def hiddens(self, ids: Tensor, taps: Tensor) -> Iterator[Tensor]:
        """Normed states [B, N, H] of each step, N = T - steps. ids [B, T], taps [B, T, k * H].

        Row i of step k pairs the projected taps of position i (k = 0), or the head's output of the last step,
        with token i + 1 + k at rotary position i + k; it predicts token i + 2 + k.
        """
        rows = ids.shape[1] - self.steps
        past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        x = self.project(taps[:, :rows])
        cos, sin = rope_table(ids.shape[1], self.form.head_dim, self.form.theta, ids.device)
        for k in range(self.steps):
            embedded = F.embedding(ids[:, k + 1 : k + 1 + rows], self.embed)
            for layer, kept in zip(self.layers, past, strict=True):
                x = layer(x, embedded, (cos[k : k + rows], sin[k : k + rows]), kept)
            normed = self.norm(x)
            yield normed
            x = normed if self.form.norm_output else x

    def states(self, batch: Batch) -> Iterator[Tensor]:
        return self.hiddens(batch.ids, batch.taps)

    def head_of(self, step: int) -> Tensor:
        return self.lm_head.weight

    def best(self, step: int, states: Tensor) -> Tensor:
        return self.used[super().best(step, states)]
