"""One sequence after another, decoded plainly: no batch, no draft, no prefix cache, no counter, no policy."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from speculon.core.config import EngineConfig
from speculon.core.types import Verdict, joint_reach
from speculon.decoding.batch import Batch
from speculon.decoding.kv.blocks import BlockPool
from speculon.decoding.kv.lease import Lease, Leases
from speculon.decoding.kv.slots import StateSlots
from speculon.decoding.kv.store import PageStore
from speculon.decoding.sequence import Sequence, Span
from speculon.decoding.verify import cut, verify
from speculon.loading.memory.budget import REPLAY_ROWS, replay_pages

if TYPE_CHECKING:
    from speculon.target.target import Target


class Step(NamedTuple):
    """One forward, before its verdict is committed."""

    span: Span
    logits: Tensor  # [R, V]
    verdict: Verdict


class Lane:
    """Decodes one sequence at a time in the pages of a pool that nobody else uses meanwhile."""

    def __init__(self, target: Target, pool: BlockPool, leases: Leases, rows: int):
        self.pool, self._target, self._leases, self._rows = pool, target, leases, rows

    @classmethod
    def with_own_pages(cls, target: Target, config: EngineConfig, max_context: int) -> Lane:
        """Pages and states that no request ever has, for one sequence of `monitor_max_tokens`."""
        rows, reach = min(REPLAY_ROWS, config.max_batch_tokens), joint_reach(target.layers)
        pages = replay_pages(config, max_context, target.layers)
        slots = StateSlots(int(target.recurrent), 0, rows, target.by_row)
        pool = BlockPool(pages, config.block_size, False, slots, target.prompts_apart, reach)
        store = PageStore(target.layers, pages, config.block_size, target.device)
        return cls(target, pool, Leases(pool, store, 0, target.states(slots.count)), rows)

    def run(self, seq: Sequence) -> Generator[Step, None, None]:
        """One forward after another until the sequence ends; a verdict is committed when the next is due.

        Closing the generator gives the pages back.
        """
        self.pool.attach(seq)
        verdict = Verdict(())
        try:
            while verdict.finish is None:
                span = Span(seq, seq.committed, self.pool.chunk(seq, self._rows))
                with self._leases.reserve([span]) as lease:
                    logits = self._ask_target(span, lease)
                    verdict = span.verdict
                    yield Step(span, logits, verdict)
                    commit(lease)
                if seq.grammar is not None:
                    seq.grammar.consume(verdict.tokens)
        finally:
            self.pool.release(seq)

    @torch.inference_mode()
    def _ask_target(self, span: Span, lease: Lease) -> Tensor:
        batch = Batch.pack([span], self._target.device)
        logits = self._target.forward(batch, lease.view(batch)).logits
        verify(batch, logits)
        cut([span])
        return logits


@torch.inference_mode()
def commit(lease: Lease) -> None:
    lease.commit()
