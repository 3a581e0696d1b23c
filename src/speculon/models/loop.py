"""A model's forward as one loop over its fused blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from speculon.batch import Batch
from speculon.kv.store import View
from speculon.models.block import Block, Norm, Tables, tables_of
from speculon.models.linear import Product
from speculon.models.taps import EMBEDDINGS, Taps


@dataclass(slots=True)
class Loop:
    """A forward without the stock model's code: embedding, blocks, norm, head."""

    embed: nn.Module
    rotary: nn.Module
    blocks: list[Block]
    norm: Norm
    head: Product

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        x, tables = self.begin(batch.input_ids, batch.position_ids)
        if taps is not None:
            taps.keep(EMBEDDINGS, x)
        for number, block in enumerate(self.blocks):
            x = block(x, tables, view)
            if taps is not None:
                taps.keep(number, x)
        return self.end(x, batch.score_rows) if batch.score_rows.numel() else None

    def begin(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tables]:
        """The input [T, D] of the first layer, and the rotary tables of all; ids and positions are [1, T]."""
        x = self.embed(input_ids)
        cos, sin = self.rotary(x, position_ids)
        return x[0], tables_of(cos, sin, self.blocks[0].attention.head_dim)

    def end(self, x: Tensor, score_rows: Tensor) -> Tensor:  # [T, D], [R] -> [R, V]
        """Logits of the scored rows of the last layer's output."""
        return self.head(self.norm(x.index_select(0, score_rows)))
