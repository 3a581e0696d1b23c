"""The losses of training and its attention as formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from speculon.train.losses import TINY


def kl_reference(logits: Tensor, p: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i KL(p_i || q_i) / sum_i w_i, with q = softmax(logits) [N, V], p [N, V], w [N]."""
    log_q = logits.float().log_softmax(-1)
    kl = (torch.special.xlogy(p.float(), p.float()) - p.float() * log_q).sum(-1)  # [N]
    return (kl * weights).sum() / (weights.sum() + TINY)


def attention_reference(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of step k of the training-time test (Li 2025).

    Row i sees rows j <= i of step 0, and row i of later steps.

    q [B, H, N, D]; keys, values: k + 1 of [B, KV, N, D], of step 0 first -> [B, H, N, D]
    """
    groups, rows = q.shape[1] // keys[0].shape[1], q.shape[2]
    keys = [key.repeat_interleave(groups, 1) for key in keys]
    values = [value.repeat_interleave(groups, 1) for value in values]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
    first = (q @ keys[0].transpose(-1, -2)).masked_fill(~causal, float("-inf"))  # [B, H, N, N]
    own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]  # [B, H, N, 1] each
    p = (torch.cat([first, *own], -1) * q.shape[-1] ** -0.5).float().softmax(-1).to(q.dtype)
    later = [p[..., rows + s, None] * value for s, value in enumerate(values[1:])]
    return torch.stack([p[..., :rows] @ values[0], *later]).sum(0)
