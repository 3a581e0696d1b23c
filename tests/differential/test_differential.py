"""With drafts, everything is as in plain decoding of each request alone: texts, ends, log-probabilities,
counters; and nothing is held afterwards.

Other cases: DIFFERENTIAL_SEED=1 python -m pytest tests/differential -m "soak or not soak".
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import get_args

import pytest

from speculon.core.config import AcceptanceSetting
from speculon.speculation.control.policies import POLICIES
from speculon.speculation.proposers.registry import TABLE
from tests.differential.build import METHOD
from tests.differential.compare import Outcome, explained, run
from tests.differential.factors import COUNT, DRAFTERS, LOOKUPS, TORCH, cases

SEED = int(os.environ.get("DIFFERENTIAL_SEED", "0"))
FEW = 28  # cases of `make test`; the others are for the soak


@cache
def outcome(number: int) -> Outcome:
    case = cases(TORCH, SEED)[number]
    with explained(case, "tests/differential"):
        return run(case)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.soak] * (n >= FEW)) for n in range(COUNT)]
)
def test_case(number: int) -> None:
    outcome(number)


def test_every_pair_of_values_is_in_some_case() -> None:
    found = {pair for case in cases(TORCH, SEED) for pair in TORCH.pairs(case)}
    assert found == TORCH.valid_pairs and len(found) > 5000


def test_what_is_new_is_drawn() -> None:
    methods = {METHOD.get(name, name) for name in TORCH.own["method"]}
    assert methods >= {*TABLE} - {"grammar"}, "which drafts wherever a request has a form"
    assert set(TORCH.own["policy"]) == {*POLICIES} and set(TORCH.own["acceptance"]) == {
        *get_args(AcceptanceSetting)
    }


@pytest.mark.timeout(1200)  # one process may have to compute all of the cases
def test_speculation_has_happened() -> None:
    """Drafts of every method were accepted and rejected; sequences were preempted, and prefixes found."""
    outcomes, drafted, accepted = [outcome(number) for number in range(FEW)], Counter[str](), Counter[str]()
    for one in outcomes:
        drafted.update(one.drafted)
        accepted.update(one.accepted)
    counts = {name: (accepted[name], drafted[name]) for name in (*LOOKUPS, *DRAFTERS)}
    assert all(0 < right < of for right, of in counts.values()), counts
    assert accepted["grammar"] > 100
    assert sum(one.preemptions > 0 for one in outcomes) > FEW / 6
    assert sum(one.cached > 0 for one in outcomes) > FEW / 6
    assert sum(one.ties for one in outcomes) <= FEW / 20, "near-ties are rare"
