"""The time in which a policy decides, trims and observes: medians in µs of thread time, without a model.

python -m recipes.control.decide               # two cheap methods and a costly one
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from random import Random
from statistics import median
from time import thread_time_ns
from typing import Any

from tests.simulate import SimulatedMethod, SimulatedSequence, SyntheticEnvironment, simulate

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft
from speculon.speculation.control.policies import POLICIES, Policies

BATCHES = (1, 8, 64, 256)
METHODS = {
    "suffix": SimulatedMethod(lambda number, text: 0.5, lambda texts, k: 0.02 * texts, lookup=True),
    "ngram": SimulatedMethod(lambda number, text: 0.4, lambda texts, k: 0.02 * texts, lookup=True),
    "model": SimulatedMethod(lambda number, text: 0.7, lambda texts, k: (0.45 + 0.03 * texts) * k),
}


class Lookups(SyntheticEnvironment):
    """Two of three lookups find nothing; the model has a confidence."""

    def draft(self, number: int, text: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
        if method != "model" and random.random() < 2 / 3:
            return Draft()
        drafted = super().draft(number, text, method, k, random)
        sure = tuple(0.5 + random.random() / 2 for _ in range(k)) if method == "model" else None
        return replace(drafted, confidence=sure)


class TimedPolicy:
    """A policy, and what each of its calls took."""

    def __init__(self, policy: Any):
        self.policy = policy
        self.us: dict[str, list[float]] = {"decide": [], "trim": [], "observe": []}  # per round

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.policy, name)
        if name not in self.us:
            return call

        def timed(*args: Any) -> Any:
            began = thread_time_ns()
            result = call(*args)
            took = (thread_time_ns() - began) / 1e3
            if name == "trim":
                self.us[name][-1] += took
            else:
                self.us[name].append(took)
                self.us["trim"].extend([0.0] * (name == "decide"))
            return result

        return timed


def measure(policy: str, texts: int, rounds: int) -> dict[str, float]:
    policies = Policies(SpeculationConfig())
    timed = TimedPolicy(policies.of(policy))
    world = Lookups(lambda texts, drafts: 4 + 0.55 * texts + 0.27 * drafts, METHODS, lambda number: texts)
    simulate(timed, world, rounds, costs=policies.costs)  # type: ignore[arg-type]
    return {name: round(median(us[rounds // 4 :]), 1) for name, us in timed.us.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="goodput", choices=sorted(POLICIES))
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    for texts in BATCHES:
        print(
            json.dumps(
                {"policy": args.policy, "texts": texts, "us": measure(args.policy, texts, args.rounds)}
            )
        )


if __name__ == "__main__":
    main()
