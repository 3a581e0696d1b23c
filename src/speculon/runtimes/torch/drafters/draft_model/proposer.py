"""A small language model drafts token by token (Leviathan 2023; Chen 2023)."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.drafters.draft_model.model_drafter import ModelDrafter
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.speculation.proposers.chain import draft_chain
from speculon.speculation.proposers.tree import Node, draft_trees

if TYPE_CHECKING:
    from torch import Tensor

NAME = "draft_model"


class DraftModel(ModelDrafter):
    """One forward per draft position for all sequences of the round."""

    method = NAME

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        rest = self.pages.catch_up(seqs, self.max_rows, self._read)

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            if not drafts[which[0]]:
                return self._next([rest[i] for i in which], [seqs[i].tokens[rest[i][1] :] for i in which])
            ends = [len(seqs[i].tokens) + len(drafts[i]) for i in which]
            ranges = [(seqs[i], end - 1, end) for i, end in zip(which, ends, strict=True)]
            return self._next(ranges, [drafts[i][-1:] for i in which])

        return draft_chain(NAME, seqs, ks, forward, self.min_confidence)

    def propose_trees(self, seqs: list[Sequence], ks: list[int], depths: list[int]) -> list[Draft]:
        """As `Branching` says; the keys and values of the nodes are scratch of this round."""

        def root() -> Tensor:
            rest = self.pages.catch_up(seqs, self.max_rows, self._read)
            return self._next(rest, [seq.tokens[start:] for seq, start, _ in rest])

        def read(nodes: list[Node]) -> Tensor:
            ids = self._as_read([node.token for node in nodes])
            positions = [len(seqs[node.tree].tokens) + node.depth for node in nodes]
            batch = Batch.of([], ids, positions, [*range(len(nodes))], self.model.device)
            return self._logits(batch, self.pages.view_of_nodes([(seqs[n.tree], n.read) for n in nodes]))

        shapes = [*zip(ks, depths, strict=True)]
        return draft_trees(NAME, seqs, shapes, root, read, self.min_confidence)

    def _next(self, ranges: list[TokenRange], ids: list[list[int]]) -> Tensor:
        """Logits [B, V] after each range."""
        ends = [total - 1 for total in accumulate(map(len, ids))]
        return self._forward(ranges, ids, ends)
