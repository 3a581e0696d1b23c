"""Drafting a tree with a model, level by level, best nodes first (Li et al. 2024, EAGLE-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING

from speculon.core.tree import ROOT, or_chain
from speculon.core.types import Draft, Stop, ceil_div
from speculon.decoding.sampling import NEVER, ScoredRow, perturbed, weigh
from speculon.decoding.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 8  # children of a node at most: the ninth is accepted in less than 1 % of the rounds


@dataclass(slots=True, eq=False)
class Node:
    """A draft of a tree that grows; `read` are the places, in the order of reading, of it and its ancestors
    among the nodes of its tree that the drafter has read.
    """

    tree: int  # index of its sequence
    token: int
    value: float  # log of the share of its path, of perturbed logits
    share: float  # of it alone, as the drafter has it
    parent: Node | None
    depth: int
    read: tuple[int, ...] = ()

    @property
    def prefix(self) -> tuple[int, ...]:
        """The drafts up to it."""
        return (*self.parent.prefix, self.token) if self.parent else (self.token,)


@dataclass(slots=True)
class Growing:
    """The tree of one sequence: at most `k` nodes, the best of all that were found, `depth` in a row."""

    k: int
    depth: int
    nodes: list[Node] = field(default_factory=list)
    num_read: int = 0

    def take(self, found: list[Node], min_share: float) -> list[Node]:
        """Keeps the best nodes; returns those of the new ones that are to be read, for their children: each
        level has an even part of the places, as many as K.
        """
        self.nodes = nlargest(self.k, [*self.nodes, *found], key=lambda node: (node.value, -node.depth))
        new = {id(node) for node in found if node.share >= min_share and node.depth + 1 < self.depth}
        inner = [node for node in self.nodes if id(node) in new]
        levels = self.depth - 1 - inner[0].depth if inner else 1
        for node in (inner := inner[: ceil_div(self.k - self.num_read, levels)]):
            node.read = (*(node.parent.read if node.parent else ()), self.num_read)
            self.num_read += 1
        return inner

    def draft(self, method: str, short: Stop | None) -> Draft:
        """The best node first; its parent is always better. `short`: why there are fewer than K."""
        at = {id(node): place for place, node in enumerate(self.nodes)}
        parents = [at[id(node.parent)] if node.parent else ROOT for node in self.nodes]
        return Draft(
            tuple(node.token for node in self.nodes),
            (method,) * len(self.nodes),
            confidence=tuple(node.share for node in self.nodes),
            stop=Stop.LIMIT if len(self.nodes) == self.k else short,
            parents=or_chain(parents),
        )


def draft_trees(
    method: str,
    seqs: list[Sequence],
    shapes: list[tuple[int, int]],  # of each tree: nodes, and how many in a row
    root: Callable[[], Tensor],  # logits after the sequences [B, V]
    read: Callable[[list[Node]], Tensor],  # and after some nodes [N, V]
    min_confidence: float,
) -> list[Draft]:
    """A tree for each sequence: of the nodes that the drafter gives the largest share, as many as budgeted.

    A level is one call for all sequences. Shares are those of logits that are perturbed by the target's own
    noise, as its sample is: what is likely to equal that sample comes first.
    """
    trees = [Growing(k, depth) for k, depth in shapes]
    found = children([(i, None) for i in range(len(seqs))], root(), seqs, trees)
    while level := [
        node for i, tree in enumerate(trees) for node in tree.take(found.get(i, []), min_confidence)
    ]:
        found = children([(node.tree, node) for node in level], read(level), seqs, trees)
    return [tree.draft(method, Stop.CONFIDENCE if min_confidence else None) for tree in trees]


def children(
    parents: list[tuple[int, Node | None]], logits: Tensor, seqs: list[Sequence], trees: list[Growing]
) -> dict[int, list[Node]]:
    """The likeliest tokens after each parent, by tree, from logits [N, V]."""
    rows = [ScoredRow(seqs[i], seqs[i].request.rules, node.prefix if node else ()) for i, node in parents]
    shares = perturbed(weigh(logits, rows), rows).log_softmax(-1).clamp_(max=0)
    width = min(WIDTH, max(tree.k for tree in trees), logits.shape[-1])
    values, tokens = shares.topk(width, -1)
    own = (logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)).exp()
    found: dict[int, list[Node]] = {}
    for (i, node), *columns in zip(parents, values.tolist(), own.tolist(), tokens.tolist(), strict=True):
        before, depth = (node.value, node.depth + 1) if node else (0.0, 0)
        found.setdefault(i, []).extend(
            Node(i, token, before + value, share, node, depth)
            for value, share, token in zip(*columns, strict=True)
            if value > NEVER
        )
    return found
