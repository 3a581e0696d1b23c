"""The load check: paged logits of two packed sequences against the logits of the stock model."""

from __future__ import annotations

import torch
from torch import Tensor

from speculon.batch import Batch
from speculon.errors import UnsupportedModel
from speculon.kv.store import PageStore, SpanView
from speculon.models.probe import stock_attention
from speculon.models.target import Target

TOLERANCE = {torch.float32: 1e-4}  # of the largest logit
# in bf16 random models gave 0.01 to 0.12, and 0.20 where an MoE chose another expert at a near-tie; x1.5
LOOSE = 0.3
BLOCK = 4
LENGTHS, FIRST = (11, 6), (8, 5)  # the second forward continues with 3 rows and with 1
TABLES = ([5, 2, 7], [3, 4])  # scattered pages, and consecutive ones

Piece = tuple[Tensor, list[int], int, int]  # a sequence [n], its pages, and the part [start, end) to run


@torch.inference_mode()
def check_logits(target: Target, stock: Tensor) -> float:
    """The largest difference of a logit from `stock_logits`, relative to the largest logit.

    Raises `UnsupportedModel` where it exceeds the tolerance.
    """
    ours = paged_logits(target)
    error = float((ours - stock).abs().max() / stock.abs().max())
    limit = TOLERANCE.get(target.dtype, LOOSE)
    if not error <= limit:  # a NaN is refused too
        raise UnsupportedModel(
            f"{target.name} ({type(target.model).__name__}, {target.dtype}): logits over pages differ from "
            f"the stock model by {error:.2g} of the largest logit, allowed is {limit:.2g}"
        )
    return error


def random_sequences(target: Target) -> list[Tensor]:
    """Two sequences of random tokens: [11] and [6]."""
    generator = torch.Generator().manual_seed(0)
    size = min(target.vocab_size, target.model.get_input_embeddings().weight.shape[0])
    return [torch.randint(size, (n,), generator=generator).to(target.device) for n in LENGTHS]


@torch.inference_mode()
def stock_logits(target: Target) -> Tensor:  # [17, V]
    with stock_attention(target.model):
        outputs = [target.model(input_ids=ids[None], use_cache=False) for ids in random_sequences(target)]
    return torch.cat([output.logits[0].float() for output in outputs])


def paged_logits(target: Target) -> Tensor:  # [17, V]
    store = PageStore(target.layers, 1 + max(map(max, TABLES)), BLOCK, target.device)
    steps = zip(((0, 0), FIRST), (FIRST, LENGTHS), strict=True)
    sequences = random_sequences(target)
    parts = [
        run_pieces(target, store, list(zip(sequences, TABLES, *bounds, strict=True))) for bounds in steps
    ]
    return torch.cat([rows for sequence in zip(*parts, strict=True) for rows in sequence])


def run_pieces(target: Target, store: PageStore, pieces: list[Piece]) -> list[Tensor]:
    """One forward over pieces of sequences; the logits [rows, V] of each."""
    spans: list[SpanView] = []
    row = 0
    for _, table, start, end in pieces:
        spans.append(SpanView(row, row + end - start, store.where(table, end), end))
        row += end - start
    ids = torch.cat([sequence[start:end] for sequence, _, start, end in pieces])
    positions = torch.cat([torch.arange(start, end) for _, _, start, end in pieces]).to(target.device)
    batch = Batch([], ids[None], positions[None], torch.arange(row, device=target.device))
    logits = target.forward(batch, store.view_of(spans)).logits
    return list(logits.split([span.rows for span in spans]))
