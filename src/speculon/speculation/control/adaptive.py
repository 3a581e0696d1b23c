"""The number of drafts is one more than the mean of those accepted of late, whatever drafts cost."""

from __future__ import annotations

from math import floor

from speculon.core.config import AdaptiveConfig
from speculon.core.types import Decision, Load, Timing
from speculon.decoding.rounds import Budget, Judged
from speculon.decoding.sequence import Sequence
from speculon.speculation.control.fixed import ask_all
from speculon.speculation.control.policy import Policy

__all__ = ["Adaptive", "AdaptiveConfig", "AdaptiveLookahead"]


class AdaptiveLookahead:
    """How many tokens to draft next, from an exponentially weighted mean s of those that were accepted.

    >>> lookahead = AdaptiveLookahead(AdaptiveConfig(initial=4, min=2, max=10, alpha=0.3, cooldown_steps=2))
    >>> lookahead.observe(proposed=4, accepted=4)

    After `a` accepted tokens s <- alpha a + (1 - alpha) s, and s = a at first. Every `cooldown_steps` + 1
    observations the lookahead becomes s + 1, rounded to the nearest (a half goes up), within min and max.
    """

    def __init__(self, config: AdaptiveConfig | None = None):
        self.config = config or AdaptiveConfig()
        self.lookahead = 0  # tokens to draft
        self.mean_accepted = 0.0  # s; 0.0 before any observation
        self.observations = self.updates = 0  # updates: how often the lookahead has changed
        self._cooldown = 0  # observations until the mean is looked at again
        self.reset()

    def observe(self, proposed: int, accepted: int) -> None:
        """A round with `proposed` drafts, `accepted` of them; more than proposed count as all."""
        if proposed < 0 or accepted < 0:
            raise ValueError(f"proposed = {proposed}, accepted = {accepted}: neither may be negative")
        reached = float(min(accepted, proposed))
        alpha = self.config.alpha if self.observations else 1.0
        self.mean_accepted = alpha * reached + (1 - alpha) * self.mean_accepted
        self.observations += 1
        if self._cooldown:
            self._cooldown -= 1
            return
        nearest = floor(self.mean_accepted + 1 + 0.5)  # `round` would go to the even one
        lookahead = max(self.config.min, min(self.config.max, nearest))
        self.updates += lookahead != self.lookahead
        self.lookahead, self._cooldown = lookahead, self.config.cooldown_steps

    def reset(self) -> None:
        """As if new."""
        self.lookahead, self._cooldown = self.config.initial, self.config.cooldown_steps
        self.mean_accepted, self.observations, self.updates = 0.0, 0, 0


class Adaptive(Policy):
    """The policy `adaptive`: a lookahead for each sequence, for all of its methods; its K is a limit beside
    it.

    A round without a draft is no evidence. A draft that was accepted whole is observed as it is, so the next
    one is longer; one that is shorter than the lookahead only where it does not pull the mean down. With
    `shared` all have this controller.
    """

    def __init__(self, config: AdaptiveConfig | None = None, shared: AdaptiveLookahead | None = None):
        self.config, self.shared = config or AdaptiveConfig(), shared
        self.lookaheads: dict[int, AdaptiveLookahead] = {}  # sequence id -> its own

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        return [ask_all(budget, self._lookahead(budget.seq).lookahead) for budget in budgets]

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        known = [
            (self.lookaheads[one.seq.id], len(one.draft.tokens), one.verdict.accepted)
            for one in judged
            if one.seq.id in self.lookaheads
        ]
        # all judged before any is observed
        for lookahead, drafted, accepted in [values for values in known if counts(*values)]:
            lookahead.observe(drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        self.lookaheads.pop(seq.id, None)

    def _lookahead(self, seq: Sequence) -> AdaptiveLookahead:
        if seq.id not in self.lookaheads:
            self.lookaheads[seq.id] = AdaptiveLookahead(self.config) if self.shared is None else self.shared
        return self.lookaheads[seq.id]


def counts(lookahead: AdaptiveLookahead, drafted: int, accepted: int) -> bool:
    """Whether a round counts: it had a draft, and none that was cut short and would lower the mean."""
    cut_short = accepted == drafted < lookahead.lookahead
    return drafted > 0 and (not cut_short or accepted >= lookahead.mean_accepted)
