"""How the policy `goodput` begins to choose between two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from speculon.speculation.control import goodput as module
from speculon.speculation.control.cost import Costs
from tests.pure.test_goodput import MODEL, STEP, run
from tests.simulate import SimulatedMethod, SyntheticEnvironment


def better_of_two(seeds: Iterable[int]) -> int:
    """Of runs that begin with known costs, those that soon draft with the better of two models."""
    block = SimulatedMethod(lambda *_: 0.75, lambda texts, k: 2.0 + 0.1 * k, read_ms=0.05)
    chain = SimulatedMethod(lambda *_: 0.9, MODEL, read_ms=0.05)
    ways, found = {"block": block, "chain": chain}, 0
    scene = SyntheticEnvironment(STEP, ways, lambda _: 1, prompt=256, length=200)
    for seed in seeds:
        costs = Costs()
        run(scene, 200, seed, costs)  # a warm-up: it measures costs, and no acceptance
        played = run(scene, 60, seed, costs)
        drafted = sum(played.drafted[30:], Counter[str]())
        found += drafted["chain"] > drafted["block"]
    return found


def test_a_run_of_rejections_at_the_beginning_does_not_decide_between_two_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = (56, 57, 70, 71)  # in the first and the third the better one is rejected first
    assert better_of_two(seeds) >= 3
    monkeypatch.setattr(module, "TRIED", 0)
    assert better_of_two(seeds) < 3, "the first rejected draft would put the better one out of use"
