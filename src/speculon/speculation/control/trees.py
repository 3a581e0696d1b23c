"""What the nodes of a tree bring, by depth and by place among siblings (Chen et al. 2024, Sequoia).

The first child at depth j is accepted with chance c_j, as draft j of a chain is; the m-th one, where no
better sibling was, with chance h_m. A node's value is the chance that its path is accepted, and the sum of
values is the expected number of accepted drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from speculon.core.tree import ROOT, Parents
from speculon.core.types import Draft


class DraftShape(NamedTuple):
    """What drafts may be, in the order in which they are taken."""

    values: Sequence[float]
    depths: Sequence[int] = range(1, 65)  # of the first 1, 2, .. of them
    forks: Sequence[bool] = (False,) * 64  # whether a node begins another branch
    tree: bool = False


def best_tree(chances: Sequence[float], later: Sequence[float], count: int) -> DraftShape:
    """The best nodes that a tree can have, by `chances` c_1.., which is as deep as they are many, and by
    `later` h_2...
    """
    found = list[tuple[float, int, bool]]()
    # minus the value, depth, siblings before it, its parent's value, the chance that none of them is accepted
    heap = [(-chances[0], 0, 0, 1.0, 1.0)]
    while heap and len(found) < count:
        value, depth, rank, above, none = heappop(heap)
        found.append((-value, depth + 1, rank > 0))
        if depth + 1 < len(chances):
            heappush(heap, (value * chances[depth + 1], depth + 1, 0, -value, 1.0))
        if rank < len(later):
            none *= 1 - (later[rank - 1] if rank else chances[depth])
            heappush(heap, (-above * none * later[rank], depth, rank + 1, above, none))
    expected, levels, others = zip(*found, strict=True)
    return DraftShape(expected, [*accumulate(levels, max)], others, tree=True)


def node_values(parents: Parents, chances: Sequence[float], later: Sequence[float]) -> list[float]:
    """Those of the nodes of a draft, whose siblings are in order: the best first."""
    depth, value, siblings, none = {ROOT: -1}, {ROOT: 1.0}, dict.fromkeys([ROOT], 0), {ROOT: 1.0}
    for node, parent in enumerate(parents):
        rank, depth[node] = siblings[parent], depth[parent] + 1
        chance = later[min(rank, len(later)) - 1] if rank else chances[depth[node]]
        value[node] = value[parent] * none[parent] * chance
        none[parent] *= 1 - chance
        siblings[parent], siblings[node], none[node] = rank + 1, 0, 1.0
    return [value[node] for node in range(len(parents))]


def forks(parents: Parents) -> list[bool]:
    """Whether each node begins another branch: its parent has a child before it."""
    return [parent in parents[:node] for node, parent in enumerate(parents)]


def judged_nodes(draft: Draft, tokens: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(depth, place among siblings, whether accepted) of the nodes that were judged by a round's tokens, one
    parent after the other; the siblings of a draft are in order.
    """
    at, parents = ROOT, draft.parents or tuple(range(-1, len(draft.tokens) - 1))
    for depth, token in enumerate(tokens):
        children = [node for node, parent in enumerate(parents) if parent == at]
        for rank, node in enumerate(children):
            yield depth, rank, draft.tokens[node] == token
            if draft.tokens[node] == token:
                at = node
                break
        else:
            return
