"""What the engine has learned of itself: how often drafts stand, and what steps and proposals cost. Numbers only.

All of it fades: old evidence loses weight with every new one, so that what has changed is believed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, log, log2
from typing import Any

POSITIONS = 16  # deeper ones are taken for the last
EDGES = (-2.0, -1.0, -0.2, 0.35, 0.9, 1.25, 1.5, 2.5, 4.0)  # guess: log-odds that part the classes of confidence
PRIOR = 0.6  # guess: acceptance of a method that nothing is known of; hopeful, so that it is tried
PRIOR_TRIES = 4.0
OWN_TRIES = 6.0  # guess: drafts of one text after which its own evidence weighs as much as everybody's
FADE = 0.98  # per observation and position of a method
OWN_FADE = 0.97  # per draft of a text
SIZES = 10  # powers of two: up to 512 texts, up to 512 rows of drafts
LEARN = 0.15  # weight of a new measurement
NEAR = 0.7  # of how far a measurement speaks for neighbours, in powers of two
OUTLIER = 2.0  # times the estimate: another process took the core; a quarter of the weight


def grade(confidence: float | None) -> int:
    """The class of a drafter's own confidence in (0, 1); 0 where it says nothing."""
    if confidence is None:
        return 0
    odds = log(max(confidence, 1e-6) / max(1 - confidence, 1e-6))
    return 1 + sum(odds >= edge for edge in EDGES)


@dataclass(slots=True)
class Share:
    """A fading share of hits among tries."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, hit: float, fade: float) -> None:
        self.hits, self.tries = self.hits * fade + hit, self.tries * fade + 1.0

    def mean(self, prior: float, weight: float) -> float:
        return (self.hits + weight * prior) / (self.tries + weight)


class Acceptance:
    """How often the drafts of one method stand: P(d_j is right | d_1..d_j-1 were), by position and class of confidence.

    What lies beyond the first wrong draft, or beyond the end of a text, was never judged and counts for nothing.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        self._overall = Share(prior * PRIOR_TRIES, PRIOR_TRIES)
        self._at: dict[tuple[int, int], Share] = {}
        self._table: list[float] = []

    def chance(self, position: int, grade: int = 0) -> float:
        """Of the draft at `position` (from 0), for a text that nothing is known of."""
        overall = self._overall.mean(PRIOR, PRIOR_TRIES)
        by_grade = self._share(POSITIONS, grade).mean(overall, PRIOR_TRIES) if grade else overall
        return self._share(min(position, POSITIONS - 1), grade).mean(by_grade, PRIOR_TRIES)

    def chances(self, k: int) -> list[float]:
        """Of the first `k` drafts of a text whose drafter says nothing of its confidence; read once for all texts of a round."""
        while len(self._table) < k:
            self._table.append(self.chance(len(self._table)))
        return self._table[:k]

    def observe(self, grades: Iterable[int], accepted: int, judged: int) -> None:
        """A draft with these classes of which the first `judged` were judged and the first `accepted` stood."""
        self._table = []
        for position, (grade, _) in enumerate(zip(grades, range(judged), strict=False)):
            hit = float(position < accepted)
            self._overall.add(hit, FADE)
            self._share(min(position, POSITIONS - 1), grade).add(hit, FADE)
            if grade:
                self._share(POSITIONS, grade).add(hit, FADE)

    def doubt(self) -> None:
        """Everything known weighs half: something has changed."""
        self._table = []
        for share in (self._overall, *self._at.values()):
            share.hits, share.tries = share.hits / 2, share.tries / 2

    def _share(self, position: int, grade: int) -> Share:
        return self._at.setdefault((position, grade), Share())

    def state(self) -> dict[str, Any]:
        cells = [[*key, share.hits, share.tries] for key, share in self._at.items()]
        return {"overall": [self._overall.hits, self._overall.tries], "cells": cells}

    def restore(self, state: dict[str, Any]) -> None:
        self._overall = Share(*state["overall"])
        self._at = {(position, grade): Share(hits, tries) for position, grade, hits, tries in state["cells"]}


