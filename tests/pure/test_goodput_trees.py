"""Policy `goodput` drafts trees where rows are free, and chains where they are not."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from speculon.core.tree import ROOT, or_chain
from speculon.core.types import CallCost, Draft, SpanOutcome, Verdict
from speculon.speculation.control.cost import Costs
from speculon.speculation.control.goodput import Goodput
from speculon.speculation.proposers.compose import DraftCall, DraftRequest
from tests import simulate as simulation
from tests.simulate import SimulatedMethod, SimulatedSequence, SimulationResult, SyntheticEnvironment

Ranks = tuple[float, ...]  # P(the sample is the drafter's m-th choice)
USUAL: Ranks = (0.55, 0.18, 0.08, 0.04)
USELESS: Ranks = (0.55, 1e-9, 1e-9, 1e-9)  # second choices are never right
ROUNDS, WARM = 500, 150
FREE, CHEAP, DEAR = 0.01, 0.5, 4.0  # ms of a row, where a step has 20


@dataclass(frozen=True, slots=True)
class Trees(SyntheticEnvironment):
    """Sequences whose drafter drafts trees; a token is its place among siblings."""

    depth: int | None = None
    ranks: Ranks = USUAL

    def _sequence(self, number: int) -> SimulatedSequence:
        seq = SyntheticEnvironment._sequence(self, number)
        seq.branching, seq.depth = frozenset(self.methods), self.depth
        return seq

    def tree(self, k: int, depth: int) -> Draft:
        """The k nodes whose paths are most often accepted."""
        tokens, parents = list[int](), list[int]()
        # value, parent, depth, place among siblings
        found = [(chance, ROOT, 1, rank) for rank, chance in enumerate(self.ranks)]
        while found and len(tokens) < k:
            found.remove(node := max(found))
            value, parent, at, rank = node
            tokens.append(rank)
            parents.append(parent)
            if at < depth:
                here = len(tokens) - 1
                found += [(value * chance, here, at + 1, rank) for rank, chance in enumerate(self.ranks)]
        return Draft(tuple(tokens), ("model",) * len(tokens), parents=or_chain(parents))

    def judge(self, draft: Draft, random: Random) -> Verdict:
        places, chances = range(len(self.ranks) + 1), [*self.ranks, 1 - sum(self.ranks)]
        samples = random.choices(places, chances, k=len(draft.tokens) + 1)
        accepted = draft.accepted(samples)
        tokens = (samples[0], *(samples[node + 1] for node in accepted))
        return Verdict(tokens, len(accepted), SpanOutcome.EARLY if draft.tokens else None)


class Drafters(simulation.Drafters):
    def ask(self, method: str, requests: list[DraftRequest]) -> DraftCall:
        assert isinstance(self.environment, Trees)
        drafts = list[Draft]()
        for _, k, depth, _ in requests:
            chain = Draft((0,) * k, (method,) * k)
            drafts.append(self.environment.tree(k, depth) if depth else chain)
        count, k = len(requests), max(request.depth or request.k for request in requests)
        ms = self.environment.proposal_ms(method, count, k)
        return DraftCall(drafts, drafts, CallCost(count, k, ms))


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(simulation, "Drafters", Drafters)
    return monkeypatch


def run(
    patched: pytest.MonkeyPatch, row_ms: float, depth: int | None = None, ranks: Ranks = USUAL
) -> tuple[SimulationResult, list[Draft]]:
    costs, drafts = Costs(), list[Draft]()
    methods = {"model": SimulatedMethod(lambda number, seq: ranks[0], lambda n, k: 0.3 + 0.3 * k)}

    def step(n: int, rows: int) -> float:
        return 20 + row_ms * rows

    environment = Trees(step, methods, lambda number: 1, depth=depth, ranks=ranks)

    def judged(draft: Draft, random: Random) -> Verdict:
        drafts.append(draft)
        return environment.judge(draft, random)

    patched.setattr(simulation, "judge", judged)
    return simulation.simulate(Goodput(costs), environment, ROUNDS, costs=costs), drafts[WARM:]


def share_of_trees(drafts: list[Draft]) -> float:
    return sum(draft.parents is not None for draft in drafts) / len(drafts)


def test_free_rows_are_used_for_trees(patched: pytest.MonkeyPatch) -> None:
    result, drafts = run(patched, FREE)
    chains, _ = run(patched, FREE, depth=0)
    assert share_of_trees(drafts) > 0.9
    assert result.rate(WARM) > 1.1 * chains.rate(WARM)


def test_dear_rows_have_chains(patched: pytest.MonkeyPatch) -> None:
    result, drafts = run(patched, DEAR)
    chains, _ = run(patched, DEAR, depth=0)
    assert share_of_trees(drafts) < 0.1
    assert result.rate(WARM) > 0.97 * chains.rate(WARM)


def test_second_choices_that_are_never_right_are_left(patched: pytest.MonkeyPatch) -> None:
    assert share_of_trees(run(patched, CHEAP)[1]) > 0.5
    assert share_of_trees(run(patched, CHEAP, ranks=USELESS)[1]) < 0.1


def test_a_depth_that_is_set_bounds_chains_and_trees(patched: pytest.MonkeyPatch) -> None:
    _, drafts = run(patched, FREE, depth=2)
    assert max(max(draft.depths, default=0) for draft in drafts) == 1
    assert share_of_trees(run(patched, FREE, depth=0)[1]) == 0
