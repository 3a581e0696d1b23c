"""A draft model with another vocabulary leaves the target's distribution alone: enumerated, with the shipped
map, the shipped drafting loop and the shipped verify.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from speculon.checkpoints.spelling import Overlap
from speculon.speculation.proposers.chain import draft_chain
from speculon.speculation.proposers.translation import Translation
from tests.stat.test_block import error as block_error
from tests.stat.test_rejection import SAMPLED, error
from tests.stat.test_verify import EXACT, VISIBLE, written
from tests.stat.toy import Case, V

DRAFT_V = 5
PARTNERS = {0: 3, 1: 0, 3: 4}  # target token 2 has none, nor have 1 and 2 of the draft model
MAP = Translation(Overlap(PARTNERS, 1, 0.75, 0.75), V, DRAFT_V, torch.device("cpu"))


@cache
def draft_logits(context: tuple[int, ...]) -> torch.Tensor:
    """What the draft model says after the tokens that it reads, [1, Vd]."""
    chance = random.Random(repr(("draft", context)))
    return torch.tensor([[chance.randrange(-16, 17) / 8 for _ in range(DRAFT_V)]])


def mapped(case: Case, output: tuple[int, ...]) -> list[float]:
    """q as the drafting loop reports it."""
    seq = written(case, output, acceptance="rejection")
    logits = MAP.logits(draft_logits(tuple(MAP.read(seq.tokens))))
    (draft,) = draft_chain("toy", [seq], [1], lambda which, drafts: logits, 0.0)
    assert draft.probs is not None and draft.tokens[0] in PARTNERS
    return draft.probs[0].tolist()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_output_distribution_is_the_targets(name: str, k: int) -> None:
    assert error(SAMPLED[name], k, mapped) < EXACT
    assert block_error(SAMPLED[name], k, mapped) < EXACT


def test_q_is_renormalised_over_the_mapped_tokens() -> None:
    q = mapped(SAMPLED["plain"], ())
    weights = draft_logits(tuple(MAP.read(list(SAMPLED["plain"].prompt))))[0].softmax(-1)
    common = sum(float(weights[theirs]) for theirs in PARTNERS.values())
    temperature = SAMPLED["plain"].params.temperature
    assert q[2] == 0 and sum(q) == pytest.approx(1)
    if temperature == 1:
        assert q[0] == pytest.approx(float(weights[3]) / common)


def test_q_that_is_not_renormalised_is_seen() -> None:
    def whole(case: Case, output: tuple[int, ...]) -> list[float]:
        seq = written(case, output)
        weights = draft_logits(tuple(MAP.read(seq.tokens)))[0].softmax(-1)
        return [float(weights[PARTNERS[token]]) if token in PARTNERS else 0.0 for token in range(V)]

    assert error(SAMPLED["plain"], 1, mapped, whole) > VISIBLE
