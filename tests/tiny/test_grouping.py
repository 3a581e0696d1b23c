"""Which sequences share a call of the attention kernel: as few calls as pay for their padding."""

from __future__ import annotations

import pytest
import torch

from speculon.runtimes.torch.kv.store import GATHER_BYTES, PageStore, SpanView
from speculon.runtimes.torch.model.grouping import MaskCache, buckets, pieces
from speculon.runtimes.torch.needs import LayerSpec

CPU = torch.device("cpu")
TOKEN = 1024  # bytes of K and V


def spans(*sizes: tuple[int, int]) -> list[SpanView]:
    """Spans of (rows, context), one after the other in the batch and in the pool."""
    found, row = [], 0
    for i, (rows, context) in enumerate(sizes):
        found.append(SpanView(row, row + rows, slice(i * 4096, i * 4096 + context), context))
        row += rows
    return found


def grouped(*sizes: tuple[int, int], window: int | None = None, token_bytes: int = TOKEN) -> list[list[int]]:
    """The first row of each span, by bucket."""
    return [[span.first for span in bucket] for bucket in buckets(spans(*sizes), window, token_bytes, CPU)]


LIKE, UNLIKE, TWO = ((1, 300), (1, 310), (1, 280)), ((1, 2000), (1, 100), (1, 110)), ((1, 100), (1, 200))


@pytest.mark.parametrize(
    ("sizes", "how", "calls"),
    [
        pytest.param(LIKE, {}, [[0, 1, 2]], id="sequences of like length share a call"),
        pytest.param(UNLIKE, {}, [[1, 2], [0]], id="short ones are not padded to a long one"),
        pytest.param(UNLIKE, {"window": 64}, [[0, 1, 2]], id="a window makes them alike"),
        pytest.param(TWO, {}, [[0, 1]], id="padding of few bytes"),
        pytest.param(TWO, {"token_bytes": 8 * TOKEN}, [[0], [1]], id="padding of many bytes"),
        pytest.param(((5, 300), (1, 300), (4, 304)), {}, [[0, 5, 6]], id="drafts of different length"),
        pytest.param(
            ((64, 64), (1, 60), (64, 64), (1, 64)), {}, [[64, 129], [0], [65]], id="prompt chunks run apart"
        ),
    ],
)
def test_sequences_share_a_call_where_padding_pays(
    sizes: tuple[tuple[int, int], ...], how: dict[str, int], calls: list[list[int]]
) -> None:
    assert grouped(*sizes, **how) == calls


def test_a_prompt_chunk_is_cut_evenly_into_causal_pieces() -> None:
    (span,) = spans((130, 200))
    parts = pieces(span, 64)
    assert [(part.first, part.last, part.context, part.where) for part in parts] == [
        (0, 43, 113, slice(0, 113)),
        (43, 86, 156, slice(0, 156)),
        (86, 130, 200, slice(0, 200)),
    ]
    assert pieces(span, 130) == [span]


def test_what_would_overflow_the_buffer_is_divided() -> None:
    sixteenth = GATHER_BYTES["cpu"] // TOKEN // 16
    assert grouped(*[(1, sixteenth)] * 20) == [list(range(16)), list(range(16, 20))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_is_reused_and_holds_the_pages(dtype: torch.dtype) -> None:
    layer = LayerSpec("attention", 2, 4, 4, dtype)
    store = PageStore((layer, layer), 8, 16, CPU)
    for i, pool in enumerate((*store.k, *store.v)):
        pool.copy_(torch.arange(pool.numel()).view(pool.shape) + 1000 * i)
    seen = set()
    for slots in (torch.tensor([3, 1, 60]), torch.tensor([7, 7])):
        for number in (0, 1):
            k, v = store.gather(number, slots)
            assert torch.equal(k, store.k[number][slots]) and torch.equal(v, store.v[number][slots])
            seen |= {k.data_ptr(), v.data_ptr()}
    assert len(seen) == 2


def test_more_than_the_buffer_is_gathered_too() -> None:
    layer = LayerSpec("attention", 2, 64, 64, torch.float32)
    store = PageStore((layer,), 1, 16, CPU)
    for pool in (*store.k, *store.v):
        pool.normal_()
    slots = torch.arange(GATHER_BYTES["cpu"] // layer.bytes_per_token + 1) % 16
    k, v = store.gather(0, slots)
    assert torch.equal(k, store.k[0][slots]) and torch.equal(v, store.v[0][slots])


def test_a_mask_begins_at_an_aligned_address_where_kernels_need_that() -> None:
    here, elsewhere = (
        MaskCache().slice(2, 9, None, 1, torch.float32, torch.device(x)) for x in ("cpu", "meta")
    )
    assert here.shape == elsewhere.shape and here.storage_offset() and not elsewhere.storage_offset()
