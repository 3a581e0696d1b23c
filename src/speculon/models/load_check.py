"""The proof at load: two sequences packed into one row, one continued from its pages, against the stock
model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculon.batch import Batch
from speculon.errors import UnsupportedModel
from speculon.kv.store import PageStore, SpanView
from speculon.models.probe import stock_attention
from speculon.models.target import Target

TOLERANCE = {torch.float32: 1e-4}  # of the largest logit
# bf16: random models gave 0.01 to 0.12, and 0.20 where an MoE chose another expert at a near-tie; x1.5
LOOSE = 0.3
BLOCK = 4
LENGTHS, FIRST = (11, 6), (8, 5)  # the second forward continues with 3 rows and with 1
TABLES = ([5, 2, 7], [3, 4])  # scattered pages, and consecutive ones

Piece = tuple[Tensor, list[int], int, int]  # a text [n], its pages, and the part [start, end) to run


@torch.inference_mode()
def check_logits(target: Target, stock: Tensor) -> float:
    """The largest difference of a logit, relative to the largest logit; too large a one is refused.

    `stock` is what `stock_logits` gave before anything was fused.
    """
    ours = paged_logits(target)
    error = float((ours - stock).abs().max() / stock.abs().max())
    limit = TOLERANCE.get(target.dtype, LOOSE)
    if not error <= limit:  # a NaN is refused too
        raise UnsupportedModel(
            f"{target.name} ({type(target.model).__name__}, {target.dtype}): logits over pages differ from the stock model by "
            f"{error:.2g} of the largest logit, allowed is {limit:.2g}"
        )
    return error


def texts(target: Target) -> list[Tensor]:
    """Two random texts: [11] and [6]."""
    generator = torch.Generator().manual_seed(0)
    size = min(target.vocab_size, target.model.get_input_embeddings().weight.shape[0])
    return [torch.randint(size, (n,), generator=generator).to(target.device) for n in LENGTHS]


@torch.inference_mode()
def stock_logits(target: Target) -> Tensor:  # [17, V]
    with stock_attention(target.model):
        return torch.cat(
            [target.model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts(target)]
        )


def paged_logits(target: Target) -> Tensor:  # [17, V]
    store = PageStore(target.layers, 1 + max(map(max, TABLES)), BLOCK, target.device)
    steps = zip(((0, 0), FIRST), (FIRST, LENGTHS), strict=True)
    parts = [
        run_pieces(target, store, list(zip(texts(target), TABLES, *bounds, strict=True))) for bounds in steps
    ]
    return torch.cat([rows for sequence in zip(*parts, strict=True) for rows in sequence])


# one [rows, V] per piece
def run_pieces(target: Target, store: PageStore, pieces: list[Piece]) -> list[Tensor]:
    """One forward over pieces of texts, every row scored."""
    spans: list[SpanView] = []
    row = 0
    for _, table, start, end in pieces:
        spans.append(SpanView(row, row + end - start, store.where(table, end), end))
        row += end - start
    ids = torch.cat([text[start:end] for text, _, start, end in pieces])
    positions = torch.cat([torch.arange(start, end) for _, _, start, end in pieces]).to(target.device)
    batch = Batch([], ids[None], positions[None], torch.arange(row, device=target.device))
    logits = target.forward(batch, store.view_of(spans)).logits
    return list(logits.split([span.rows for span in spans]))
