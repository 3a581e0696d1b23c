"""A target whose logits of a row are the same, bit for bit, in every batch.

Kernels choose their order of addition by the number of rows. Here products run in pieces, for whose numbers
of rows one order was measured. Attention pads its keys and rows (models/grouping). Both are checked at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculon.core import ceil_div
from speculon.errors import UnsupportedModel
from speculon.kv.store import PageStore
from speculon.models.block import Attention, Gated
from speculon.models.linear import Product
from speculon.models.load_check import Piece, run_pieces
from speculon.models.loop import Loop

if TYPE_CHECKING:
    from speculon.models.target import Target

CANDIDATES = (64, 32, 16, 8)  # most rows of a piece, the largest that holds is taken
PAGE = 16
LENGTH = 150  # tokens of the checked sequence; its keys cross two steps of padding
AT = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 149)  # checked positions
# (rows before the checked one in its span, rows after it, whether another sequence is beside it)
COMPANIES = (
    (0, 0, True),
    (0, 1, False),
    (1, 0, True),
    (0, 8, True),
    (3, 4, False),
    (16, 0, True),
    (40, 3, False),
)


@dataclass(slots=True)
class InPieces:
    """A product in pieces of `fewest` (1 or 2) to `most` rows."""

    product: Product
    fewest: int  # 2 where a lone row takes another kernel
    most: int
    outputs: int  # O

    def __call__(self, x: Tensor) -> Tensor:  # [T, D] -> [T, O]
        rows = len(x)
        if rows < self.fewest:
            return self.product(x.repeat(2, 1))[:rows]
        if rows <= self.most:
            return self.product(x)
        return torch.cat([self.product(part) for part in x.tensor_split(ceil_div(rows, self.most))])


@dataclass(slots=True)
class Pieces:
    """Wraps products; those of one shape take one kernel, so each shape is measured once."""

    dtype: torch.dtype
    device: torch.device
    limits: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # of rows, by [O, D]

    @torch.inference_mode()
    def of(self, product: Product, width: int) -> InPieces:
        """Raises `UnsupportedModel` where no number of rows is equal to fewer."""
        x = torch.randn(CANDIDATES[0], width, generator=torch.Generator().manual_seed(0))
        x = x.to(self.device, self.dtype)
        shape = product(x[:2]).shape[1], width
        if shape not in self.limits:
            self.limits[shape] = equal_rows(product, x)
        fewest, most = self.limits[shape]
        if not most:
            name = f"a product of {shape[0]} x {width}"
            raise UnsupportedModel(f"batch_invariant: {name} differs by its number of rows on this machine")
        return InPieces(product, fewest, most, shape[0])


def equal_rows(product: Product, x: Tensor) -> tuple[int, int]:
    """Fewest and most rows of `x` [64, D] between which the results are equal; most is 0 where none is."""
    found = {rows: product(x[:rows].contiguous()) for rows in range(1, len(x) + 1)}

    def equal(most: int) -> bool:
        return all(torch.equal(found[rows], found[most][:rows]) for rows in range(2, most))

    return 1 if torch.equal(found[1], found[2][:1]) else 2, next(filter(equal, CANDIDATES), 0)


def make_invariant(target: Target) -> None:
    """Wraps the products of its loop, and checks it. Raises `UnsupportedModel` with the reason."""
    loop = target.run
    if reason := obstacle(target):
        raise UnsupportedModel(f"batch_invariant: {target.name}: {reason}")
    assert isinstance(loop, Loop)
    pieces = Pieces(target.dtype, target.device)
    width: int = target.embedding.shape[1]
    for block in loop.blocks:
        wrap_attention(block.attention, width, pieces.of)
        assert isinstance(block.mlp, Gated)
        wrap_mlp(block.mlp, width, pieces.of)
    loop.head = pieces.of(loop.head, width)
    target.batch_invariant = True
    if (at := differing(target)) is not None:
        raise UnsupportedModel(
            f"batch_invariant: {target.name}: logits at position {at} depend on their batch"
        )


def obstacle(target: Target) -> str | None:
    """Why the logits of this target cannot be made invariant; None where it may be tried."""
    if target.device.type != "cpu":
        return f"only on a CPU so far, not on {target.device.type}"
    if target.dtype is not torch.bfloat16:
        return f"only in bfloat16 so far, not in {str(target.dtype).removeprefix('torch.')}"
    if not isinstance(target.run, Loop):
        return f"its layers are not one loop (fused: {target.fusion or 'no'})"
    if any(spec.window is not None for spec in target.layers):
        return "it has sliding windows, whose keys begin at another place in each span"
    for block in target.run.blocks:
        if block.attention.softcap is not None or block.attention.sinks is not None:
            return "its attention has a soft cap or sinks"
        if not isinstance(block.mlp, Gated):
            return "it has experts, whose numbers of rows depend on the batch"
    return None


def wrap_attention(attention: Attention, width: int, of: Callable[[Product, int], InPieces]) -> None:
    attention.qkv = of(attention.qkv, width)
    attention.out = of(attention.out, attention.heads * attention.head_dim)


def wrap_mlp(mlp: Gated, width: int, of: Callable[[Product, int], InPieces]) -> None:
    mlp.gate_up = gate_up = of(mlp.gate_up, width)
    mlp.down = of(mlp.down, gate_up.outputs // 2)


@torch.inference_mode()
def differing(target: Target) -> int | None:
    """The first checked position whose logits differ between two batches."""
    length, pages = min(LENGTH, target.max_context), ceil_div(LENGTH, PAGE)
    generator = torch.Generator().manual_seed(0)
    sequence, other = torch.randint(target.embedding.shape[0], (2, length), generator=generator)
    store = PageStore(target.layers, 2 * pages, PAGE, target.device, batch_invariant=True)
    own, others = list(range(0, 2 * pages, 2)), list(range(1, 2 * pages, 2))  # pages that are not consecutive
    run_pieces(target, store, [(sequence, own, 0, length), (other, others, 0, length)])
    for at in (at for at in AT if at < length):
        alone = run_pieces(target, store, [(sequence, own, at, at + 1)])[0][0]
        for before, after, beside in COMPANIES:
            start, end = max(0, at - before), min(length, at + 1 + after)
            spans: list[Piece] = [(sequence, own, start, end)]
            if beside:
                spans.insert(0, (other, others, max(0, length - 1 - before), length))
            logits = run_pieces(target, store, spans)[-1]
            if not torch.equal(logits[at - start], alone):
                return at
    return None
