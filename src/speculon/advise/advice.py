"""Whether speculation helps here: by which method, at which K, up to which concurrency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from speculon.advise.maths import Cascade, Fit, SpeedEstimate, TimedRound, best, estimate
from speculon.advise.measure import Continuation
from speculon.advise.plan import AdvisePlan
from speculon.advise.settings import settings
from speculon.advise.trial import Candidate, Trial
from speculon.config import SpeculationConfig
from speculon.proposers.registry import AUTO, LOOKUPS, OFF

FEWEST = 3  # texts that do not loop, to leave those that do aside
MAX_CANDIDATES = 5  # candidates that are measured live, at most


class Speedup(NamedTuple):
    """The speed of a setting over plain decoding: measured where it was, else predicted."""

    ratio: float
    low: float
    high: float
    measured: bool

    @property
    def pays(self) -> bool:
        """Whether the whole 90 % interval is faster than plain."""
        return self.low > 1


@dataclass(slots=True)
class Advice:
    """What was found, and what to do. Every statement about a speed comes from `speedup`."""

    plan: AdvisePlan
    cascades: list[Cascade]
    lacking: dict[str, str]  # method -> why it cannot draft here
    timed: list[TimedRound]
    fits: list[Fit]  # of all rounds; the others, of resampled rounds, give the intervals
    continuations: list[Continuation]
    group_of: Mapping[str, str]  # of a case, by name
    base: SpeculationConfig  # the settings it was measured under
    estimates: list[SpeedEstimate] = field(init=False)  # over `basis`
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        texts = [one.trace for one in self.basis]
        self.estimates = estimate(
            texts, self.cascades, range(1, self.plan.k + 1), self.plan.batches, self.fits
        )

    # predicted

    @property
    def basis(self) -> list[Continuation]:
        """The texts behind the predictions: without those that loop, if enough do not."""
        free = [one for one in self.continuations if not one.loops]
        return free if len(free) >= FEWEST else self.continuations

    @property
    def rests_on_loops(self) -> bool:
        return len(self.basis) == len(self.continuations) and any(one.loops for one in self.continuations)

    def at(self, batch: int, cascade: str | None = None, k: int | None = None) -> list[SpeedEstimate]:
        return [
            one
            for one in self.estimates
            if one.batch == batch and cascade in (None, one.cascade.name) and k in (None, one.k)
        ]

    def predicted(self, candidate: Candidate, batch: int) -> SpeedEstimate | None:
        """None where its policy sets K."""
        return self.at(batch, candidate.cascade.name, candidate.k)[0] if candidate.k else None

    @property
    def forecast(self) -> SpeedEstimate:
        """The prediction for the chosen setting; the best one where its policy sets K."""
        return self.predicted(self.chosen, self.plan.at_once) or best(self.at(self.plan.at_once))

    def among(self, texts: Iterable[Continuation]) -> SpeedEstimate | None:
        """The forecast over these texts alone."""
        some, one = [each.trace for each in texts], self.forecast
        return estimate(some, [one.cascade], [one.k], [one.batch], self.fits)[0] if some else None

    @property
    def groups(self) -> dict[str, SpeedEstimate]:
        """The forecast by where the prompts come from."""
        of = self.group_of
        names = dict.fromkeys(of[one.case.name] for one in self.basis)
        return {
            name: found
            for name in names
            if (found := self.among(t for t in self.basis if of[t.case.name] == name))
        }

    def round_costs(self, cascade: Cascade, batch: int) -> list[float]:
        """Of a round in which every sequence has K drafts, in plain steps; K = 1, 2, .."""
        fit = self.fits[0]
        return [
            fit.full_round(cascade.methods, batch, k) / fit.costs.step(batch)
            for k in range(1, self.plan.k + 1)
        ]

    # measured

    def trial_at(self, batch: int) -> Trial | None:
        return next((trial for trial in self.trials if trial.concurrency == batch), None)

    def speedup(self, candidate: Candidate, batch: int) -> Speedup | None:
        """None: neither measured nor predicted, since its policy sets K."""
        live = self.trial_at(batch)
        if live and (result := live.of(candidate)):
            return Speedup(result.ratio, result.low, result.high, True)
        one = self.predicted(candidate, batch)
        return Speedup(one.ratio, one.low, one.high, False) if one else None

    @property
    def candidates(self) -> list[Candidate]:
        """For the live run: the best prediction, `goodput`, half of K, each drafter, the next best."""
        batch = self.plan.at_once
        bests = (best(self.at(batch, cascade.name)) for cascade in self.cascades)
        first, *_ = ranked = sorted(bests, key=lambda one: -one.ratio)
        same = self.at(batch, first.cascade.name)
        shallower = [one for one in same if one.k < first.k and one.k <= (first.k + 1) // 2]
        drafters = [one for one in ranked if one.cascade.name in self.base.drafts]
        half = [best(shallower)] if shallower else []
        fixed = [Candidate(one.cascade, one.k) for one in (first, *half, *drafters, *ranked)]
        return list(dict.fromkeys([fixed[0], self.by_policy, *fixed[1:]]))[:MAX_CANDIDATES]

    @property
    def by_policy(self) -> Candidate:
        """Method `auto`, with K set by the policy."""
        auto = (cascade for cascade in self.cascades if cascade.name == AUTO)
        return Candidate(next(auto, Cascade(AUTO, LOOKUPS)))

    # the answer

    @property
    def chosen(self) -> Candidate:
        """The fastest measured setting; the best prediction where none was measured."""
        live = self.trial_at(self.plan.at_once)
        if live:
            return live.fastest.candidate
        one = best(self.at(self.plan.at_once))
        return Candidate(one.cascade, one.k)

    @property
    def helps(self) -> bool:
        return self.up_to is not None

    @property
    def settings(self) -> dict[str, Any]:
        """What to put under `[speculation]`."""
        if not self.helps:
            return {"method": OFF}
        one = self.chosen
        return settings(self.base, one.cascade.name, one.policy, one.k, one.cascade.methods)

    @property
    def up_to(self) -> int | None:
        """The highest concurrency up to which the chosen setting pays at every one; None: it does not."""
        higher = [batch for batch in self.plan.batches if batch >= self.plan.at_once]
        speedups = ((batch, self.speedup(self.chosen, batch)) for batch in higher)
        paying = takewhile(lambda item: item[1] and item[1].pays, speedups)
        return max((batch for batch, _ in paying), default=None)
