"""Drafts as trees: integers alone."""

from __future__ import annotations

import doctest
import itertools
import random

import pytest

from speculon.core import tree
from speculon.core.tree import ROOT, branches, depths, descend, or_chain, path
from speculon.core.types import Draft
from speculon.speculation.control.trees import best_tree, judged_nodes, node_values

SHAPES = [(-1,), (-1, -1), (-1, 0, -1), (-1, -1, 0, 1, 0), (-1, 0, 1, 2), (-1, -1, -1, 1, 3, 3)]


def random_tree(nodes: int, chance: random.Random) -> tree.Parents:
    return tuple(chance.randrange(-1, node) for node in range(nodes))


def draft_of(parents: tree.Parents) -> Draft:
    tokens = tuple(range(10, 10 + len(parents)))
    return Draft(tokens, ("x",) * len(tokens), confidence=tuple(t / 100 for t in tokens), parents=parents)


def test_the_examples() -> None:
    assert doctest.testmod(tree).failed == 0


@pytest.mark.parametrize("parents", SHAPES)
def test_branches_of_a_preorder_are_all_paths(parents: tree.Parents) -> None:
    ordered = draft_of(parents).in_preorder().parents
    assert ordered is not None
    rows = {}
    for ancestors, begin, end in branches(ordered):
        for node in range(begin, end):
            rows[node] = [*ancestors, *range(begin, node + 1)]
    assert rows == {node: path(ordered, node) for node in range(len(parents))}


@pytest.mark.parametrize("right", range(4))
def test_of_a_chain_all_drafts_before_the_first_wrong_one_are_accepted(right: int) -> None:
    samples = [5, 6, 7, 8]
    samples[right] = 9  # the last of them follows the whole draft
    assert list(Draft((5, 6, 7), ("x",) * 3).accepted(samples)) == list(range(right))


def test_an_order_changes_no_path() -> None:
    chance = random.Random(3)
    for _ in range(200):
        draft = draft_of(random_tree(chance.randrange(1, 12), chance))
        ordered = draft.in_preorder()
        assert sorted(ordered.prefixes) == sorted(draft.prefixes)
        assert sorted(ordered.depths) == sorted(draft.depths)
        assert dict(zip(ordered.tokens, ordered.confidence or (), strict=True)) == dict(
            zip(draft.tokens, draft.confidence or (), strict=True)
        )
        assert all(parent < node for node, parent in enumerate(ordered.parents or ()))


def test_the_beginning_of_a_tree_is_one() -> None:
    chance = random.Random(4)
    for _ in range(100):
        draft = draft_of(random_tree(9, chance))
        for k in range(9):
            assert draft.truncated(k).prefixes == draft.prefixes[: k + 1]


def test_a_tree_without_a_fork_is_a_chain() -> None:
    assert or_chain((-1, 0, 1)) is None
    assert draft_of((-1, 0, 1, -1)).truncated(3) == Draft((10, 11, 12), ("x",) * 3, None, (0.1, 0.11, 0.12))


def test_the_accepted_path_is_the_only_one_whose_tokens_are_sampled() -> None:
    chance = random.Random(5)
    for _ in range(300):
        parents = random_tree(chance.randrange(1, 9), chance)
        taken: dict[int, set[int]] = {}
        tokens: list[int] = []
        for parent in parents:  # distinct among siblings
            free = [t for t in range(9) if t not in taken.setdefault(parent, set())]
            tokens.append(chance.choice(free))
            taken[parent].add(tokens[-1])
        samples = [chance.randrange(3) for _ in range(len(parents) + 1)]
        accepted = descend(parents, tokens, samples)
        at = ROOT
        for node in accepted:
            assert parents[node] == at and tokens[node] == samples[at + 1]
            at = node
        assert not any(p == at and tokens[n] == samples[at + 1] for n, p in enumerate(parents))


def test_values_of_nodes_are_the_chances_of_their_paths() -> None:
    """Against many rounds in which a sample is the m-th likeliest token with the chances that are given."""
    chances, later = [0.6, 0.5, 0.4, 0.3], [0.3, 0.2]
    chance = random.Random(6)
    best, depth, *_ = best_tree(chances, later, 12)
    assert [*best] == sorted(best, reverse=True) and [*depth] == sorted(depth)
    parents = (-1, -1, 0, 0, 1, -1, 2, 3)
    expected = node_values(parents, chances, later)
    assert expected[0] == 0.6 and expected[1] == pytest.approx(0.4 * 0.3)
    rounds, accepted = 20_000, 0
    for _ in range(rounds):
        at, depth = ROOT, 0
        while children := [node for node, parent in enumerate(parents) if parent == at]:
            ranks = (chances[depth], *later)
            rank = next((i for i, p in enumerate(ranks) if chance.random() < p), len(ranks))
            if rank >= len(children):
                break
            at, depth, accepted = children[rank], depth + 1, accepted + 1
    assert accepted / rounds == pytest.approx(sum(expected), abs=0.02)


def test_the_best_nodes_are_those_of_the_best_tree() -> None:
    chances, later = [0.7, 0.5, 0.2], [0.4]
    best, *_ = best_tree(chances, later, 5)
    shapes = itertools.product(*[range(-1, i) for i in range(5)])
    binary = [s for s in shapes if max(map(s.count, s)) <= 2 and max(depths(s)) < 3]
    assert sum(best) == pytest.approx(max(sum(node_values(shape, chances, later)) for shape in binary))


def test_a_round_judges_siblings_up_to_the_accepted_one() -> None:
    draft = Draft((5, 6, 7, 8, 9), ("x",) * 5, parents=(-1, -1, 0, 1, 1))
    assert [*judged_nodes(draft, (6, 9, 1))] == [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)]
    assert [*judged_nodes(draft, (1,))] == [(0, 0, False), (0, 1, False)]
    assert [*judged_nodes(Draft((5, 6), ("x",) * 2), (5, 7))] == [(0, 0, True), (1, 0, False)]
