"""Trees leave the distribution of the output as it is: enumerated over all trees of few nodes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from speculon.core import types
from speculon.core.tree import Parents
from speculon.core.types import Draft, Verdict
from speculon.decoding.rounds import Drafted
from speculon.decoding.sampling import ScoredRow
from speculon.decoding.verify import verify
from tests.builders import span_of
from tests.stat.test_verify import CASES, EXACT, VISIBLE, independent, written
from tests.stat.toy import Case, Distribution, V, distance, reference_probs, reference_texts, toy_logits

NODES = 3
SHAPES = [
    shape for n in range(1, NODES + 1) for shape in itertools.product(*[range(-1, i) for i in range(n)])
]
CHOSEN = ("plain", "greedy", "penalties", "bad words of several tokens", "stop ids", "everything")


def tree(case: Case, output: tuple[int, ...], parents: Parents) -> Draft:
    """A tree of this shape: the likelier a token, the sooner it is a child; siblings differ."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    children: dict[int, int] = {}
    for node, parent in enumerate(parents):
        p = reference_probs(case, (*output, *paths[parent]))
        rank = children[parent] = children.get(parent, -1) + 1
        chance = random.Random(repr((output, paths[parent])))
        order = sorted(range(V), key=lambda token: -p[token] - 0.3 * chance.random())
        paths[node] = (*paths[parent], order[rank])
    tokens = tuple(paths[node][-1] for node in range(len(parents)))
    parents_or_none = types.or_chain(parents)
    return Draft(tokens, ("toy",) * len(tokens), parents=parents_or_none).in_preorder()


def one_round(case: Case, output: tuple[int, ...], draft: Draft) -> list[tuple[float, Verdict]]:
    """Every outcome of one round: one span for each way in which its rows can be drawn."""
    rows = len(draft.tokens) + 1
    outcomes = list(itertools.product(range(V), repeat=rows)) if not case.params.greedy else [()]
    drafted = [Drafted(span_of(written(case, output)), draft) for _ in outcomes]
    joint = torch.ones(len(outcomes), dtype=torch.float64)

    def oracle(logits: Tensor, chosen: list[ScoredRow]) -> Tensor:
        joint.copy_(independent(logits[:rows].double().softmax(-1)))
        return torch.tensor(outcomes).flatten()

    logits = torch.tensor([toy_logits((*case.prompt, *output, *prefix)) for prefix in draft.prefixes])
    scored = [range(n * rows, (n + 1) * rows) for n in range(len(drafted))]
    judged = verify(drafted, logits.repeat(len(drafted), 1), scored, oracle)
    return [(float(chance), one.verdict) for chance, one in zip(joint, judged, strict=True) if chance > 0]


def texts_with(case: Case, shape: Parents) -> Distribution:
    """Every text of one round with a tree and the target's own tokens after it."""
    room = case.params.max_tokens or 0
    draft = tree(case, (), shape)
    assert max(draft.depths) + 1 < room + 1
    texts: Distribution = {}
    for chance, verdict in one_round(case, (), draft):
        grown = verdict.tokens
        done = verdict.finish and verdict.finish.reason
        follow = {(grown, done): 1.0} if done else reference_texts(case, grown)
        for text, part in follow.items():
            texts[text] = texts.get(text, 0.0) + chance * part
    return texts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_the_distribution_is_the_targets(name: str, shape: Parents) -> None:
    case = CASES[name]
    assert distance(texts_with(case, shape), reference_texts(case)) < EXACT


def test_a_branch_that_is_taken_behind_the_wrong_parent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(parents: Parents, tokens: tuple[int, ...], samples: list[int]) -> list[int]:
        accepted: list[int] = []
        for node, depth in enumerate(types.depths(parents)):
            if depth == len(accepted) and tokens[node] == samples[parents[node] + 1]:
                accepted.append(node)
        return accepted

    monkeypatch.setattr(types, "descend", careless)
    errors = [distance(texts_with(CASES["plain"], s), reference_texts(CASES["plain"])) for s in SHAPES]
    assert max(errors) > VISIBLE


def test_rows_that_are_judged_by_their_neighbours_sample_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = types.descend
    monkeypatch.setattr(types, "descend", lambda p, t, s: right(p, t, [*s[1:], s[0]]))
    errors = [distance(texts_with(CASES["plain"], s), reference_texts(CASES["plain"])) for s in SHAPES]
    assert max(errors) > VISIBLE
