"""Attention over pages: the function that every architecture of transformers calls instead of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.kv.states import StateStep
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.grouping import shared_plan

NAME = "speculon"
# Many stock attentions drop keyword arguments, so the view is no argument. Each thread has its own.
_running_view: ContextVar[View] = ContextVar("speculon_running_view")


@contextmanager
def running(view: View) -> Iterator[None]:
    """Within the context, attention of this thread reads and writes the pages of `view`."""
    token = _running_view.set(view)
    try:
        yield
    finally:
        _running_view.reset(token)


def running_view() -> View:
    """The view of the running step. Raises `LookupError` outside of one."""
    return _running_view.get()


def running_states() -> StateStep | None:
    """The recurrent states of the running step; None outside of one, and where it has none."""
    view = _running_view.get(None)
    return None if view is None else view.states


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, Dk]
    key: Tensor,  # [1, Hkv, T, Dk]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H] attention sinks
    **_: object,  # checked once, by `runtimes/torch/loading/probe.py`
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers."""
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} builds an attention mask of its own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return attend_rows(running_view(), layer, query, key, value, scaling, softcap, s_aux)[None], None


def attend_rows(
    view: View,
    layer: int,
    query: Tensor,  # [T, H, Dk]
    key: Tensor,  # [T, Hkv, Dk]
    value: Tensor,  # [T, Hkv, Dv]
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [T, H, Dv]
    """Writes K and V of all T rows into the pages, then lets each span attend to its own sequence."""
    view.write(layer, key, value)
    return attend_written(view, layer, query, scaling, softcap, sinks)


def attend_written(
    view: View,
    layer: int,
    query: Tensor,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # [T, H, Dv]
    """The same once the keys and values of all rows are in the pages."""
    plain = softcap is None and sinks is None
    group = query.shape[1] // view.spec(layer).heads
    plan = shared_plan(view, layer, group, plain, query)
    outs = []
    for call in plan.calls:
        q = query[call.rows] if isinstance(call.rows, slice) else query.index_select(0, call.rows)
        # q: [B * n, H, Dk]
        k, v = view.take(layer, call.where, call.spans)  # [B, Hkv, S, D]
        if not call.folded:
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k, v, attn_mask=call.mask, scale=scaling, enable_gqa=group > 1
            )
            outs.append(out[0].transpose(0, 1))
            continue
        folded = fold(q, call.spans, group)
        if call.copies > 1:
            folded = torch.cat([folded] * call.copies, 2)
        if plain:
            out = F.scaled_dot_product_attention(folded, k, v, attn_mask=call.mask, scale=scaling)
        else:
            out = eager_attention(folded, k, v, call.mask, group, scaling, softcap, sinks)
        outs.append(unfold(out if call.copies == 1 else out[:, :, : call.n * group], group))
    rows = outs[0] if len(outs) == 1 else torch.cat(outs)
    return rows if plan.order is None else rows.index_select(0, plan.order)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: int,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax in fp32 with a soft cap on the scores or attention sinks, which no kernel supports."""
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    # [B, Hkv, n * g, S]; scaled first: fp16 ends at 65504
    scores = ((q * scale) @ k.transpose(-1, -2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(2, (-1, group))  # [B, Hkv, n, g, S]
    if mask is not None:
        scores = scores + mask.unsqueeze(-2)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, group, 1).expand(*scores.shape[:-1], 1)  # [B, Hkv, n, g, 1]
        scores = torch.cat([scores, sink], -1)
    p = scores.softmax(-1)
    if sinks is not None:
        p = p[..., :-1]
    return p.flatten(2, 3).to(v.dtype) @ v  # [B, Hkv, n * g, Dv]


def fold(q: Tensor, spans: int, group: int) -> Tensor:
    """[B * n, H, D] -> [B, Hkv, n * g, D]: row i of head (h, j) becomes row i * g + j of key-value head h."""
    rows, heads, width = q.shape
    if rows == spans:  # n = 1
        return q.reshape(spans, heads // group, group, width)
    return q.reshape(spans, -1, heads // group, group, width).transpose(1, 2).flatten(2, 3)


def unfold(out: Tensor, group: int) -> Tensor:
    """[B, Hkv, n * g, D] -> [B * n, H, D]."""
    spans, kv_heads, rows, width = out.shape
    if rows == group:  # n = 1
        return out.reshape(spans, kv_heads * group, width)
    return out.view(spans, kv_heads, -1, group, width).transpose(1, 2).reshape(-1, kv_heads * group, width)
