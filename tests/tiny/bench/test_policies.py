"""Each mode has policies of its own: with the costs of the warm-up, and its own rounds alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculon import LLM
from speculon.core.errors import BenchError
from speculon.core.types import Timing
from speculon.decoding.rounds import Judged
from speculon.measure.bench.measure import Measurement, in_place, measure
from speculon.measure.bench.plan import AGAIN, BenchPlan
from speculon.measure.bench.run import run
from speculon.measure.bench.workloads import Case
from speculon.speculation.control.policies import COSTS, Policies
from tests.tiny.bench.plans import bench, small

Observed = dict[
    int, set[tuple[str, ...]]
]  # policies object -> methods of the sequences whose rounds it observed


def policies_in_a_run(
    llm: LLM, plan: BenchPlan, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, list[Policies]], Observed]:
    """The policies in place in each measurement, by mode, and what each of them observed."""
    in_place: dict[str, list[Policies]] = {}
    observed: Observed = {}
    observe = Policies.observe

    def watched(llm: LLM, cases: list[Case], speculation: dict[str, Any], time: str = "") -> Measurement:
        in_place.setdefault(time.partition(", ")[0], []).append(llm.engine.policy)
        return measure(llm, cases, speculation, time)

    def observing(self: Policies, judged: list[Judged], timing: Timing) -> None:
        observed.setdefault(id(self), set()).update(one.seq.methods for one in judged)
        observe(self, judged, timing)

    monkeypatch.setattr("speculon.measure.bench.run.measure", watched)
    monkeypatch.setattr(Policies, "observe", observing)
    run(llm, plan)
    return in_place, observed


@pytest.fixture(scope="module")
def deciding(folder: Path) -> LLM:
    return LLM(str(folder), prefix_cache=False, speculation={"policy": "goodput"})


METHODS = {"off": (), AGAIN: (), "ngram:4": ("ngram",), "suffix:4": ("suffix",), "auto": ("suffix",)}


def not_its_own(in_place: dict[str, list[Policies]], observed: Observed) -> list[str]:
    """Modes whose policies changed during the run, or observed rounds of another mode."""
    return [
        mode
        for mode, some in in_place.items()
        if len(set(map(id, some))) > 1 or observed.get(id(some[0]), set()) != {METHODS[mode]}
    ]


def learning(policies: Policies) -> list[str]:
    return [name for name, _ in policies.state() if name != COSTS]


ISOLATED: dict[str, Any] = {
    "modes": ("ngram:4", "auto", "suffix:4"),
    "prompts": 2,
    "max_tokens": 24,
    "repeats": 2,
}


FEW = {**ISOLATED, "prompts": 1, "repeats": 1}


def test_policies_observe_their_own_mode_alone(deciding: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = deciding.engine.policy
    plan = small(**ISOLATED)
    in_place, observed = policies_in_a_run(deciding, plan, monkeypatch)
    assert {mode: len(some) for mode, some in in_place.items()} == dict.fromkeys(
        METHODS, plan.measurements // len(METHODS)
    )
    assert not_its_own(in_place, observed) == []
    assert len({id(some[0]) for some in in_place.values()} | {id(before)}) == len(METHODS) + 1
    assert {mode: learning(some[0]) for mode, some in in_place.items()} == {
        **dict.fromkeys(METHODS, []),
        "auto": ["goodput"],
    }
    assert deciding.engine.policy is before and id(before) not in observed


def test_planted_policies_that_are_shared_are_seen(deciding: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policies, "with_costs_alone", lambda self: self)
    in_place, observed = policies_in_a_run(deciding, small(**FEW), monkeypatch)
    assert set(not_its_own(in_place, observed)) == set(METHODS)
    assert learning(in_place["ngram:4"][0]) == ["goodput"]


def test_planted_policies_that_are_made_anew_each_time_are_seen(
    deciding: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Anew(dict[str, Policies]):
        def __getitem__(self, label: str) -> Policies:
            return deciding.engine.policy.with_costs_alone()

    monkeypatch.setattr("speculon.measure.bench.run.policies_of", lambda llm, plan: Anew())
    assert set(not_its_own(*policies_in_a_run(deciding, small(**FEW), monkeypatch))) == set(METHODS)


@pytest.mark.parametrize(
    ("arguments", "warmed"),
    [
        pytest.param(["--modes", "ngram:4,suffix/fixed"], False, id="fixed modes alone"),
        pytest.param(["--modes", "ngram:4,suffix:4/goodput"], True, id="a mode with a policy"),
        pytest.param(["--modes", "suffix", "--policy", "goodput", "--no-warmup"], False, id="as set"),
    ],
)
def test_costs_are_known_at_start_where_a_policy_needs_them(
    folder: Path, arguments: list[str], warmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[bool] = []

    def stop(llm: LLM, plan: BenchPlan, advance: object) -> None:
        known.append(llm.engine.policy.costs.known)
        raise BenchError("seen")

    monkeypatch.setattr("speculon.measure.bench.run.run", stop)
    assert bench(folder, *arguments)[0] == 2
    assert known == [warmed]


def test_an_object_in_the_place_of_the_engines_own_goes_afterwards(folder: Path) -> None:
    llm = LLM(str(folder), prefix_cache=False, warmup=False)
    before, other = llm.engine.policy, llm.engine.policy.with_costs_alone()
    with pytest.raises(ZeroDivisionError), in_place(llm.engine, policy=other):
        assert llm.engine.policy is other
        raise ZeroDivisionError
    assert llm.engine.policy is before
