"""How often drafts are accepted: discounted Beta estimates, by position and by the drafter's own confidence."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import exp, log2, sqrt
from operator import mul
from typing import Annotated

from pydantic import Field, TypeAdapter

POSITIONS = 16  # deeper ones count as the last: the most drafts of a round under this policy
BUCKETS = [1 / (1 + exp(-edge)) for edge in (-2.0, -1.0, 0.0, 0.7, 1.25, 2.0, 4.0)]  # edges of confidence, by log-odds: a guess
PRIOR = 0.6  # acceptance before anything is known: the mean over methods and workloads of docs/benchmarks/2-cores
PRIOR_DRAFTS = 4.0  # judged drafts that a prior weighs; that of a sequence too, its class
FADE = 0.99  # weight left to earlier drafts by a judged one at the same place, a memory of 100: least regret in virtual_time
OWN_FADE = 0.95  # the same of one sequence's drafts, a memory of 20

ANY = POSITIONS  # the place that all positions share
Weight = Annotated[float, Field(ge=0, le=1e9)]
Place = tuple[Annotated[int, Field(ge=0, le=ANY)], Annotated[int, Field(ge=0, le=len(BUCKETS) + 1)], Weight, Weight]
STATE: TypeAdapter[dict[str, dict[str, list[Place]]]] = TypeAdapter(dict[str, dict[str, list[Place]]])  # by class and method


def buckets_of(confidence: tuple[float, ...] | None, count: int) -> list[int]:
    """The confidence buckets of the first `count` drafts, from 1 on; 0 where the drafter gives no confidence."""
    return [1 + bisect_right(BUCKETS, value) if value else 0 for value in confidence[:count]] if confidence else [0] * count


@dataclass(slots=True)
class Beta:
    """Discounted counts, and their mean with its prior."""

    mean: float = PRIOR
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, hits: float, tries: float, prior: float, fade: float = FADE) -> None:
        self.hits, self.tries = fade * self.hits + hits, fade * self.tries + tries
        self.mean = (self.hits + PRIOR_DRAFTS * prior) / (self.tries + PRIOR_DRAFTS)


class Acceptance:
    """P(d_j accepted | d_1..d_j-1 accepted) of one method, by position j and confidence bucket.

    What follows the first rejected draft, or the end of a sequence, was never judged and counts for nothing. The prior of a
    position is the mean over positions; the prior of that is `wider`, what is known of the same method elsewhere.
    With `fade` = 1 nothing is discounted.
    """

    def __init__(self, wider: Acceptance | None = None, fade: float = FADE) -> None:
        self._wider, self._fade = wider, fade
        self._at: defaultdict[tuple[int, int], Beta] = defaultdict(Beta)
        self._survivals: dict[int, tuple[float, ...]] = {}  # by shift, until the next observation
        self.seen = 0.0  # judged drafts, not discounted

    def chance(self, position: int, bucket: int = 0) -> float:
        found = self._at.get((position if position < POSITIONS else POSITIONS - 1, bucket))
        return self.overall(bucket) if found is None else found.mean

    def overall(self, bucket: int = 0) -> float:
        """Over all positions."""
        found = self._at.get((ANY, bucket))
        return self._prior(ANY, bucket) if found is None else found.mean

    def _prior(self, place: int, bucket: int) -> float:
        if place != ANY:
            return self.overall(bucket)
        return self._wider.overall(bucket) if self._wider else self.overall() if bucket else PRIOR

    def rate(self, position: int = ANY) -> float | None:
        """Accepted / judged drafts at a position, or at all, without a prior; None where none was judged."""
        found = self._at.get((position, 0))
        return found.hits / found.tries if found and found.tries else None

    def chances(self, buckets: Sequence[int], shift: int = 0) -> list[float]:
        """Of the first drafts, which are of these buckets, in a sequence of this shift."""
        return shifted([self.chance(place, bucket) for place, bucket in enumerate(buckets)], shift)

    def survival(self, shift: int = 0) -> tuple[float, ...]:
        """S_1..S_POSITIONS, S_j = P(d_1..d_j accepted), before anything is drafted.

        Each chance is taken a standard deviation of its estimate higher: the bonus of UCB (Auer 2002).
        """
        if shift not in self._survivals:
            tries = PRIOR_DRAFTS + self.seen
            bounds = [min(1.0, c + sqrt(c * (1 - c) / tries)) for c in map(self.chance, range(POSITIONS))]
            self._survivals[shift] = tuple(accumulate(shifted(bounds, shift), mul))
        return self._survivals[shift]

    def observe(self, buckets: Sequence[int], accepted: int) -> None:
        """Drafts of these buckets were judged, and the first `accepted` accepted: all of them, or all but the last."""
        if self._wider:
            self._wider.observe(buckets, accepted)
        self.seen += len(buckets)
        self._survivals.clear()
        for position, (bucket, hit) in enumerate(zip(buckets, fates(accepted), strict=False)):
            for each in (bucket, 0) if bucket else (0,):
                for place in (ANY, min(position, POSITIONS - 1)):
                    self._at[place, each].observe(hit, 1.0, self._prior(place, each), self._fade)

    def state(self) -> list[Place]:
        return sorted(((*key, beta.hits, beta.tries) for key, beta in self._at.items()), reverse=True)  # ANY first

    def restore(self, state: list[Place]) -> None:
        for place, bucket, hits, tries in state:
            self._at[place, bucket].observe(min(hits, tries), tries, self._prior(place, bucket))
        self.seen = self._at[ANY, 0].tries


@dataclass(slots=True)
class SequenceAcceptance:
    """How one sequence departs from its class: accepted against expected drafts, as a factor 2^(shift / 2) of the odds."""

    accepted: float = 0.0
    expected: float = 0.0
    judged: float = 0.0
    shift: int = 0

    def observe(self, acceptance: Acceptance, buckets: Sequence[int], accepted: int) -> None:
        """Drafts of these buckets were judged, and the first `accepted` accepted; `acceptance` is that of its class."""
        for chance, hit in zip(acceptance.chances(buckets), fates(accepted), strict=False):
            self.accepted = OWN_FADE * self.accepted + hit
            self.expected = OWN_FADE * self.expected + chance
            self.judged = OWN_FADE * self.judged + 1.0
        self.shift = round(2 * log2(self._odds(self.accepted) / self._odds(self.expected)))

    def _odds(self, hits: float) -> float:
        return (hits + PRIOR_DRAFTS) / (self.judged - hits + PRIOR_DRAFTS)


def fates(accepted: int) -> Iterable[float]:
    """1 for each accepted draft, then 0."""
    return chain(repeat(1.0, accepted), repeat(0.0))


def shifted(chances: Iterable[float], shift: int) -> list[float]:
    """With the odds of a sequence of this shift."""
    odds = 2 ** (shift / 2)
    return [chance * odds / (1 - chance + chance * odds) for chance in chances]
