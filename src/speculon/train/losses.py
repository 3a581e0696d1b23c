"""The loss of drafters, and the attention of the training-time test, with explicit gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KL_ROWS = 128  # at once on a CPU, whose caches hold their logits
TINY = 1e-5  # added to a sum of weights, so that rows of weight 0 have no loss


def kl(hidden: Tensor, head: Tensor, p: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i KL(p_i || q_i) / sum_i w_i, with q = softmax(hidden [N, D] @ head [V, D].T).

    The entropy of p [N, V] is [N]; products are in p's dtype.
    """
    return HeadKL.apply(hidden, head, p, entropy, weights)


class HeadKL(torch.autograd.Function):
    """Both products of the backward pass run in the forward pass, since d KL / d logits = (q - p) w.

    So no [N, V] tensor is kept for the backward pass. On a CPU logits are made for KL_ROWS rows at once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, p: Tensor, entropy: Tensor, weights: Tensor
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(p.dtype), head.to(p.dtype)
            share = weights / (weights.sum() + TINY)  # [N]
            total, slope = share.new_zeros(()), torch.empty_like(p)
            rows = KL_ROWS if h.device.type == "cpu" else max(1, len(h))
            for first in range(0, len(h), rows):
                part = slice(first, first + rows)
                logits = (h[part] @ w.T).float()  # [n, V]
                q = logits.softmax(-1)
                # where q is largest, log q = logit - log_total
                log_total = logits.amax(-1) - q.amax(-1).log()
                cross = log_total - logits.mul_(p[part]).sum(-1)  # -sum p log q, since sum p = 1
                total += ((cross - entropy[part]) * share[part]).sum()
                slope[part] = q.sub_(p[part]).mul_(share[part, None])
            for_head = (slope.T @ h).to(head.dtype) if ctx.needs_input_grad[1] else None  # None: frozen
            ctx.save_for_backward((slope @ w).to(hidden.dtype), for_head)
            return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for_hidden, for_head = ctx.saved_tensors
        by_head = None if for_head is None else gradients[0] * for_head
        return gradients[0] * for_hidden, by_head, None, None, None


def attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of step k of the training-time test (Li 2025), by blocks of queries.

    Row i sees rows j <= i of step 0, and row i of later steps.

    q [B, H, N, D]; keys, values: k + 1 of [B, KV, N, D], of step 0 first -> [B, H, N, D]
    """
    return TrainedAttention.apply(q, len(keys), *keys, *values)


class TrainedAttention(torch.autograd.Function):
    BLOCK = 128

    @staticmethod
    def forward(ctx: Any, q: Tensor, steps: int, *both: Tensor) -> Tensor:
        (batch, heads, rows, dim), kv = q.shape, both[0].shape[1]
        q = q.reshape(batch, kv, heads // kv, rows, dim)
        (key, *own_keys), (value, *own_values) = both[:steps], both[steps:]
        out, shares = torch.empty_like(q), []
        for start in range(0, rows, TrainedAttention.BLOCK):
            stop = min(start + TrainedAttention.BLOCK, rows)
            part = q[:, :, :, start:stop].reshape(batch, kv, -1, dim)  # [B, KV, G * n, D]
            scores = (part @ key[:, :, :stop].transpose(-1, -2)).float()
            scores = scores.view(batch, kv, -1, stop - start, stop)
            scores[..., start:] += torch.full((stop - start,) * 2, float("-inf"), device=q.device).triu(1)
            own = [
                (q[:, :, :, start:stop] * k[:, :, None, start:stop]).sum(-1, keepdim=True).float()
                for k in own_keys
            ]
            # [B, KV, G, n, stop + s]
            p = torch.cat([scores, *own], -1).mul_(dim**-0.5).softmax(-1).to(q.dtype)
            mixed = p[..., :stop].reshape(batch, kv, -1, stop) @ value[:, :, :stop]
            mixed = mixed.view(batch, kv, -1, stop - start, dim)
            for s, v in enumerate(own_values):
                mixed += p[..., stop + s, None] * v[:, :, None, start:stop]
            out[:, :, :, start:stop] = mixed
            shares.append(p)
        ctx.save_for_backward(q, out, *both, *shares)
        ctx.steps = steps
        return out.view(batch, heads, rows, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, out, *rest = ctx.saved_tensors
        batch, kv, groups, rows, dim = q.shape
        both, shares = rest[: 2 * ctx.steps], rest[2 * ctx.steps :]
        (key, *own_keys), (value, *own_values) = both[: ctx.steps], both[ctx.steps :]
        gradient = gradients[0].reshape(q.shape)
        inner = (gradient * out).sum(-1, keepdim=True).float()  # [B, KV, G, N, 1]
        for_q, sums = torch.empty_like(q), [torch.zeros_like(t, dtype=torch.float32) for t in both]
        for number, p in enumerate(shares):
            start = number * TrainedAttention.BLOCK
            stop = min(start + TrainedAttention.BLOCK, rows)
            block = slice(start, stop)
            part, grad = (t[:, :, :, block].reshape(batch, kv, -1, dim) for t in (q, gradient))
            seen = p[..., :stop]
            slope = (grad @ value[:, :, :stop].transpose(-1, -2)).float()
            slope = slope.view(batch, kv, groups, stop - start, stop)
            slope = slope.sub_(inner[:, :, :, block]).mul_(seen) * dim**-0.5
            slope = slope.to(q.dtype).view(batch, kv, -1, stop)
            moved = (slope @ key[:, :, :stop]).view(batch, kv, groups, stop - start, dim).float()
            sums[0][:, :, :stop] += slope.transpose(-1, -2) @ part
            sums[ctx.steps][:, :, :stop] += seen.reshape(batch, kv, -1, stop).transpose(-1, -2) @ grad
            for s, (k, v) in enumerate(zip(own_keys, own_values, strict=True)):
                k, v, own = k[:, :, None, block], v[:, :, None, block], p[..., stop + s, None].float()
                rise = (gradient[:, :, :, block] * v).sum(-1, keepdim=True) - inner[:, :, :, block]
                rise = own * rise * dim**-0.5
                moved += rise * k
                sums[1 + s][:, :, block] = (rise * q[:, :, :, block]).sum(2)
                sums[ctx.steps + 1 + s][:, :, block] = (own * gradient[:, :, :, block]).sum(2)
            for_q[:, :, :, block] = moved
        return for_q.view(batch, -1, rows, dim), None, *(total.to(q.dtype) for total in sums)
