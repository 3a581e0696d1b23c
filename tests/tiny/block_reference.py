"""A block drafter and its losses as formulas: one block at a time, dense attention, loops over drafts.

`tensors` have the names of the published format. The block of anchor position n has rows n to n + S - 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny.eagle_reference import rms, rotate

Tensors = dict[str, Tensor]


def block_states(
    tensors: Tensors, config: dict[str, Any], mask: int, anchor: int, taps: Tensor, embed: Tensor
) -> Tensor:
    """Normed states [S, H] of a block after n positions with taps [n, k * Ht], for the token `anchor`."""
    eps, n, size = config["rms_norm_eps"], len(taps), config["block_size"]
    context = rms(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    z = embed[torch.tensor([anchor] + [mask] * (size - 1))]
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        s = rms(z, tensors[f"{at}input_layernorm.weight"], eps)
        z = z + attend(tensors, config, at, s, torch.cat([context, s]), n)
        x = rms(z, tensors[f"{at}post_attention_layernorm.weight"], eps)
        gate, up, down = (tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        z = z + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return rms(z, tensors["norm.weight"], eps)


def attend(
    tensors: Tensors, config: dict[str, Any], at: str, rows: Tensor, seen: Tensor, first: int
) -> Tensor:
    """Rows at positions `first`, ... attend to everything in `seen`, at positions 0, 1, ..."""
    dim, eps = config["head_dim"], config["rms_norm_eps"]

    def project(name: str, x: Tensor, position: int | None) -> Tensor:
        heads = (x @ tensors[f"{at}self_attn.{name}_proj.weight"].T).view(len(x), -1, dim).transpose(0, 1)
        if position is None:
            return heads
        heads = rms(heads, tensors[f"{at}self_attn.{name}_norm.weight"], eps)
        rope = {"rope_theta": config["rope_theta"]}
        return rotate(heads, torch.arange(position, position + len(x)), rope)

    q, k, v = project("q", rows, first), project("k", seen, 0), project("v", seen, None)
    groups = len(q) // len(k)
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    p = (q @ k.mT / math.sqrt(dim)).softmax(-1)
    return (p @ v).transpose(0, 1).reshape(len(rows), -1) @ tensors[f"{at}self_attn.o_proj.weight"].T


def drafts_of(weights: list[float], anchor: int, count: int) -> list[int]:
    """The drafts of an anchor that are learned: up to the first whose token is not."""
    learned = []
    for k in range(count):
        if weights[anchor + k] <= 0:
            break
        learned.append(k)
    return learned


def flash_loss(
    states: dict[tuple[int, int], Tensor], batch: Any, head: Tensor, gamma: float, soft: bool
) -> Tensor:
    """sum w l / sum w over all drafts; row k of a block drafts token n + k. `states` [S, H] by row and n."""
    total = weight = torch.zeros(())
    for (row, anchor), block in states.items():
        for k in drafts_of(batch.weights[row].tolist(), anchor, len(block) - 1):
            log_q = (head @ block[k + 1]).log_softmax(-1)
            p = batch.p[row, anchor + k]
            each = (p * (p.log() - log_q)).sum() if soft else -log_q[batch.ids[row, anchor + k + 1]]
            w = batch.weights[row, anchor + k] * math.exp(-k / gamma)
            total, weight = total + w * each, weight + w
    return total / weight


def spark_loss(
    states: dict[tuple[int, int], Tensor],
    batch: Any,
    head: Tensor,
    tensors: Tensors,
    gamma: float,
    soft: bool,
    confidence: float,
) -> Tensor:
    """As `flash_loss`, with KL or 0.1 CE + 0.9 TV, + c BCE; row k drafts n + 1 + k after the text's n + k."""
    total = weight = torch.zeros(())
    for (row, anchor), block in states.items():
        state = torch.zeros(tensors["markov_head.markov_w1.weight"].shape[1])
        for k in drafts_of(batch.weights[row].tolist(), anchor, len(block)):
            e = tensors["markov_head.markov_w1.weight"][batch.ids[row, anchor + k]]
            latent, state = markov_latent(tensors, e, block[k], state)
            q = (head @ block[k] + tensors["markov_head.markov_w2.weight"] @ latent).softmax(-1)
            p = batch.p[row, anchor + k]
            distance = (p - q).abs().sum() / 2
            tv = 0.9 * distance - 0.1 * q[batch.ids[row, anchor + k + 1]].log()
            each = (p * (p.log() - q.log())).sum() if soft else tv
            if confidence:
                read, bias = (tensors[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
                sure, accepted = (read @ torch.cat([block[k], e]) + bias).sigmoid(), 1 - distance.detach()
                bce = -(accepted * sure.log() + (1 - accepted) * (1 - sure).log())
                each = each + confidence * bce.squeeze()
            w = batch.weights[row, anchor + k] * math.exp(-k / gamma)
            total, weight = total + w * each, weight + w
    return total / weight


def markov_latent(tensors: Tensors, e: Tensor, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What w2 reads, and the next state, by which tensors there are."""
    at = "markov_head."
    if f"{at}gate_proj.weight" in tensors:
        gate = tensors[f"{at}gate_proj.weight"] @ torch.cat([h, e]) + tensors[f"{at}gate_proj.bias"]
        return gate.sigmoid() * e, state
    if f"{at}joint_proj.weight" in tensors:
        joint = tensors[f"{at}joint_proj.weight"] @ torch.cat([state, e, h]) + tensors[f"{at}joint_proj.bias"]
        g, c, o = joint.chunk(3)
        return o.tanh(), g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
    return e, state
