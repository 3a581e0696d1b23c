"""What the engine has learned of itself: how often drafts stand, and what steps and proposals cost. Numbers only.

All of it fades: old evidence loses weight with every new one, so that what has changed is believed again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import exp, log, log1p, log2, prod, sqrt
from operator import mul
from typing import Any

POSITIONS = 16  # deeper ones are taken for the last
EDGES = (-2.0, -1.0, -0.2, 0.35, 0.9, 1.25, 1.5, 2.5, 4.0)  # guess: log-odds that part the classes of confidence
BOUNDS = [1 / (1 + exp(-edge)) for edge in EDGES]
PRIOR = 0.6  # guess: acceptance of a method that nothing is known of; hopeful, so that it is tried
PRIOR_TRIES = 4.0
OWN_TRIES = 6.0  # guess: drafts of one text after which its own evidence weighs as much as everybody's
APART, APART_FADE = 8.0, 0.995  # guess: log-odds at most that texts differ, or do not, and what is left of them after a proposal
FADE = 0.98  # per observation and position of a method
OWN_FADE = 0.97  # per draft of a text
SURE = 0.999
REFRESH = 16  # drafts after which chances are computed anew, sooner while few were seen
BAD_LUCK = 7.0  # nats: drafts in a row of which nothing stands count for more than their share where that is less likely
KINDS = 10  # of texts, to either side of the usual one
SHIFTS = {kind: 2 ** (kind / 2) for kind in range(-KINDS, KINDS + 1)}
HOPE = 0.15  # guess: tokens that a look-up brings in a text that nothing is known of
HOPE_FADE = 0.1  # per round
UNSURE = 0.2  # of what was found in an earlier run, as a share of it
NOISE = 0.01  # variance of one measurement, relative
DRIFT = 0.004  # standard deviation per step by which a cost may change, relative
READ_SHARE = 0.03  # guess: of a proposal of one draft, what a token costs that is only read; until some were
COLD_CALLS = 3  # guess: of a method, before its cost is believed
OUTLIER = 2.0  # times the estimate
SETTLED, EVERY = 64, 3  # measurements after which only one in so many is taken in: no common rhythm has this period
OF_LATE = 0.1  # weight of the last step in what steps like it take
STALE = 0.002  # guess: of what is known of other steps, that is given up with each
CALL_STALE = 0.02  # guess: of what is known of other calls of a method
LEAST_MS = 1e-3  # of a step: no model is as fast


def grades_of(confidence: tuple[float, ...] | None, count: int) -> list[int]:
    """The classes of the first `count` drafts, by a drafter's own confidence in (0, 1); 0 where it says nothing."""
    return [1 + bisect_right(BOUNDS, value) if value else 0 for value in confidence[:count]] if confidence else [0] * count


