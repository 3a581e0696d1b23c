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
    layer_types: tuple[str, ...] = ()  # of each layer, where each type has a rotary table of its own

    def __call__(self, batch: Batch, view: View, taps: Taps | None = None) -> Tensor | None:  # [R, V]
        x = self.embed(batch.input_ids)
        tables = {kind: self.tables(x, batch.position_ids, kind) for kind in {*self.kinds}}
        x = x[0]
        if taps is not None:
            taps.keep(EMBEDDINGS, x)
        for number, (block, kind) in enumerate(zip(self.blocks, self.kinds, strict=True)):
            x = block(x, tables[kind], view)
            if taps is not None:
                taps.keep(number, x)
        return self.end(x, batch.score_rows) if batch.score_rows.numel() else None

    def begin(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tables]:
        """The input [T, D] of the first layer, and its rotary tables; ids and positions are [1, T]."""
        x = self.embed(input_ids)
        return x[0], self.tables(x, position_ids, self.kinds[0])

    @property
    def kinds(self) -> tuple[str | None, ...]:
        """Whose rotary tables each layer takes."""
        return self.layer_types or (None,) * len(self.blocks)

    def tables(self, x: Tensor, position_ids: Tensor, kind: str | None) -> Tables:
        cos, sin = self.rotary(x, position_ids) if kind is None else self.rotary(x, position_ids, kind)
        return tables_of(cos, sin, self.blocks[0].attention.head_dim)

    def end(self, x: Tensor, score_rows: Tensor) -> Tensor:  # [T, D], [R] -> [R, V]
        """Logits of the scored rows of the last layer's output."""
        return self.head(self.norm(x.index_select(0, score_rows)))
