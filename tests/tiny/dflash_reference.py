"""DFlash, DFlash2 and DSpark by their formulas: dense attention, no pages, no batch, one block at a time.

`drafter` has the sizes of `tests/formats/dflash.json`, and tensors by its names. Keys of a layer are those of
the target's states at positions 0 to n - 1 and those of the block's own rows, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formats.writer import Checkpoint
from tests.tiny.eagle_reference import rms, rotate


def reference_states(drafter: Checkpoint, anchor: int, taps: Tensor, rows: int, embed: Tensor) -> Tensor:
    """The normed states [rows, H] of a block after n positions with true taps [n, k * Ht]."""
    tensors, eps = drafter.tensors, drafter.eps
    context = rms(F.linear(taps, tensors["fc.weight"]), tensors["hidden_norm.weight"], eps)
    z = tensors.get("embed_tokens.weight", embed)[torch.tensor([anchor] + [drafter.mask] * (rows - 1))]
    z = z * drafter.scales.get("input_embedding_scale", 1.0)
    for layer in range(drafter.layers):
        at = f"layers.{layer}."

        def through_attention(x: Tensor, layer: int = layer) -> Tensor:
            return attend(drafter, layer, context, x)

        def through_mlp(x: Tensor, at: str = at) -> Tensor:
            gate, up, down = (tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

        x = rms(z, tensors[f"{at}input_layernorm.weight"], eps)
        z = z + convolved(drafter, f"{at}attention_conv", x, through_attention)
        x = rms(z, tensors[f"{at}post_attention_layernorm.weight"], eps)
        z = z + convolved(drafter, f"{at}mlp_conv", x, through_mlp)
    return rms(z, tensors["norm.weight"], eps)


def convolved(drafter: Checkpoint, name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """The sublayer of input x [rows, H], with DFlash2's convolutions before and after it."""
    if not drafter.group:
        return sublayer(x)
    base, project = (
        drafter.tensors[f"{name}.{part}"] for part in ("base_kernel", "kernel_projection.weight")
    )
    kernels = F.linear(x, project).unflatten(-1, (2, base.shape[1], -1))
    kernels = base + kernels.repeat_interleave(drafter.group, -1)  # [rows, 2, taps, H]
    return convolve(kernels[:, 1], sublayer(convolve(kernels[:, 0], x)))


def convolve(kernels: Tensor, x: Tensor) -> Tensor:
    """y[i, c] = sum over taps t <= i of kernels[i, t, c] x[i - t, c]"""
    out = torch.zeros_like(x)
    for i, taps in enumerate(kernels):
        for t in range(min(len(taps), i + 1)):
            out[i] += taps[t] * x[i - t]
    return out