@dataclass(slots=True)
class Share:
    """A fading share of hits among tries."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, hits: float, tries: float, fade: float) -> None:
        self.hits, self.tries = self.hits * fade + hits, self.tries * fade + tries

    def mean(self, prior: float, weight: float) -> float:
        return (self.hits + weight * prior) / (self.tries + weight)


class Acceptance:
    """How often the drafts of one method stand: P(d_j is right | d_1..d_j-1 were), by position and class of confidence.

    What lies beyond the first wrong draft, or beyond the end of a text, was never judged and counts for nothing.
    """

    def __init__(self, wider: Acceptance | None = None, others: Acceptance | None = None) -> None:
        self._wider = wider  # what is known of texts of every kind: believed until there is more
        self._others = others  # of the same texts, by others' choice: believed first
        self._followers: list[Acceptance] = []  # that believe this first
        if others:
            others._followers.append(self)
        self._overall = Share()
        # (position, class); position POSITIONS: of the whole class, class 0: of all drafts there
        self._at: dict[tuple[int, int], Share] = {}
        self._chances: dict[tuple[int, int], float] = {}  # as read since the last refresh
        self._survivals: dict[tuple[int, int], list[float]] = {}
        self._stale = 0
        self._seen = 0  # drafts that were ever judged
        self._apart = 0.0  # nats by which texts' own evidence has told of late better what becomes of their drafts

    @property
    def trust(self) -> float:
        """P(texts differ), else what a text shows of itself is luck."""
        return 1 / (1 + exp(-self._apart))

    def compare(self, gain: float) -> None:
        """The fate of a proposal was told better by its text's own evidence by so many nats."""
        self._apart = max(-APART, min(APART, self._apart * APART_FADE + gain))

    def chance(self, position: int, grade: int = 0) -> float:
        """Of the draft at `position` (from 0), for a text that nothing is known of."""
        key = position if position < POSITIONS else POSITIONS - 1, grade
        found = self._chances.get(key)
        if found is None:
            found = self._chances[key] = self._now(*key)
        return found

    def chances(self, grades: Sequence[int]) -> list[float]:
        """Of the first drafts, which are of these classes."""
        found = self._chances
        return [found[key] if key in found else self.chance(*key) for key in zip(places(), grades, strict=False)]

    def _now(self, position: int, grade: int) -> float:
        return self._share(position, grade).mean(self._of(position, grade), PRIOR_TRIES)

    def _of(self, position: int, grade: int) -> float:
        """Of a draft of this class at any position; as others fare at this one, until there is more."""
        known = self._share(POSITIONS, grade) if grade else self._overall
        if self._others:
            prior = self._others._now(position, grade)
        elif self._wider:
            prior = self._wider._of(position, grade)
        else:
            prior = self._of(position, 0) if grade else PRIOR
        return known.mean(prior, PRIOR_TRIES)

    def survival(self, kind: int, k: int) -> list[float]:
        """P(d_1..d_j all stand), j = 1..k, in a text of a kind, where the drafter has said nothing of its confidence yet.

        Each is taken a standard deviation higher, that of all that was ever seen: what had bad luck at first would not be
        tried again, but hope ends with experience.
        """
        found = self._survivals.get((kind, k))
        if found is None:
            tries = PRIOR_TRIES + self._seen + (self._others._seen if self._others else 0)
            hoped = [hopeful(chance, tries) for chance in self.chances([0] * k)]
            found = self._survivals[kind, k] = list(accumulate(shifted(hoped, kind), mul))
        return found

    def observe(self, grades: Sequence[int], accepted: int) -> None:
        """Drafts of these classes were judged, and the first `accepted` stood: all of them, or all but the last."""
        judged = len(grades)
        self._seen += judged
        if self._wider:
            self._wider.observe(grades, accepted)
        self._stale += 1
        if self._stale >= min(REFRESH, self._seen / REFRESH):
            self._refresh()
        self._overall.add(accepted, judged, FADE**judged)
        hits = chain(repeat(1.0, accepted), repeat(0.0))
        for place, grade, hit in zip(places(), grades, hits, strict=False):
            for key in ((place, grade), (POSITIONS, grade), (place, 0)) if grade else ((place, grade),):
                share = self._at.get(key) or self._share(*key)  # for each draft of each round: what follows is no call
                share.hits, share.tries = share.hits * FADE + hit, share.tries * FADE + 1.0

    def doubt(self) -> None:
        """Everything known weighs half: something has changed. Hope is no larger for it."""
        self._refresh()
        for share in (self._overall, *self._at.values()):
            share.hits, share.tries = share.hits / 2, share.tries / 2

    def state(self) -> dict[str, Any]:
        cells = [[*key, share.hits, share.tries] for key, share in self._at.items()]
        return {"seen": self._seen, "overall": [self._overall.hits, self._overall.tries], "cells": cells}

    def restore(self, state: dict[str, Any]) -> None:
        self._seen, self._overall = state["seen"], Share(*state["overall"])
        self._at = {(position, grade): Share(hits, tries) for position, grade, hits, tries in state["cells"]}
        self._refresh()

    def _refresh(self) -> None:
        self._stale = 0
        self._chances.clear()
        self._survivals.clear()
        for follower in self._followers:
            follower._refresh()

    def _share(self, position: int, grade: int) -> Share:
        found = self._at.get((position, grade))
        if found is None:
            found = self._at[position, grade] = Share()
        return found


