"""EAGLE-3 as a reference formula: dense attention, no pages, no batch, all rows computed at each step.

`head` has the sizes of `tests/formats/eagle3.json`; `tensors` have its names. Row i pairs taps g_i with
token x_{i+1} at position i, and drafts x_{i+2}. `embed` and `lm_head` are the target's, for a checkpoint
without its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


def reference_rows(
    tensors: Tensors,
    head: Any,
    ids: list[int],
    taps: Tensor,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden that is fed back [n, H] and logits [n, Vd] of n rows with true taps [n, k * Ht], for ids x_0 to
    x_n.
    """
    assert len(ids) == len(taps) + 1, f"{len(ids)} ids for {len(taps)} rows: row i takes the token after it"
    return forward(tensors, head, ids[1:], fuse(tensors, head, taps), embed, lm_head)


def reference_chain(
    tensors: Tensors,
    head: Any,
    ids: list[int],
    taps: Tensor,
    k: int,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> tuple[list[int], Tensor]:
    """k greedy drafts after x_n as the target's ids, and the hiddens [k, H] of the rows that gave them."""
    tokens, u = list(ids[1:]), fuse(tensors, head, taps)
    drafts, hiddens = [], []
    for _ in range(k):
        hidden, logits = forward(tensors, head, tokens, u, embed, lm_head)
        drafts.append(as_target_id(tensors, int(logits[-1].argmax())))
        hiddens.append(hidden[-1])
        tokens, u = [*tokens, drafts[-1]], torch.cat([u, hidden[-1:]])
    return drafts, torch.stack(hiddens)


def reference_path(
    tensors: Tensors,
    head: Any,
    ids: list[int],
    taps: Tensor,
    path: tuple[int, ...],
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> Tensor:
    """Logits [Vd] after x_n and the drafts of `path`, which are the target's ids."""
    tokens, u = list(ids[1:]), fuse(tensors, head, taps)
    for draft in path:
        hidden, _ = forward(tensors, head, tokens, u, embed, lm_head)
        tokens, u = [*tokens, draft], torch.cat([u, hidden[-1:]])
    return forward(tensors, head, tokens, u, embed, lm_head)[1][-1]


def as_target_id(tensors: Tensors, j: int) -> int:
    return j + int(tensors["d2t"][j]) if "d2t" in tensors else j


def fuse(tensors: Tensors, head: Any, taps: Tensor) -> Tensor:
    """u_i = fc(norm?(low, mid, high)) [n, H]."""
    if head.norm_before_fc:
        taps = rms(taps, tensors["input_norm.weight"], head.eps)
    if head.fc_norm:
        each = taps.split(head.target_hidden, -1)
        taps = torch.cat(
            [rms(tap, tensors[f"fc_norm.{i}.weight"], head.eps) for i, tap in enumerate(each)], -1
        )
    return F.linear(taps, tensors["fc.weight"], tensors.get("fc.bias"))


def forward(
    tensors: Tensors, head: Any, tokens: list[int], u: Tensor, embed: Tensor | None, lm_head: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows of `tokens` [n] at positions 0 to n - 1 with hiddens u [n, H], fused or fed back."""
    table = tensors.get("embed_tokens.weight", embed)
    out = tensors.get("lm_head.weight", lm_head)
    assert table is not None
    assert out is not None
    e = rms(table[torch.tensor(tokens)], tensors["layers.0.input_layernorm.weight"], head.eps)
    v = rms(u, tensors["layers.0.hidden_norm.weight"], head.eps)
    h = block(tensors, head, 0, torch.cat([e, v], -1), v if head.norm_before_residual else u)
    for layer in range(1, head.layers):
        names = (f"layers.{layer}.{name}.weight" for name in ("input_layernorm", "hidden_norm"))
        weight = next(tensors[name] for name in names if name in tensors)
        h = block(tensors, head, layer, rms(h, weight, head.eps), h)
    normed = rms(h, tensors["norm.weight"], head.eps)
    return normed if head.norm_output else h, F.linear(normed, out) * head.logit_scale


def block(tensors: Tensors, head: Any, layer: int, a: Tensor, residual: Tensor) -> Tensor:
    at = f"layers.{layer}."
    h = residual + attend(tensors, head, layer, a)
    x = rms(h, tensors[f"{at}post_attention_layernorm.weight"], head.eps)
    gate, up, down = (tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return h + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def attend(tensors: Tensors, head: Any, layer: int, a: Tensor) -> Tensor:
    n, at, window = len(a), f"layers.{layer}.self_attn.", head.windows[layer]

    def project(name: str, heads: int) -> Tensor:
        weight, bias = tensors[f"{at}{name}_proj.weight"], tensors.get(f"{at}{name}_proj.bias")
        x = F.linear(a, weight, bias).view(n, heads, head.head_dim).transpose(0, 1)  # [heads, n, D]
        norm = tensors.get(f"{at}{name}_norm.weight")
        return x if norm is None else rms(x, norm, head.eps)

    positions = torch.arange(n)
    q = rotate(project("q", head.heads), positions, head.rope)
    groups = head.heads // head.kv_heads
    k = rotate(project("k", head.kv_heads), positions, head.rope).repeat_interleave(groups, 0)
    v = project("v", head.kv_heads).repeat_interleave(groups, 0)
    back = positions[:, None] - positions  # how far behind row i column j lies
    seen = (back >= 0) & (back < (window or n))
    scores = (q @ k.mT / math.sqrt(head.head_dim)).masked_fill(~seen, -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
    return F.linear(mixed, tensors[f"{at}o_proj.weight"], tensors.get(f"{at}o_proj.bias"))


def rotate(x: Tensor, positions: Tensor, rope: dict[str, Any]) -> Tensor:
    """Halves of each head [heads, n, D], rotated by position (Su 2021)."""
    angles = positions[:, None].float() * frequencies(x.shape[-1], rope)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def frequencies(head_dim: int, rope: dict[str, Any]) -> Tensor:
    """Radians per position [D / 2]; scaled as Llama 3.1 does where `rope` says so."""
    usual = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.get("rope_type", "default") == "default":
        return usual
    assert rope["rope_type"] == "llama3", f"{rope['rope_type']}: not written here"
    # within the context it was trained on
    turns = rope["original_max_position_embeddings"] * usual / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast enough to stay, 0: wholly stretched
    return usual * keep + usual / rope["factor"] * (1 - keep)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
