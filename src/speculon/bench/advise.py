"""Does drafting help here, with what, how far, and for how many texts at once? Measured, answered, and checked live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speculon.bench.advise_check import Check, check, checks_total
from speculon.bench.advise_maths import (
    Costs,
    Estimate,
    Prices,
    Way,
    best,
    break_even,
    dearest_guess,
    estimate,
    largest_crowd,
)
from speculon.bench.advise_measure import RUNS, Written, asking, grid, shadow, time_costs
from speculon.bench.advise_prompts import Split
from speculon.bench.advise_settings import settings
from speculon.config import MAX_DRAFTS, SpeculationConfig
from speculon.errors import InvalidParameter
from speculon.proposers.registry import AUTO, LOOKUPS, OFF, check_method

if TYPE_CHECKING:
    from speculon.llm import LLM

FEWEST = 3  # texts that do not loop, to leave those that do aside
LOOKED_UP = ("suffix", "ngram")  # drafting methods that need nothing
SHADOW_CROWD = 8
DEEPEST = 8  # drafts per round looked at, where nobody says more


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked. Raises `InvalidParameter` for what cannot be."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    at_once: int = 1  # texts that the settings are for
    k: int = DEEPEST  # drafts per round looked at
    method: str = AUTO  # a method of one's own, beside those that are always looked at
    repeats: int = 2  # of the live check; 0: none

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_DRAFTS:
            raise InvalidParameter("num_speculative_tokens", self.k, f"goes from 1 to {MAX_DRAFTS}: the most drafts looked at")
        if self.repeats < 0:
            raise InvalidParameter("repeats", self.repeats, "must be at least 0")
        check_method(self.method)
        if not self.concurrency or min(self.concurrency) < 1:
            raise InvalidParameter("concurrency", ",".join(map(str, self.concurrency)), "whole numbers from 1 on")
        if self.at_once not in self.crowds:
            raise InvalidParameter("at_once", self.at_once, f"is not among the crowds measured, {self.crowds}")

    @property
    def crowds(self) -> tuple[int, ...]:
        """One text at a time is always among them: it is what a crowd is compared with."""
        return tuple(sorted({1, *self.concurrency}))


@dataclass(slots=True)
class Advice:
    """What was found, and what to do."""

    wish: Wish
    ways: list[Way]
    lacking: dict[str, str]  # method -> why it could not be looked at
    estimates: list[Estimate]  # over the texts it rests on
    looping: list[Estimate]  # over those that end repeating themselves; none where there are none
    groups: dict[str, list[Estimate]]  # by where the prompts come from
    written: list[Written]
    rests_on_loops: bool  # too few texts do not loop
    costs: Costs
    base: SpeculationConfig  # the settings it was measured under
    checks: list[Check] = field(default_factory=list)

    def at(self, crowd: int, way: str | None = None, k: int | None = None) -> list[Estimate]:
        return [one for one in self.estimates if one.texts == crowd and way in (None, one.way.name) and k in (None, one.k)]

    @property
    def candidate(self) -> Estimate:
        """The fastest setting for the crowd asked for, whether it pays or not."""
        return best(self.at(self.wish.at_once))

    @property
    def helps(self) -> bool:
        """Whether the candidate pays. Where the prediction leaves it open the live check decides, and it may overrule it."""
        live, one = self.live(self.wish.at_once), self.candidate
        if live is None:
            return one.pays
        if live.high < 1 or one.ratio <= 1:
            return False
        return live.low > 1 if one.open or not live.agrees else one.pays

    @property
    def overruled(self) -> bool:
        """Whether it was to pay, and measured live it did not."""
        return self.candidate.pays and not self.helps

    @property
    def settings(self) -> dict[str, Any]:
        """What to put under `[speculation]`."""
        one = self.candidate
        return settings(self.base, one.way.name, one.k, one.way.chain) if self.helps else {"method": OFF}

    @property
    def up_to(self) -> int | None:
        """The most texts at once for which the advised setting pays, and was not slower where it was checked."""
        some = [one for one in self.at_all(self.candidate) if one.texts >= self.wish.at_once]
        slower = [check.setting.texts for check in self.checks if check.ratio <= 1]
        return largest_crowd({one.texts: one.pays and one.texts not in slower for one in some})

    def at_all(self, one: Estimate, estimates: Sequence[Estimate] | None = None) -> list[Estimate]:
        """The same setting for every crowd."""
        some = self.estimates if estimates is None else estimates
        return [each for each in some if (each.way, each.k) == (one.way, one.k)]

    def live(self, crowd: int) -> Check | None:
        return next((check for check in self.checks if check.setting.texts == crowd), None)

    def round_costs(self, way: Way, crowd: int) -> list[float]:
        """Of a round in which every text has K drafts, in plain steps; K = 1, 2, .."""
        prices = Prices.of(self.costs)
        plain = prices.plain_ms(crowd)
        return [prices.full_round(way.chain, crowd, k) / plain for k in range(1, self.wish.k + 1)]

    def break_even(self, way: Way, crowd: int) -> tuple[float, int] | None:
        """The acceptance from which on the way pays, and at which K; None: at no acceptance."""
        return break_even(self.round_costs(way, crowd))

    def dearest_guess(self, way: Way, crowd: int) -> float:
        """The most that a guess may cost of a plain step, at the acceptance found."""
        return dearest_guess(self.at(crowd, way.name))


Advance = Callable[[int], None]


def advise(llm: LLM, split: Split, wish: Wish, advance: Advance = lambda n: None) -> Advice:
    """Measures, decides, and checks the decision. Writes nothing. Raises what the engine raises for prompts it cannot serve."""
    if max(wish.crowds) > llm.config.max_num_seqs:
        raise InvalidParameter("concurrency", max(wish.crowds), f"max_num_seqs is {llm.config.max_num_seqs}")
    ways, lacking = ways_of(llm, wish)
    methods = tuple(dict.fromkeys(method for way in ways for method in way.chain))
    for case in (*split.measured, *split.held_out):  # refuses what could not be written, before anything is
        llm.engine.prepare(case.prompt, case.params, asking(methods[0], wish.k), case.name)
    crowd = min(SHADOW_CROWD, llm.config.max_num_seqs)
    written = [text for text in shadow(llm, split.measured, methods, wish.k, crowd, advance) if text.guesses]
    if not written:
        raise InvalidParameter("prompt", len(split.measured), "none of these texts has a second token that could be guessed")
    costs = time_costs(llm, split.measured, methods, grid(wish.k), wish.crowds, advance)
    advice = decide(wish, ways, lacking, written, costs, split.groups, llm.config.speculation)
    if wish.repeats:
        advice.checks = check_live(llm, advice, split, advance)
    return advice


def decide(
    wish: Wish,
    ways: list[Way],
    lacking: dict[str, str],
    written: list[Written],
    costs: Costs,
    group_of: Mapping[str, str],
    base: SpeculationConfig,
) -> Advice:
    """The advice that these measurements lead to, not yet checked. Texts that loop are left aside where enough do not."""
    free = [text for text in written if not text.loops]
    basis = free if len(free) >= FEWEST else written
    found = estimate([text.guesses for text in basis], ways, range(1, wish.k + 1), wish.crowds, costs)
    advice = Advice(wish, ways, lacking, found, [], {}, written, basis is not free, costs, base)
    one = advice.candidate

    def again(texts: Iterable[Written]) -> list[Estimate]:
        some = [text.guesses for text in texts]
        return estimate(some, [one.way], [one.k], wish.crowds, costs) if some else []

    advice.looping = again(text for text in written if text.loops)
    for group in dict.fromkeys(group_of[text.case.name] for text in basis):
        advice.groups[group] = again(text for text in basis if group_of[text.case.name] == group)
    return advice


def ways_of(llm: LLM, wish: Wish) -> tuple[list[Way], dict[str, str]]:
    """Each method by itself, and `auto` where it joins several; methods that cannot draft here, with the reason."""
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


def check_live(llm: LLM, advice: Advice, split: Split, advance: Advance) -> list[Check]:
    """The advised setting (or the best of those advised against) for the crowd asked for, and for the largest it pays for."""
    crowds = dict.fromkeys([advice.wish.at_once, advice.up_to or advice.wish.at_once])
    settings = {one.texts: one for one in advice.at_all(advice.candidate)}
    cases = split.held_out
    if not advice.rests_on_loops:
        plain = shadow(llm, cases, [advice.candidate.way.chain[0]], 1, advice.wish.at_once, lambda n: None)
        cases = [text.case for text in plain if not text.loops]
    held_out = bool(cases)
    cases = cases or [text.case for text in advice.written if advice.rests_on_loops or not text.loops]
    return [check(llm, settings[crowd], cases, held_out, advice.wish.repeats, advance) for crowd in crowds]


def total(split: Split, wish: Wish) -> int:
    """Measurements there will be, at most."""
    crowds = [wish.at_once, max(wish.crowds)]
    checked = checks_total(len(split.held_out) or len(split.measured), crowds, wish.repeats)
    return -(-len(split.measured) // SHADOW_CROWD) + len(wish.crowds) * (RUNS + 1) + checked
