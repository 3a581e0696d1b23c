"""The network of a block drafter (DFlash): a block of masks attends to states of the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.train.layers import MLP, Norm, rope_table, rotate, small_random

CHUNK = 16  # anchors of a row that attend together; later ones see more of the row


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The numbers that define a block drafter. Its width H and its vocabulary V are the target's."""

    hidden: int
    taps: tuple[int, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    eps: float
    theta: float
    block: int  # S rows of a block: the anchor, then masks
    mask: int  # the token whose embedding fills the masked rows
    from_anchor: bool  # whether the anchor's row drafts the next token, or is left unused

    @property
    def drafts(self) -> int:
        """K drafts of a block."""
        return self.block if self.from_anchor else self.block - 1


class BlockAttention(nn.Module):
    def __init__(self, form: BlockForm):
        super().__init__()
        self.form, dim = form, form.head_dim
        self.q_proj = nn.Linear(form.hidden, form.heads * dim, bias=False)
        self.k_proj = nn.Linear(form.hidden, form.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(form.hidden, form.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(form.heads * dim, form.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(dim, form.eps), Norm(dim, form.eps)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """x [B, A, S, H] of the blocks, context [B, T, H], anchors [B, A] in rising order -> [B, A, S, H]"""
        form = self.form
        cos, sin = rope_table(context.shape[1] + form.block, form.head_dim, form.theta, x.device)
        places = anchors[..., None] + torch.arange(form.block, device=x.device)  # [B, A, S]
        both = torch.cat([self.k_proj.weight, self.v_proj.weight])
        k, v = self._split(F.linear(context, both))  # [B, T, KV, D]
        own_k, own_v = self._split(F.linear(x, both))  # [B, A, S, KV, D]
        q = self.q_proj(x).unflatten(-1, (-1, form.head_dim))  # [B, A, S, heads, D]
        here = cos[places][..., None, :], sin[places][..., None, :]
        length = context.shape[1]
        k = rotate(self.k_norm(k), cos[:length, None], sin[:length, None]).to(v.dtype)
        own_k = rotate(self.k_norm(own_k), *here).to(v.dtype)
        q = rotate(self.q_norm(q), *here).to(v.dtype)
        mixed = block_attention(q, k, v, own_k, own_v, anchors)
        return self.o_proj(mixed.flatten(-2))

    def _split(self, both: Tensor) -> tuple[Tensor, Tensor]:
        k, v = both.unflatten(-1, (2, self.form.kv_heads, self.form.head_dim)).unbind(-3)
        return k, v


class BlockLayer(nn.Module):
    def __init__(self, form: BlockForm):
        super().__init__()
        self.input_layernorm = Norm(form.hidden, form.eps)
        self.self_attn = BlockAttention(form)
        self.post_attention_layernorm = Norm(form.hidden, form.eps)
        self.mlp = MLP(form.hidden, form.intermediate)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockNetwork(nn.Module):
    """Drafts a block at once. Parameters have the names of the published format."""

    def __init__(self, form: BlockForm):
        super().__init__()
        self.form = form
        self.fc = nn.Linear(len(form.taps) * form.hidden, form.hidden, bias=False)
        self.hidden_norm = Norm(form.hidden, form.eps)
        self.layers = nn.ModuleList(BlockLayer(form) for _ in range(form.layers))
        self.norm = Norm(form.hidden, form.eps)
        self.embed: Tensor  # [V, H], the target's
        self.head: Tensor  # [V, H], the target's
        self.register_buffer("embed", torch.empty(0), persistent=False)
        self.register_buffer("head", torch.empty(0), persistent=False)

    @torch.no_grad()
    def start_from(self, embed: Tensor, norm: Tensor | None, head: Tensor) -> None:
        """Small random matrices; embeddings and output head are the target's, and stay so."""
        small_random(self)
        self.embed, self.head = embed.detach().float(), head.detach().float()
        if norm is not None:
            self.norm.weight.copy_(norm)

    def forward(self, ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        """Normed states [B, A, K, H] of the rows that draft, for blocks that begin at `anchors` [B, A].

        ids [B, T], taps [B, T, k * H]. A block sees the projected taps of all positions before its anchor,
        and all of its own rows. Draft k of anchor a predicts token a + 1 + k.
        """
        context = self.hidden_norm(self.fc(taps))  # [B, T, H]
        x = F.embedding(self._tokens(ids, anchors), self.embed)
        for layer in self.layers:
            x = layer(x, context, anchors)
        return self.norm(x[:, :, self.form.block - self.form.drafts :])

    def _tokens(self, ids: Tensor, anchors: Tensor) -> Tensor:
        """The anchor's token, then masks [B, A, S]."""
        masks = torch.full((*anchors.shape, self.form.block - 1), self.form.mask, device=ids.device)
        return torch.cat([ids.gather(1, anchors)[..., None], masks], -1)


def block_attention(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, anchors: Tensor) -> Tensor:
    """Attention of blocks to the context before their anchors, and in both directions to themselves.

    q [B, A, S, heads, D]; k, v [B, T, KV, D]; own_k, own_v [B, A, S, KV, D]; anchors [B, A] in rising order
    -> [B, A, S, heads, D]
    """
    parts = [slice(start, start + CHUNK) for start in range(0, q.shape[1], CHUNK)]
    out = []
    for part in parts:
        stop = int(anchors[:, part].max())
        some = (k[:, :stop], v[:, :stop], own_k[:, part], own_v[:, part])
        out.append(attend(q[:, part], *some, anchors[:, part]))
    return torch.cat(out, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, anchors: Tensor) -> Tensor:
    """`block_attention` without chunks."""
    batch, count, rows, heads, dim = q.shape
    kv, length = k.shape[2], k.shape[1]
    # [B, KV, A, G * S, D]
    q = q.unflatten(3, (kv, heads // kv)).permute(0, 3, 1, 4, 2, 5).reshape(batch, kv, count, -1, dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [B, KV, T, D]
    own_k, own_v = own_k.permute(0, 3, 1, 2, 4), own_v.permute(0, 3, 1, 2, 4)  # [B, KV, A, S, D]
    far = (q.flatten(2, 3) @ k.transpose(-1, -2)).view(batch, kv, count, -1, length)
    hidden = torch.arange(length, device=q.device) >= anchors[:, None, :, None, None]
    far = far.masked_fill(hidden, float("-inf"))
    near = q @ own_k.transpose(-1, -2)  # [B, KV, A, G * S, S]
    p = (torch.cat([far, near], -1).float() * dim**-0.5).softmax(-1).to(v.dtype)
    mixed = (p[..., :length].flatten(2, 3) @ v).view(batch, kv, count, -1, dim) + p[..., length:] @ own_v
    mixed = mixed.view(batch, kv, count, heads // kv, rows, dim)
    return mixed.permute(0, 2, 4, 1, 3, 5).flatten(3, 4)  # [B, A, S, heads, D]
