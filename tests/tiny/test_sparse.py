"""Single rows attend by sparse products, equal to an explicit softmax, wherever their pages are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculon.core.types import LayerSpec
from speculon.decoding.kv.store import PageStore, SpanView, View
from speculon.target import grouping
from speculon.target.attention import attend_rows
from speculon.target.grouping import shared_plan
from speculon.target.sparse import QUERIES

HEADS, WIDTH, SLOTS = 6, 8, 256


def store_of(kv_heads: int, window: int | None = None, layers: int = 1) -> PageStore:
    """Pools full of NaN: whatever is read before it is written shows."""
    spec = LayerSpec("attention", kv_heads, WIDTH, WIDTH, torch.float32, window)
    store = PageStore((spec,) * layers, SLOTS // 16, 16, "cpu")
    for pool in (*store.k, *store.v):
        pool.fill_(torch.nan)
    return store


def spans_of(store: PageStore, *sizes: tuple[int, int], scattered: bool = False) -> list[SpanView]:
    """Spans of (rows, context) in consecutive or reversed pages, with everything but the rows written."""
    found, row, page = [], 0, 0
    for rows, context in sizes:
        pages = list(range(page, page + -(-context // 16)))
        where = store.where(pages[::-1] if scattered else pages, context)
        page, found = page + len(pages), [*found, SpanView(row, row + rows, where, context)]
        row += rows
        for pool in (*store.k, *store.v):
            pool[where] = torch.randn(context, *pool.shape[1:])
    return found


def expected(view: View, layer: int, query: Tensor, window: int | None) -> Tensor:
    """A softmax for each row and head, in double."""
    k, v = view.store.k[layer].double(), view.store.v[layer].double()
    out = torch.empty_like(query, dtype=torch.float64)
    for span in view.spans:
        for i in range(span.rows):
            end = span.context - span.rows + i + 1
            begin = 0 if window is None else max(0, end - window)
            for head in range(query.shape[1]):
                kv = head * k.shape[1] // query.shape[1]
                keys, values = (pool[span.where][begin:end, kv] for pool in (k, v))
                row = span.first + i
                out[row, head] = (keys @ query[row, head].double() * 0.25).softmax(0) @ values
    return out


def rows_of(view: View, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values, cut from one tensor as a joined product leaves them."""
    states = torch.randn(view.spans[-1].last, HEADS + 2 * kv_heads, WIDTH)
    return states[:, :HEADS], states[:, HEADS:-kv_heads], states[:, -kv_heads:]


def sparse_calls(view: View, kv_heads: int, query: Tensor) -> list[int]:
    """The spans of each call made by sparse products."""
    return [
        call.spans
        for call in shared_plan(view, 0, HEADS // kv_heads, True, query).calls
        if call.sparse is not None
    ]


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    # `again`: bytes that may be read again, so that rows of a draft are served singly
    ("sizes", "again", "calls"),
    [
        (((1, 30),), grouping.REREAD, [1]),
        (((1, 1),), grouping.REREAD, [1]),
        (((1, 20), (1, 20)), grouping.REREAD, [2]),
        (((1, 30), (1, 17), (1, 1)), grouping.REREAD, [3]),
        (((1, 30), (4, 17), (1, 40)), grouping.REREAD, [6]),
        (((1, 30), (4, 17), (1, 40)), 0, [2]),
        (((3, 30), (2, 2)), grouping.REREAD, [5]),
        (((4, 30),), grouping.REREAD, []),  # nobody is served with it
        (((4, 17), (1, 30)), 0, [1]),  # one alone is read in place
        (((2, 30), (2, 9), (1, 40), (1, 17)), 0, []),  # a call for all, since half of them draft
        (((2, 30), (1, 40), (1, 17)), 0, [2]),
        (((33, 40), (1, 17)), grouping.REREAD, [1]),  # a prompt
        (((150, 170), (1, 17)), grouping.REREAD, [1]),  # in pieces
    ],
)
@torch.inference_mode()
def test_single_rows_see_their_own_keys(
    kv_heads: int,
    window: int | None,
    scattered: bool,
    sizes: tuple[tuple[int, int], ...],
    again: int,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "REREAD", again)
    torch.manual_seed(0)
    store = store_of(kv_heads, window)
    view = store.view_of(spans_of(store, *sizes, scattered=scattered))
    query, key, value = rows_of(view, kv_heads)
    found = attend_rows(view, 0, query, key, value, 0.25)
    assert sparse_calls(view, kv_heads, query) == calls
    torch.testing.assert_close(found.double(), expected(view, 0, query, window), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_no_scores_remain_for_the_next_layer() -> None:
    torch.manual_seed(0)
    store = store_of(3, layers=2)
    view = store.view_of(spans_of(store, (1, 30), (1, 17)))
    query, key, value = rows_of(view, 3)
    attend_rows(view, 0, torch.full_like(query, torch.nan), key, value, 0.25)
    found = attend_rows(view, 1, query, key, value, 0.25)
    torch.testing.assert_close(found.double(), expected(view, 1, query, None), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_slower_sparse_products_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(3)
    view = store.view_of(spans_of(store, (1, 30), (1, 17)))
    query = torch.randn(2, HEADS, QUERIES // 2 + 1)
    assert sparse_calls(view, 3, query) == []
    view.memo.clear()
    assert sparse_calls(view, 3, query[..., :WIDTH].bfloat16()) == []
    view.memo.clear()
    monkeypatch.setattr(grouping, "gather_bytes", lambda device: 20 * HEADS * 8)
    assert sparse_calls(view, 3, query[..., :WIDTH]) == [1]  # the shorter one: the other has too many entries


@pytest.mark.parametrize(("window", "least"), [(None, 17 + 3 * 30), (9, 10 + 3 * 12)])
@torch.inference_mode()
def test_repeated_keys_are_counted_in_bytes(
    window: int | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(3, window)
    view = store.view_of(spans_of(store, (2, 17), (4, 30), (1, 40)))
    query = torch.randn(7, HEADS, WIDTH)
    token = store.layers[0].bytes_per_token
    for more, calls in ((0, [7]), (-1, [])):
        monkeypatch.setattr(grouping, "REREAD", least * token + more)
        view.memo.clear()
        assert sparse_calls(view, 3, query) == calls


@torch.inference_mode()
def test_single_rows_join_drafts_only_where_all_fit_in_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "REREAD", 0)
    store = store_of(3)
    view = store.view_of(spans_of(store, (2, 30), (2, 30), (1, 40), (1, 17)))
    query, token = torch.randn(6, HEADS, WIDTH), store.layers[0].bytes_per_token
    for more, calls in ((0, []), (-1, [2])):
        monkeypatch.setattr(grouping, "gather_bytes", lambda device, more=more: 4 * 40 * token + more)
        view.memo.clear()
        assert sparse_calls(view, 3, query) == calls