@dataclass(slots=True)
class Own:
    """How one text departs from what is expected of a method: hits against expected hits, as a factor of the odds."""

    hits: float = 0.0
    expected: float = 0.0
    tries: float = 0.0
    shift: float = 1.0

    def observe(self, chances: Iterable[float], accepted: int) -> None:
        for position, chance in enumerate(chances):
            self.hits = self.hits * OWN_FADE + (position < accepted)
            self.expected = self.expected * OWN_FADE + chance
            self.tries = self.tries * OWN_FADE + 1.0
        self.shift = self._odds(self.hits) / self._odds(self.expected)

    def adjust(self, chance: float) -> float:
        return chance * self.shift / (1 - chance + chance * self.shift)

    def _odds(self, hits: float) -> float:
        return (hits + OWN_TRIES / 2) / (self.tries - hits + OWN_TRIES / 2)


class StepCost:
    """Milliseconds of a step that decodes `texts` texts with `drafts` rows of drafts in all.

    A grid over powers of two of both, read between its points. A measurement moves the points beside it and, less, those
    further away: a machine that has become slower has done so everywhere.
    """

    def __init__(self) -> None:
        self._ms: dict[tuple[int, int], float] = {}

    @property
    def known(self) -> bool:
        return bool(self._ms)

    def at(self, texts: int, drafts: int) -> float:
        """Never less for more rows."""
        return self._read(log2(max(texts, 1)), log2(1 + drafts))

    def observe(self, texts: int, drafts: int, ms: float) -> None:
        x, y = log2(max(texts, 1)), log2(1 + drafts)
        if not self._ms:
            self._seed(x, y, ms)
            return
        ratio = ms / self._read(x, y)
        learn = LEARN / 4 if ratio > OUTLIER else LEARN
        for (a, b), old in self._ms.items():
            near = exp(-((a - x) ** 2 + (b - y) ** 2) / NEAR)
            self._ms[a, b] = old * (1 + learn * max(near, 0.1) * (ratio - 1))

    def _seed(self, x: float, y: float, ms: float) -> None:
        """Guess: a row more costs a twelfth of a step of one; corrected by everything that is measured."""
        one = ms / (1 + (2**x - 1 + 2**y - 1) / 12)
        self._ms = {(a, b): one * (1 + (2**a - 1 + 2**b - 1) / 12) for a in range(SIZES) for b in range(SIZES)}

    def _read(self, x: float, y: float) -> float:
        x, y = min(x, SIZES - 1.0), min(y, SIZES - 1.0)
        a, b = min(int(x), SIZES - 2), min(int(y), SIZES - 2)
        u, v = 2 ** (x - a) - 1, 2 ** (y - b) - 1  # linear in texts and rows, not in their logarithms
        below = self._ms[a, b] * (1 - u) + self._ms[a + 1, b] * u
        above = self._ms[a, b + 1] * (1 - u) + self._ms[a + 1, b + 1] * u
        return below + max(0.0, above - below) * v

    def state(self) -> list[list[float]]:
        return [[*key, ms] for key, ms in self._ms.items()]

    def restore(self, state: list[list[float]]) -> None:
        self._ms = {(int(a), int(b)): ms for a, b, ms in state}


@dataclass(slots=True)
class ProposalCost:
    """Milliseconds of one proposal: a call for `texts` texts of up to `k` drafts each, as base + slope x k x texts^(1/2)."""

    base: float | None = None
    per_draft: float = 0.0
    _mean_k: float = field(default=0.0)

    def at(self, texts: int, k: int) -> float:
        if self.base is None or not texts or not k:
            return 0.0
        return self.base + self.per_draft * k * float(texts**0.5)

    def observe(self, texts: int, k: int, ms: float) -> None:
        work = k * texts**0.5
        if self.base is None:
            self.base, self.per_draft = ms / 2, ms / 2 / max(work, 1.0)
            return
        error = ms - self.at(texts, k)
        if error > OUTLIER * ms:
            error /= 4
        share = LEARN / (1 + work * work)  # a normalised step of least mean squares
        self.base = max(0.0, self.base + share * error)
        self.per_draft = max(0.0, self.per_draft + share * work * error)
