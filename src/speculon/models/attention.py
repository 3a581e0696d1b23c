"""Attention over pages: the one function every architecture of transformers calls in place of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.errors import UnsupportedModel
from speculon.kv.store import SpanView, View, Where

NAME = "speculon"
FOLD_ROWS = 32  # guess: up to here the head group is folded into the query rows, beyond it SDPA repeats K and V itself

Call = tuple[int, int, Where, Tensor | None]  # first row, rows, slots of the keys, additive mask


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, Dk]
    key: Tensor,  # [1, Hkv, T, Dk]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    view: View,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] attention sinks
    **_: object,  # looked at once, by models/probe
) -> tuple[Tensor, None]:
    """Writes K and V of all T rows into the pages, then lets each span attend to its own sequence."""
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} builds an attention mask of its own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    view.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    spec = view.store.layers[layer]
    group = query.shape[1] // spec.heads
    plain = softcap is None and s_aux is None
    calls = span_calls(view, spec.window, group if plain else 1, query)
    outs = []
    for first, rows, where, mask in calls:
        k, v = view.take(layer, where)  # [S, Hkv, D]
        q = query[:, :, first : first + rows]  # [1, H, n, Dk]
        if plain:
            outs.append(sdpa(q, k, v, mask, group, scaling))
        else:
            outs.append(by_hand(q, k, v, mask, group, scaling, softcap, s_aux))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)  # [1, T, H, Dv]
    return out, None


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, group: int, scaling: float | None) -> Tensor:
    """The library's kernel. Folding the head group into the rows keeps K and V unrepeated."""
    _, heads, n, _ = q.shape
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, Hkv, S, D]
    if n > FOLD_ROWS:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=group > 1).transpose(1, 2)
    kv_heads = heads // group
    q = q.reshape(1, kv_heads, group, -1) if n == 1 else fold(q, kv_heads, group)  # [1, Hkv, n * g, D]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return unfold(out, n, group)


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: int,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax in fp32 with what no kernel takes: a soft cap on the scores, a sink that drains probability."""
    _, heads, n, width = q.shape
    scale = width**-0.5 if scaling is None else scaling
    q = fold(q, heads // group, group)[0]  # [Hkv, n * g, Dk]
    scores = (q @ k.permute(1, 2, 0)).float() * scale  # [Hkv, n * g, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(-1, n, group, scores.shape[-1])
    if mask is not None:
        scores = scores + mask[:, None]
    if sinks is not None:
        drain = sinks.float().view(-1, 1, group, 1).expand(-1, n, -1, -1)  # [Hkv, n, g, 1]
        scores = torch.cat([scores, drain], -1)
    p = scores.softmax(-1)
    if sinks is not None:
        p = p[..., :-1]
    out = p.flatten(1, 2).to(v.dtype) @ v.transpose(0, 1)  # [Hkv, n * g, Dv]
    return unfold(out[None], n, group)


def fold(q: Tensor, kv_heads: int, group: int) -> Tensor:
    """[1, H, n, D] -> [1, Hkv, n * g, D]: row i of head (h, j) becomes row i * g + j of key-value head h."""
    n, width = q.shape[2:]
    return q.reshape(1, kv_heads, group, n, width).transpose(2, 3).reshape(1, kv_heads, n * group, width)


def unfold(out: Tensor, n: int, group: int) -> Tensor:
    """[1, Hkv, n * g, D] -> [1, n, H, D]."""
    _, kv_heads, _, width = out.shape
    return out.view(1, kv_heads, n, group, width).transpose(1, 2).reshape(1, n, kv_heads * group, width)


def span_calls(view: View, window: int | None, group: int, query: Tensor) -> list[Call]:
    """What each span reads and under which mask; made once per forward for all layers of one window."""
    memo_key = (window, group)
    calls = view.memo.get(memo_key)
    if calls is None:
        calls = view.memo[memo_key] = [span_call(span, window, group, query.dtype, query.device) for span in view.spans]
    return calls


def span_call(span: SpanView, window: int | None, group: int, dtype: torch.dtype, device: torch.device) -> Call:
    n = span.rows
    length = span.context if window is None else min(span.context, window + n - 1)
    where = span.where if length == span.context else span.tail(length)
    if n == 1:
        return span.first, n, where, None
    return span.first, n, where, MASKS.slice(n, length, window, group if n <= FOLD_ROWS else 1, dtype, device)


class MaskCache:
    """Banded base masks, grown by doubling: every span's mask is a slice of one of them."""

    def __init__(self) -> None:
        self.bases: dict[tuple[int | None, int, torch.dtype, torch.device], tuple[Tensor, int, int]] = {}

    def slice(
        self, n: int, length: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:  # [n * g, length]
        """Additive mask of the last n positions: row i * g + j sees keys in (length - n + i - window, length - n + i]."""
        key = (window, group, dtype, device)
        base, rows, before = self.bases.get(key, (None, 0, 0))
        if base is None or n > rows or length - n > before:
            rows = max(rows, power_of_two(n))
            before = max(before, power_of_two(length - n)) if window is None else window - 1
            base = banded(rows, before, window, group, dtype, device)
            self.bases[key] = base, rows, before
        return base[: n * group, before - (length - n) : before + n]


def banded(rows: int, before: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where row i sees column c (before + i - window < c <= before + i), minus infinity elsewhere."""
    reach = (before + torch.arange(rows, device=device)).repeat_interleave(group)[:, None]  # [rows * g, 1]
    column = torch.arange(before + rows, device=device)[None]
    hidden = column > reach
    if window is not None:
        hidden |= column <= reach - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


MASKS = MaskCache()
