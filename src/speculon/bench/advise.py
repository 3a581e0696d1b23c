"""Does speculation help here, with what, at which K, and at which concurrency?

Predicted, measured live, and answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.bench.advise_check import Candidate, Check, check, checks_total
from speculon.bench.advise_maths import Estimate, Fit, Timed, Way, best, estimate, fits
from speculon.bench.advise_measure import RUNS, Advance, Written, asking, grid, shadow, time_rounds
from speculon.bench.advise_prompts import Split
from speculon.bench.advise_settings import settings
from speculon.config import MAX_DRAFTS, SpeculationConfig
from speculon.errors import InvalidParameter
from speculon.proposers.registry import AUTO, LOOKUPS, OFF, check_method

if TYPE_CHECKING:
    from speculon.llm import LLM

FEWEST = 3  # texts that do not loop, to leave those that do aside
LOOKED_UP = ("suffix", "ngram")  # drafting methods that need nothing
SHADOW_BATCH = 8
DEEPEST = 8  # drafts per round looked at, where nobody says more
CHECKED = 5  # candidates that are measured live, at most


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked. Raises `InvalidParameter` for what cannot be."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    at_once: int = 1  # the concurrency that the settings are for
    k: int = DEEPEST  # drafts per round looked at
    method: str = AUTO  # a method of one's own, beside those that are always looked at
    repeats: int = 2  # of the live check; 0: none

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_DRAFTS:
            raise InvalidParameter(
                "num_speculative_tokens", self.k, f"goes from 1 to {MAX_DRAFTS}: the most drafts looked at"
            )
        if self.repeats < 0:
            raise InvalidParameter("repeats", self.repeats, "must be at least 0")
        check_method(self.method)
        if not self.concurrency or min(self.concurrency) < 1:
            raise InvalidParameter(
                "concurrency", ",".join(map(str, self.concurrency)), "whole numbers from 1 on"
            )
        if self.at_once not in self.batches:
            raise InvalidParameter(
                "at_once", self.at_once, f"is not among the numbers measured, {self.batches}"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """A single sequence is always among them: it is what others are compared with."""
        return tuple(sorted({1, *self.concurrency}))


class Outcome(NamedTuple):
    """The speed of a setting over plain decoding at one concurrency: measured where it was, else predicted."""

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
    """What was found, and what to do. Every statement about a speed is made of `outcome`."""

    wish: Wish
    ways: list[Way]
    lacking: dict[str, str]  # method -> why it could not be looked at
    timed: list[Timed]
    worlds: list[Fit]  # the fitted cost model, and those of its interval
    written: list[Written]
    group_of: Mapping[str, str]  # of a case, by name
    base: SpeculationConfig  # the settings it was measured under
    estimates: list[Estimate] = field(init=False)  # over `basis`
    checks: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        texts = [one.text for one in self.basis]
        self.estimates = estimate(texts, self.ways, range(1, self.wish.k + 1), self.wish.batches, self.worlds)

    # predicted

    @property
    def basis(self) -> list[Written]:
        """The texts that predictions rest on. Those that loop are left out where enough do not."""
        free = [one for one in self.written if not one.loops]
        return free if len(free) >= FEWEST else self.written

    @property
    def rests_on_loops(self) -> bool:
        return len(self.basis) == len(self.written) and any(one.loops for one in self.written)

    def at(self, batch: int, way: str | None = None, k: int | None = None) -> list[Estimate]:
        return [
            one
            for one in self.estimates
            if one.batch == batch and way in (None, one.way.name) and k in (None, one.k)
        ]

    def predicted(self, candidate: Candidate, batch: int) -> Estimate | None:
        """None where its policy sets K."""
        return self.at(batch, candidate.way.name, candidate.k)[0] if candidate.k else None

    @property
    def forecast(self) -> Estimate:
        """The prediction for the chosen setting; the best one where its policy sets K."""
        return self.predicted(self.chosen, self.wish.at_once) or best(self.at(self.wish.at_once))

    def among(self, texts: Iterable[Written]) -> Estimate | None:
        """The forecast over other texts alone."""
        some, one = [each.text for each in texts], self.forecast
        return estimate(some, [one.way], [one.k], [one.batch], self.worlds)[0] if some else None

    @property
    def groups(self) -> dict[str, Estimate]:
        """The forecast by where the prompts come from."""
        of = self.group_of
        names = dict.fromkeys(of[one.case.name] for one in self.basis)
        return {
            name: found
            for name in names
            if (found := self.among(t for t in self.basis if of[t.case.name] == name))
        }

    def round_costs(self, way: Way, batch: int) -> list[float]:
        """Of a round in which every sequence has K drafts, in plain steps; K = 1, 2, .."""
        fit = self.worlds[0]
        return [
            fit.full_round(way.chain, batch, k) / fit.costs.step(batch) for k in range(1, self.wish.k + 1)
        ]

    # measured

    def check_at(self, batch: int) -> Check | None:
        return next((check for check in self.checks if check.concurrency == batch), None)

    def outcome(self, candidate: Candidate, batch: int) -> Outcome | None:
        """None: neither measured nor predicted, since its policy sets K."""
        live = self.check_at(batch)
        if live and (result := live.of(candidate)):
            return Outcome(result.ratio, result.low, result.high, True)
        one = self.predicted(candidate, batch)
        return Outcome(one.ratio, one.low, one.high, False) if one else None

    @property
    def candidates(self) -> list[Candidate]:
        """What is measured live: the best prediction, the policy `goodput`, half of K, each drafter, the next
        predictions.
        """
        batch = self.wish.at_once
        ranked = sorted((best(self.at(batch, way.name)) for way in self.ways), key=lambda one: -one.ratio)
        first = ranked[0]
        shallower = [
            one for one in self.at(batch, first.way.name) if one.k < first.k and one.k <= (first.k + 1) // 2
        ]
        drafters = [one for one in ranked if one.way.name in self.base.drafts]
        half = [best(shallower)] if shallower else []
        fixed = [Candidate(one.way, one.k) for one in (first, *half, *drafters, *ranked)]
        return list(dict.fromkeys([fixed[0], self.by_policy, *fixed[1:]]))[:CHECKED]

    @property
    def by_policy(self) -> Candidate:
        """All methods at hand, with K set by the policy."""
        return Candidate(next((way for way in self.ways if way.name == AUTO), Way(AUTO, LOOKUPS)))

    # the answer

    @property
    def chosen(self) -> Candidate:
        """The fastest measured setting; the best prediction where none was measured."""
        live = self.check_at(self.wish.at_once)
        if live:
            return live.fastest.candidate
        one = best(self.at(self.wish.at_once))
        return Candidate(one.way, one.k)

    @property
    def helps(self) -> bool:
        return self.up_to is not None

    @property
    def settings(self) -> dict[str, Any]:
        """What to put under `[speculation]`."""
        one = self.chosen
        return (
            settings(self.base, one.way.name, one.policy, one.k, one.way.chain)
            if self.helps
            else {"method": OFF}
        )

    @property
    def up_to(self) -> int | None:
        """The highest concurrency up to which the chosen setting pays without a gap, measured or predicted;
        None: it does not.
        """
        outcomes = (
            (batch, self.outcome(self.chosen, batch))
            for batch in self.wish.batches
            if batch >= self.wish.at_once
        )
        return max(
            (batch for batch, _ in takewhile(lambda one: one[1] and one[1].pays, outcomes)), default=None
        )


def advise(llm: LLM, split: Split, wish: Wish, advance: Advance = lambda n: None) -> Advice:
    """Predicts, measures the best predictions live, and decides.

    Writes nothing. Raises what the engine raises.
    """
    if max(wish.batches) > llm.config.max_num_seqs:
        raise InvalidParameter("concurrency", max(wish.batches), f"max_num_seqs is {llm.config.max_num_seqs}")
    ways, lacking = ways_of(llm, wish)
    methods = tuple(dict.fromkeys(method for way in ways for method in way.chain))
    for case in (*split.measured, *split.held_out):  # refuses what could not be written, before anything is
        llm.engine.admission.admit(case.name, case.prompt, case.params, asking(methods[0], wish.k))
    batch = min(SHADOW_BATCH, llm.config.max_num_seqs)
    written = [one for one in shadow(llm, split.measured, methods, wish.k, batch, advance) if one.text.drafts]
    if not written:
        raise InvalidParameter(
            "prompt", len(split.measured), "none of these texts has a second token that could be drafted"
        )
    timed = time_rounds(llm, split.measured, methods, grid(wish.k), wish.batches, advance)
    advice = Advice(wish, ways, lacking, timed, fits(timed), written, split.groups, llm.config.speculation)
    if wish.repeats:
        check_live(llm, advice, split, advance)
    return advice


def ways_of(llm: LLM, wish: Wish) -> tuple[list[Way], dict[str, str]]:
    """Each method by itself, and `auto` where it joins several; methods that cannot draft here, with the
    reason.
    """
    proposers = llm.engine.proposers
    names = dict.fromkeys([*LOOKED_UP, *LOOKUPS, *llm.config.speculation.drafts, wish.method, AUTO])
    names.pop(OFF, None)
    ways: list[Way] = []
    lacking = {}
    for name in names:
        if reason := proposers.lacking(name):
            lacking[name] = reason.value
            continue
        chain = proposers.methods_of((), name)
        if chain not in [way.chain for way in ways]:
            ways.append(Way(name, chain))
    return ways, lacking


def check_live(llm: LLM, advice: Advice, split: Split, advance: Advance) -> None:
    """The candidates at the concurrency asked for; where one pays, at the highest at which it is to pay, or
    at all above.
    """
    wish = advice.wish
    cases = split.held_out
    if not advice.rests_on_loops:
        plain = shadow(llm, cases, [advice.ways[0].chain[0]], 1, wish.at_once, lambda n: None)
        cases = [one.case for one in plain if not one.loops]
    held_out = bool(cases)
    cases = cases or [one.case for one in advice.basis]

    def measured(batch: int, candidates: Sequence[Candidate]) -> None:
        advice.checks.append(check(llm, batch, candidates, cases, held_out, wish.repeats, advance))

    measured(wish.at_once, advice.candidates)
    one, highest = advice.chosen, advice.up_to or 0
    for batch in [
        batch
        for batch in wish.batches
        if wish.at_once < batch and (batch == highest or highest and not one.k)
    ]:
        other = best(advice.at(batch))
        measured(batch, list(dict.fromkeys([one, advice.by_policy, Candidate(other.way, other.k)])))


def total(split: Split, wish: Wish) -> int:
    """Measurements there will be, at most."""
    cases = len(split.held_out) or len(split.measured)
    checked = checks_total(cases, wish.at_once, CHECKED, wish.repeats)
    checked += sum(
        checks_total(cases, batch, 3, wish.repeats) for batch in wish.batches if batch > wish.at_once
    )
    return -(-len(split.measured) // SHADOW_BATCH) + len(wish.batches) * (RUNS + 1) + checked