@dataclass(slots=True)
class Own:
    """How one text departs from what is expected of a method: hits against expected hits, as a factor of the odds."""

    hits: float = 0.0
    expected: float = 0.0
    tries: float = 0.0
    shift: int = 0  # log2 of the factor, in half steps: so that texts of one kind share their numbers
    unlikely: float = 0.0  # nats: the drafts in a row of which nothing stood
    worth: float = HOPE  # tokens that it has brought to a round of late

    def observe(self, acceptance: Acceptance, grades: Sequence[int], accepted: int) -> None:
        """Drafts of these classes were judged, and the first `accepted` stood; `acceptance` is that of all such texts."""
        chances = acceptance.chances(grades)
        if self.shift:
            odds = SHIFTS[self.shift]
            acceptance.compare(accepted * log(odds) - log(prod(1 - chance + chance * odds for chance in chances)))
        fade = OWN_FADE ** len(chances)
        self.hits = self.hits * fade + accepted
        self.expected = self.expected * fade + sum(chances)
        self.tries = self.tries * fade + len(chances)
        self.unlikely = 0.0 if accepted else self.unlikely - log1p(-min(SURE, chances[0]))
        self._sort()

    def doubt(self) -> None:
        self.hits, self.expected, self.tries, self.unlikely = self.hits / 4, self.expected / 4, self.tries / 4, 0.0
        self._sort()

    def kind(self, acceptance: Acceptance) -> int:
        """The shift that is believed, as far as texts of its sort differ, less for a run of bad luck."""
        return max(-KINDS, round(acceptance.trust * self.shift) - int(max(0.0, self.unlikely - BAD_LUCK)))

    def chances(self, acceptance: Acceptance, grades: Sequence[int]) -> list[float]:
        """Of this text's next drafts, which are of these classes."""
        return shifted(acceptance.chances(grades), self.kind(acceptance))

    def _sort(self) -> None:
        self.shift = max(-KINDS, min(KINDS, round(2 * log2(self._odds(self.hits) / self._odds(self.expected)))))

    def asked(self, gained: float) -> None:
        self.worth += HOPE_FADE * (gained - self.worth)

    def _odds(self, hits: float) -> float:
        return (hits + OWN_TRIES / 2) / (self.tries - hits + OWN_TRIES / 2)


def hopeful(chance: float, tries: float) -> float:
    """A standard deviation above, after so many tries."""
    return min(SURE, chance + sqrt(chance * (1 - chance) / tries))


def shifted(chances: list[float], kind: int) -> list[float]:
    """With the odds of a text of a kind."""
    odds = SHIFTS[kind]
    return [chance * odds / (1 - chance + chance * odds) for chance in chances]


def places() -> Iterator[int]:
    """Of the first draft, the second, and so on."""
    return chain(range(POSITIONS - 1), repeat(POSITIONS - 1))


Four = tuple[float, float, float, float]