def attend(drafter: Checkpoint, layer: int, context: Tensor, s: Tensor) -> Tensor:
    n, rows, tensors, at = len(context), len(s), drafter.tensors, f"layers.{layer}.self_attn."

    def project(x: Tensor, name: str, heads: int) -> Tensor:  # [heads, T, D]
        weight, bias = tensors[f"{at}{name}_proj.weight"], tensors.get(f"{at}{name}_proj.bias")
        x = F.linear(x, weight, bias).view(len(x), heads, drafter.head_dim).transpose(0, 1)
        norm = tensors.get(f"{at}{name}_norm.weight")
        return x if norm is None else rms(x, norm, drafter.eps)

    rope = {"rope_theta": drafter.rope_theta}
    both, positions = torch.cat([context, s]), torch.arange(n + rows)
    groups = drafter.heads // drafter.kv_heads
    q = rotate(project(s, "q", drafter.heads), positions[n:], rope)
    k = rotate(project(both, "k", drafter.kv_heads), positions, rope).repeat_interleave(groups, 0)
    v = project(both, "v", drafter.kv_heads).repeat_interleave(groups, 0)
    seen = [[sees(drafter, layer, n, row, position) for position in range(n + rows)] for row in range(rows)]
    scores = (q @ k.mT / math.sqrt(drafter.head_dim)).masked_fill(~torch.tensor(seen), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(rows, -1)
    return F.linear(mixed, tensors[f"{at}o_proj.weight"], tensors.get(f"{at}o_proj.bias"))


def sees(drafter: Checkpoint, layer: int, n: int, row: int, position: int) -> bool:
    """Whether row `row` of a block after n positions sees a position; those from n on are of its block.

    A window of W begins at p - W + 1, or at p - W (Meta), or at n - W (speculators).
    """
    own, p, window = position >= n, n + row, drafter.windows[layer]
    if own and drafter.layer_causal[layer] and position > p:
        return False
    if window is None:
        return True
    if drafter.form == "speculators":
        return own or position >= n - window
    reach = window if drafter.form == "meta" else window - 1
    return abs(position - p) <= reach


def greedy(logits: Tensor, before: list[int]) -> int:
    return int(logits.argmax())


def reference_drafts(
    drafter: Checkpoint,
    anchor: int,
    states: Tensor,
    lm_head: Tensor,
    choose: Callable[[Tensor, list[int]], int] = greedy,
) -> tuple[list[int], list[Tensor], list[float]]:
    """Drafts of the rows that draft, with their logits [V] and chances; `states` [rows, H] are those of the
    whole block, and `choose` takes the logits of a row and the drafts before it.
    """
    tensors, rank = drafter.tensors, drafter.rank
    head, state = tensors.get("lm_head.weight", lm_head), torch.zeros(rank)
    drafts, logits, chances, before = [], [], [], anchor
    for h in states if drafter.anchor_drafts else states[1:]:
        scores, e = head @ h * drafter.scales.get("output_multiplier", 1.0), None
        if cap := drafter.scales.get("final_logit_softcapping"):
            scores = cap * torch.tanh(scores / cap)
        if drafter.markov:
            e = tensors["markov_head.markov_w1.weight"][before]
            latent, state = markov_latent(drafter, e, h, state)
            scores = scores + tensors["markov_head.markov_w2.weight"] @ latent
        if "d2t" in tensors:
            whole = torch.full((drafter.vocab_size,), -math.inf)
            for j, offset in enumerate(tensors["d2t"].tolist()):
                whole[j + offset] = scores[j]
            scores = whole
        if drafter.group:
            scores = selected(drafter, h, before, scores)
        before = choose(scores, drafts)
        drafts.append(before)
        logits.append(scores)
        chances.append(chance_of(drafter, h, e, float(scores.softmax(-1)[before])))
    return drafts, logits, chances


def selected(drafter: Checkpoint, h: Tensor, before: int, scores: Tensor) -> Tensor:
    """Of the likeliest tokens c alone: logits [V] with the sum over r of A[before, r] (P h)[r] B[c, r]."""
    parts = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    first, second, project = (drafter.tensors[f"candidate_selector.{part}"] for part in parts)
    pairs = second @ (first[before] * (project @ h))  # [V]
    found = torch.full_like(scores, -math.inf)
    best = scores.sort(descending=True, stable=True).indices[: drafter.top_k]
    found[best] = (scores + pairs)[best]
    return found


def markov_latent(drafter: Checkpoint, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What w2 takes, and the next state."""
    tensors = drafter.tensors
    if drafter.markov == "gated":
        weight, bias = (tensors[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
        return torch.sigmoid(weight @ torch.cat([h, e]) + bias) * e, state
    if drafter.markov == "rnn":
        weight, bias = (tensors[f"markov_head.joint_proj.{name}"] for name in ("weight", "bias"))
        g, c, o = (weight @ torch.cat([state, e, h]) + bias).split(drafter.rank)
        return torch.tanh(o), torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
    return e, state


def chance_of(drafter: Checkpoint, h: Tensor, e: Tensor | None, share: float) -> float:
    """What a confidence head says, else the share of the draft's probability."""
    weight = drafter.tensors.get("confidence_head.proj.weight")
    if weight is None:
        return share
    x = h if e is None or weight.shape[1] == len(h) else torch.cat([h, e])
    return float(torch.sigmoid(weight[0] @ x + drafter.tensors["confidence_head.proj.bias"][0]))
