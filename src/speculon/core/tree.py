"""Drafts as trees (Miao et al. 2024, SpecInfer): integers alone.

Node i of a tree with K nodes has the draft token d_i. Its parent is an earlier node, or ROOT: the last token
of the sequence. No two children of a parent have the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

ROOT = -1
Parents = tuple[int, ...]  # of each node


def or_chain(parents: Sequence[int]) -> Parents | None:
    """The same, or None where each node follows the one before it: then it is no tree but a chain."""
    return None if all(parent == i - 1 for i, parent in enumerate(parents)) else tuple(parents)


def depths(parents: Parents) -> list[int]:
    """Tokens between the root and each node.

    >>> depths((-1, 0, 0, -1))
    [0, 1, 1, 0]
    """
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def path(parents: Parents, node: int) -> list[int]:
    """The nodes from a child of the root to this one, which is the last.

    >>> path((-1, 0, 0, -1), 2)
    [0, 2]
    """
    nodes: list[int] = []
    while node != ROOT:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def preorder(parents: Parents) -> list[int]:
    """The nodes, each before its children and these before its next sibling.

    >>> preorder((-1, -1, 0, 1))
    [0, 2, 1, 3]
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, open_nodes = list[int](), children.get(ROOT, [])[::-1]
    while open_nodes:
        order.append(node := open_nodes.pop())
        open_nodes += children.get(node, [])[::-1]
    return order


def branches(parents: Parents) -> list[tuple[list[int], int, int]]:
    """Of a tree in preorder: (ancestors, begin, end) of nodes that follow each other, one branch after the
    other.

    >>> branches((-1, 0, 0, -1))
    [([], 0, 2), ([0], 2, 3), ([], 3, 4)]
    """
    begins = [node for node, parent in enumerate(parents) if not node or parent != node - 1]
    return [(path(parents, parents[begin]), begin, end) for begin, end in pairwise([*begins, len(parents)])]


def descend(parents: Parents, tokens: Sequence[int], samples: Sequence[int]) -> list[int]:
    """The accepted path: from the root on, to the child that equals the target's own sample after its parent.

    `samples[i + 1]` is that after node i, `samples[0]` after the root.

    >>> descend((-1, 0, 0, -1), [5, 6, 7, 8], [5, 7, 9, 9, 9])
    [0, 2]
    """
    accepted, at = list[int](), ROOT
    for node, parent in enumerate(parents):
        if parent == at and tokens[node] == samples[at + 1]:
            accepted.append(node)
            at = node
    return accepted