class Fit:
    """Milliseconds as a sum of four positive parts: recursive least squares on relative errors, with fading (Ljung 1999, 11.2).

    Sums are written out: this runs several times in each round, and loops over four numbers take three times as long.
    """

    def __init__(self) -> None:
        self.parts: tuple[float, ...] = ()  # ms of each feature; none before a guess
        self._p: list[list[float]] = []  # how uncertain they are
        self._count = 0

    def at(self, features: Four) -> float:
        a, b, c, d = self.parts
        x, y, z, w = features
        return (a * x if a > 0 else 0.0) + (b * y if b > 0 else 0.0) + (c * z if c > 0 else 0.0) + (d * w if d > 0 else 0.0)

    def guess(self, parts: Four, spread: Four) -> None:
        """A beginning, and its standard deviations."""
        self.parts = parts
        self._p = [[spread[i] ** 2 * (i == j) for j in range(4)] for i in range(4)]

    def observe(self, features: Four, ms: float) -> None:
        self._count += 1
        if ms <= 0 or (self._count > SETTLED and self._count % EVERY):  # 0: a clock too coarse for it
            return
        believed = max(LEAST_MS, self.at(features))
        slow = ms > OUTLIER * believed  # another process took the core
        # Relative to what is believed: if to what was measured, slow ones would count for less, and costs for too little.
        scale = ms if slow else believed
        x, y, z, w = (value / scale for value in features)
        a, b, c, d = self.parts
        error = ms / scale - (a * x + b * y + c * z + d * w)
        px, py, pz, pw = gain = [p * x + q * y + r * z + s * w for p, q, r, s in self._p]
        total = NOISE * (16.0 if slow else 1.0) + x * px + y * py + z * pz + w * pw
        step = error / total
        parts = [a + px * step, b + py * step, c + pz * step, d + pw * step]
        for i, (p, q, r, s) in enumerate(self._p):
            g = gain[i] / total
            self._p[i] = row = [p - g * px, q - g * py, r - g * pz, s - g * pw]
            row[i] += (DRIFT * parts[i]) ** 2  # it may change with time
        for i, row in enumerate(self._p):
            if parts[i] < 0:  # what the others are most likely to be, if this one is 0
                short = parts[i] / row[i]
                parts = [part - short * p for part, p in zip(parts, row, strict=True)]
        self.parts = (*parts,)


class Cost:
    """Of something that is done again and again, in ms."""

    def __init__(self) -> None:
        self._fit = Fit()

    @property
    def known(self) -> bool:
        return bool(self._fit.parts)

    def state(self) -> list[float]:
        return list(self._fit.parts)

    def restore(self, state: list[float]) -> None:
        if state:
            a, b, c, d = state
            self._fit.guess((a, b, c, d), (UNSURE * abs(a), UNSURE * abs(b), UNSURE * abs(c), UNSURE * abs(d)))


class StepCost(Cost):
    """Of a step that decodes `texts` texts, `drafting` of them with `drafts` rows of drafts in all: base + per text
    + per drafting text + per draft. In ms. A first draft costs more than the next ones: single rows have faster ways.

    A sum that fits all steps a little fits none: what a plain step of so many texts takes of late is known by itself, and what
    one takes in which all of them draft is followed as a factor. Where a plain step is believed to cost 5 % more than it does,
    drafts seem to pay that do not. What is not measured for long goes back to the sum. The factor is learned from a policy's
    own drafts: others may draft alike for all texts, which is less work than where they differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[int, float] = {}  # texts -> ms
        self._beside: dict[int, float] = {}  # texts that all draft -> factor

    def restore(self, state: list[float]) -> None:
        super().restore(state)
        self._plain.clear()
        self._beside.clear()

    def first(self, texts: int) -> float:
        """What a text's first draft costs beyond its row, where all of these texts draft."""
        return max(0.0, (self.at(texts, texts, texts) - self.at(texts, 0, 0)) / texts - self.row)

    @property
    def row(self) -> float:
        return max(0.0, self._fit.parts[3])

    def at(self, texts: int, drafting: int, drafts: int) -> float:
        """Never nothing: a fit of noisy times may say so, and rates are divided by it. Never less for more drafts."""
        if not drafting and texts in self._plain:
            return self._plain[texts]
        factor = self._beside.get(texts, 1.0) if drafting == texts else 1.0
        return max(LEAST_MS, factor * self._fit.at((1.0, texts, drafting, drafts)))

    def fade(self, texts: int) -> None:
        """A round of so many texts goes by."""
        self._beside[texts] = toward_sum(self._beside.get(texts, 1.0), STALE)

    def observe(self, texts: int, drafting: int, drafts: int, ms: float, own: bool = True) -> None:
        if not self.known:
            alone = ms / (1 + 0.1 * texts)
            self._fit.guess(
                (0.9 * alone, 0.1 * alone, 0.03 * alone, 0.03 * alone), (alone, 0.1 * alone, 0.1 * alone, 0.05 * alone)
            )
        self._fit.observe((1.0, texts, drafting, drafts), ms)
        if ms <= 0:
            return
        before = self.at(texts, drafting, drafts)
        slow = ms > OUTLIER * before  # once it is another process, again and again it is so
        now = before + (OF_LATE / 16 if slow else OF_LATE) * (min(ms, OUTLIER * before) - before)
        if not drafting:
            self._plain[texts] = now
        elif own and drafting == texts:
            self._beside[texts] = now / max(LEAST_MS, self._fit.at((1.0, texts, drafting, drafts)))
        if drafting and texts in self._plain:
            self._plain[texts] += STALE * (self._fit.at((1.0, texts, 0, 0)) - self._plain[texts])


