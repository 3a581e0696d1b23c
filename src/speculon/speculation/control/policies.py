"""The policies of one engine, and the cost model that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from speculon.core.config import SpeculationConfig
from speculon.core.types import Ask, Decision, Draft, Load, Timing
from speculon.decoding.rounds import Budget, Judged
from speculon.decoding.sequence import Sequence
from speculon.speculation.control.adaptive import Adaptive
from speculon.speculation.control.cost import Costs
from speculon.speculation.control.fixed import Fixed, Solo
from speculon.speculation.control.goodput import Goodput
from speculon.speculation.control.policy import Policy, Trimmed
from speculon.speculation.control.shadow import ShadowPolicy

OfSequence = TypeVar("OfSequence", Budget, Judged)

COSTS = "costs"  # the name of their line in what is kept across restarts

# name -> how it is made; `config.USUAL_DRAFTS` has the same names
POLICIES: Mapping[str, Callable[[SpeculationConfig, Costs], Policy]] = {
    "fixed": lambda config, costs: Fixed(),
    "adaptive": lambda config, costs: Adaptive(config.adaptive),
    "solo": lambda config, costs: Solo(),
    "shadow": lambda config, costs: ShadowPolicy(),
    "goodput": lambda config, costs: Goodput(costs),
}


class Policies:
    """Each sequence is decided for by its own policy, which learns from its own alone; costs are shared."""

    def __init__(self, config: SpeculationConfig, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self._config = config
        self._made: dict[str, Policy] = {}

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        decided = dict[Budget, Decision]()
        for policy, group in self._by_policy(budgets):
            decided.update(zip(group, policy.decide(group, load), strict=True))
        return [decided[budget] for budget in budgets]

    def confirm(self, method: str, asks: Mapping[Budget, Ask]) -> Mapping[Budget, Ask]:
        confirmed = dict[Budget, Ask]()
        for policy, group in self._by_policy(asks):
            confirmed |= policy.confirm(method, {budget: asks[budget] for budget in group})
        return confirmed

    def trim(self, method: str, drafts: Mapping[Budget, Draft]) -> Mapping[Budget, Trimmed]:
        trimmed = dict[Budget, Trimmed]()
        for policy, group in self._by_policy(drafts):
            trimmed |= policy.trim(method, {budget: drafts[budget] for budget in group})
        return trimmed

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        self.costs.observe(judged, timing)
        for policy, group in self._by_policy(judged):
            policy.observe(group, timing)

    def _by_policy(self, some: Iterable[OfSequence]) -> list[tuple[Policy, list[OfSequence]]]:
        groups: dict[str, list[OfSequence]] = {}
        for one in some:
            groups.setdefault(one.seq.request.policy, []).append(one)
        return [(self.of(name), group) for name, group in groups.items()]

    def forget(self, seq: Sequence) -> None:
        if seq.request.policy in self._made:
            self._made[seq.request.policy].forget(seq)

    def keep_costs_alone(self) -> None:
        """Forgets all that sequences have taught."""
        self._made.clear()

    def with_costs_alone(self) -> Policies:
        """Others that know what rounds cost, and nothing that sequences have taught these."""
        return Policies(self._config, deepcopy(self.costs))

    def state(self) -> list[tuple[str, Any]]:
        """(name, what it has learned), the costs first."""
        learned = ((name, policy.state()) for name, policy in self._made.items())
        return [(COSTS, self.costs.state()), *((name, told) for name, told in learned if told is not None)]

    def restore(self, state: list[tuple[str, Any]]) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        for name, told in state:
            if name == COSTS:
                self.costs.restore(told)
            elif name in POLICIES:
                self.of(name).restore(told)
            else:
                raise ValueError(f"{name!r:.80} is not a policy")

    def use(self, name: str, policy: Policy) -> None:
        """The policy of this name from here on."""
        self._made[name] = policy

    @property
    def default(self) -> Policy:
        return self.of(self._config.policy)

    def of(self, name: str) -> Policy:
        """The policy of this name, made when it is first asked for."""
        if name not in self._made:
            self._made[name] = POLICIES[name](self._config, self.costs)
        return self._made[name]
