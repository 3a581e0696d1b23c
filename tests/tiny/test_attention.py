"""Rows attend to the keys of their own sequence alone, wherever its pages are, as in an explicit softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.model.attention import attend_rows
from speculon.runtimes.torch.needs import LayerSpec

HEADS, WIDTH, SLOTS = 6, 8, 256
SCALING = 0.25
TOLERANCE = 1e-5  # of averages of numbers around 1 in fp32; one key more or less changes them by 1e-2


def store_of(kv_heads: int, window: int | None) -> PageStore:
    """Pools full of NaN: whatever is read before it is written shows."""
    spec = LayerSpec("attention", kv_heads, WIDTH, WIDTH, torch.float32, window)
    store = PageStore((spec,), SLOTS // 16, 16, "cpu")
    for pool in (*store.k, *store.v):
        pool.fill_(torch.nan)
    return store


def spans_of(store: PageStore, *sizes: tuple[int, int], scattered: bool) -> list[SpanView]:
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


def expected(view: View, query: Tensor, window: int | None, late: int = 0) -> Tensor:
    """A softmax for each row and head, in double; without the last `late` keys of each row."""
    k, v = view.store.k[0].double(), view.store.v[0].double()
    out = torch.empty_like(query, dtype=torch.float64)
    for span in view.spans:
        for i in range(span.rows):
            end = max(1, span.context - span.rows + i + 1 - late)
            begin = 0 if window is None else max(0, end - window)
            for head in range(query.shape[1]):
                kv = head * k.shape[1] // query.shape[1]
                keys, values = (pool[span.where][begin:end, kv] for pool in (k, v))
                row = span.first + i
                out[row, head] = (keys @ query[row, head].double() * SCALING).softmax(0) @ values
    return out


SIZES = {
    "one row": ((1, 30),),
    "one key": ((1, 1),),
    "rows of one length": ((1, 20), (1, 20)),
    "rows of three lengths": ((1, 30), (1, 17), (1, 1)),
    "a draft among single rows": ((1, 30), (4, 17), (1, 40)),
    "drafts of two lengths": ((3, 30), (2, 2)),
    "a prompt and a row": ((33, 40), (1, 17)),
    "a prompt in pieces": ((150, 170), (1, 17)),
}


def attended(kv_heads: int, window: int | None, scattered: bool, sizes: str) -> tuple[View, Tensor, Tensor]:
    """(view, queries, outputs) of random rows, cut from one tensor as a joined product leaves them."""
    torch.manual_seed(0)
    store = store_of(kv_heads, window)
    view = store.view_of(spans_of(store, *SIZES[sizes], scattered=scattered))
    states = torch.randn(view.spans[-1].last, HEADS + 2 * kv_heads, WIDTH)
    query, key, value = states[:, :HEADS], states[:, HEADS:-kv_heads], states[:, -kv_heads:]
    return view, query, attend_rows(view, 0, query, key, value, SCALING)


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_rows_see_their_own_keys(kv_heads: int, window: int | None, scattered: bool, sizes: str) -> None:
    view, query, found = attended(kv_heads, window, scattered, sizes)
    torch.testing.assert_close(found.double(), expected(view, query, window), rtol=0, atol=TOLERANCE)


@torch.inference_mode()
def test_a_key_that_is_left_out_would_be_seen() -> None:
    view, query, found = attended(3, None, True, "a draft among single rows")
    assert float((found.double() - expected(view, query, None, late=1)).abs().max()) > 100 * TOLERANCE