class ProposalCost(Cost):
    """Of one proposal for `texts` texts of up to `k` drafts each, `unread` tokens of which it reads first: base + per draft
    + per draft of each text + per unread token. In ms.

    It is known from a few calls on: the first one reads whole prompts, and finds its weights in no cache. What a policy's own
    calls for so many texts take beside the sum is followed as a factor: others may ask in every round, and find more in caches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._beside: dict[int, float] = {}  # texts -> factor

    @property
    def known(self) -> bool:
        return self._calls >= COLD_CALLS

    def restore(self, state: list[float]) -> None:
        super().restore(state)
        self._calls = COLD_CALLS if state else 0
        self._beside.clear()

    @property
    def row(self) -> float:
        """Of one more draft of one text."""
        return max(0.0, self._fit.parts[2]) if self.known else 0.0

    @property
    def read(self) -> float:
        """Of a token that is only read."""
        return max(0.0, self._fit.parts[3]) if self.known else 0.0

    def at(self, texts: float, k: int, unread: int = 0) -> float:
        """Nothing while it is not known: so it is seen."""
        if not (self.known and texts and k):
            return 0.0
        factor = self._beside.get(max(1, round(texts)), 1.0)
        return factor * self._fit.at((1.0, k, k * texts, 0)) + self.read * unread

    def observe(self, texts: int, k: int, ms: float, unread: int = 0, own: bool = True) -> None:
        self._calls += 1
        if not self._fit.parts:
            drafts = k * texts
            call = ms / (1 + READ_SHARE * unread / drafts)
            parts = (0.1 * call, 0.8 * call / k, 0.1 * call / drafts, READ_SHARE * call / drafts)  # guess
            self._fit.guess(parts, (ms, ms / k, ms / drafts, READ_SHARE * ms / drafts))
        self._fit.observe((1.0, k, k * texts, unread), ms)
        if own and self.known and ms > 0:  # 0: a clock too coarse for it
            self._follow(texts, ms - self.read * unread, max(LEAST_MS, self._fit.at((1.0, k, k * texts, 0))))

    def _follow(self, texts: int, ms: float, believed: float) -> None:
        for other in self._beside:
            self._beside[other] = toward_sum(self._beside[other], CALL_STALE)
        before = self._beside.get(texts, 1.0)
        slow = ms > OUTLIER * before * believed
        now = min(max(ms / believed, 1 / OUTLIER), OUTLIER * before)
        self._beside[texts] = before + (OF_LATE / 16 if slow else OF_LATE) * (now - before)


def toward_sum(factor: float, part: float) -> float:
    """What is not measured for long goes back to 1."""
    return 1.0 + (1 - part) * (factor - 1.0)
