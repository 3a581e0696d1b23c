"""How often drafts are accepted: discounted Beta estimates, by the tokens that agree before a draft."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log2, sqrt
from operator import mul
from typing import Annotated

from pydantic import Field, TypeAdapter

from speculon.speculation.control.trees import DraftShape, best_tree

POSITIONS = 16  # the most drafts of a round under policy goodput
# agreeing tokens before a draft (matched by a lookup, or drafted) -> its place, the bucket of its statistics;
# from 8 tokens on there are four places per octave
LONG = 32  # the longest match that is told apart
PLACES = (*range(8), *(min(15, 8 + int(4 * log2(n / 8))) for n in range(8, LONG + POSITIONS)))
PRIOR = 0.6  # acceptance before anything is known: between prose and edits (docs/benchmarks/2-cores)
PRIOR_DRAFTS = 4.0  # weight of a prior, in judged drafts; for a sequence the prior is its class
# factor on the weight of earlier drafts at each judged one of the same place: prose alone is 5 % faster than
# with 0.98 (virtual_time)
FADE = 0.99
OWN_FADE = 0.95  # the same for the drafts of one sequence, which so remembers about 20

ANY = 16  # the place of all drafts together
# place of the second child of a node, which is judged if the first was not accepted; those of the third and
# of later children follow
LATER = 17
SIBLINGS = 4  # children of a node that are told apart; further ones count as the last of these
LATER_PRIOR = 0.3  # for a second child: between EAGLE-3 heads and draft models (docs/benchmarks/trees)
Weight = Annotated[float, Field(ge=0, le=1e9)]
PlaceState = tuple[Annotated[int, Field(ge=0, lt=LATER + SIBLINGS - 1)], Weight, Weight]
# by class and method
STATE: TypeAdapter[dict[str, dict[str, list[PlaceState]]]] = TypeAdapter(
    dict[str, dict[str, list[PlaceState]]]
)


@dataclass(slots=True)
class Beta:
    """Discounted counts of drafts, and their acceptance rate with a prior."""

    mean: float = PRIOR
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, hits: float, tries: float, prior: float, fade: float) -> None:
        self.hits, self.tries = fade * self.hits + hits, fade * self.tries + tries
        self.mean = (self.hits + PRIOR_DRAFTS * prior) / (self.tries + PRIOR_DRAFTS)


class Acceptance:
    """P(draft j is accepted, given that all before it are) for one method, by the place of the draft.

    The place is m + j - 1 after a match of m tokens, because an accepted draft makes the match of the next
    one longer by one. Drafters that are not lookups have m = 0. Drafts after the first rejected one, or after
    the end of a sequence, were never judged and are not counted. The prior of a place is the mean over all
    places; the prior of this mean is that of `wider`, the same method over more texts.
    """

    def __init__(self, wider: Acceptance | None = None, fade: float = FADE) -> None:
        self._wider, self._fade = wider, fade
        self._at: defaultdict[int, Beta] = defaultdict(Beta)
        # by shift, until the next observation
        self._survivals: dict[int, tuple[float, ...]] = {}
        self._trees: dict[tuple[int, int], DraftShape] = {}
        self.seen = 0.0  # judged drafts, not discounted

    def chance(self, place: int = ANY) -> float:
        """The acceptance probability at a place, or over all places."""
        beta = self._at.get(place)
        return self._prior(place) if beta is None else beta.mean

    def _prior(self, place: int) -> float:
        if place >= LATER:
            return self._wider.chance(place) if self._wider else LATER_PRIOR
        return self.chance() if place != ANY else self._wider.chance() if self._wider else PRIOR

    def chances(self, count: int, match: int = 0, shift: int = 0) -> list[float]:
        """The probabilities of the first `count` drafts after a match, for a sequence with this shift."""
        return shifted(map(self.chance, places(match, count)), shift)

    def survival(self, shift: int = 0) -> tuple[float, ...]:
        """S_1..S_POSITIONS with S_j = P(drafts 1..j are accepted), before anything is drafted.

        The first probability is raised by one standard deviation of its estimate, the bonus of UCB (Auer
        2002), so that a method with few data is tried.
        """
        if shift not in self._survivals:
            first, *others = self.chances(POSITIONS)
            bound = min(1.0, first + sqrt(first * (1 - first) / (PRIOR_DRAFTS + self.seen)))
            self._survivals[shift] = tuple(accumulate(shifted((bound, *others), shift), mul))
        return self._survivals[shift]

    @property
    def later(self) -> list[float]:
        """The probabilities of the second, third, .. child of a node, given that no better child was
        accepted.
        """
        return [self.chance(place) for place in range(LATER, LATER + SIBLINGS - 1)]

    def nodes(self, shift: int, depth: int) -> DraftShape:
        """The best tree of at most this depth, with the same probabilities as `survival` has for chains."""
        if (shift, depth) not in self._trees:
            survival = self.survival(shift)[:depth]
            chances = [b / a if a else 0.0 for a, b in pairwise((1.0, *survival))]
            self._trees[shift, depth] = best_tree(chances, self.later, POSITIONS)
        return self._trees[shift, depth]

    def observe_later(self, rank: int, accepted: bool) -> None:
        """Learns from a child that is not the first, given that no better child was accepted."""
        if self._wider:
            self._wider.observe_later(rank, accepted)
        place = LATER + min(rank, SIBLINGS - 1) - 1
        self._trees.clear()
        self._at[place].observe(float(accepted), 1.0, self._prior(place), self._fade)

    def observe(self, judged: int, accepted: int, match: int = 0) -> None:
        """Learns that of `judged` drafts the first `accepted` were accepted: all, or all but the last."""
        if self._wider:
            self._wider.observe(judged, accepted, match)
        self.seen += judged
        self._survivals.clear()
        self._trees.clear()
        for i, at in enumerate(places(match, judged)):
            for place in (ANY, at):
                self._at[place].observe(float(i < accepted), 1.0, self._prior(place), self._fade)

    def state(self) -> list[PlaceState]:
        # ANY comes first, since it is the prior of the other places
        return sorted(((place, beta.hits, beta.tries) for place, beta in self._at.items()), reverse=True)

    def restore(self, state: list[PlaceState]) -> None:
        for place, hits, tries in state:
            self._at[place].observe(min(hits, tries), tries, self._prior(place), self._fade)
        self.seen = self._at[ANY].tries


@dataclass(slots=True)
class SequenceAcceptance:
    """How a sequence differs from its class: accepted against expected drafts, as a factor 2^(shift / 2) on
    the odds of acceptance.
    """

    accepted: float = 0.0
    expected: float = 0.0
    judged: float = 0.0
    shift: int = 0

    def observe(self, chances: list[float], accepted: int) -> None:
        """Learns that of the judged drafts the first `accepted` were accepted, where the class expected the
        probabilities `chances`.
        """
        for i, chance in enumerate(chances):
            self.accepted = OWN_FADE * self.accepted + (i < accepted)
            self.expected = OWN_FADE * self.expected + chance
            self.judged = OWN_FADE * self.judged + 1.0
        self.shift = round(2 * log2(self._odds(self.accepted) / self._odds(self.expected)))

    def _odds(self, hits: float) -> float:
        return (hits + PRIOR_DRAFTS) / (self.judged - hits + PRIOR_DRAFTS)


def places(match: int, count: int) -> tuple[int, ...]:
    """The places of `count` drafts after a match."""
    first = min(match, LONG)
    return tuple(PLACES[min(n, len(PLACES) - 1)] for n in range(first, first + count))


def shifted(chances: Iterable[float], shift: int) -> list[float]:
    """The probabilities with the odds of a sequence that has this shift."""
    odds = 2 ** (shift / 2)
    return [chance * odds / (1 - chance + chance * odds) for chance in chances]
