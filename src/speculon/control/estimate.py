"""What the engine has learned of itself: how often drafts stand, and what steps and proposals cost. Numbers only.

All of it fades: old evidence loses weight with every new one, so that what has changed is believed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Any

POSITIONS = 16  # deeper ones are taken for the last
EDGES = (-2.0, -1.0, -0.2, 0.35, 0.9, 1.25, 1.5, 2.5, 4.0)  # guess: log-odds that part the classes of confidence
PRIOR = 0.6  # guess: acceptance of a method that nothing is known of; hopeful, so that it is tried
PRIOR_TRIES = 4.0
OWN_TRIES = 6.0  # guess: drafts of one text after which its own evidence weighs as much as everybody's
FADE = 0.98  # per observation and position of a method
OWN_FADE = 0.97  # per draft of a text
BASE_ROWS = 12  # guess
UNSURE = 1.0  # of a first guess, as a share of it
NOISE = 0.01  # variance of one measurement, relative
DRIFT = 0.004  # standard deviation per step by which a cost may change, relative
OUTLIER = 2.0  # times the estimate
LEAST_MS = 1e-3  # of a step: no model is as fast


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


class Fit:
    """Milliseconds as a sum of positive parts: recursive least squares on relative errors, with fading (Ljung 1999, 11.2)."""

    def __init__(self) -> None:
        self.parts: list[float] = []  # ms of each feature
        self._p: list[list[float]] = []  # how uncertain they are

    def at(self, features: tuple[float, ...]) -> float:
        return sum(max(part, 0.0) * x for part, x in zip(self.parts, features, strict=True))

    def guess(self, parts: list[float]) -> None:
        self.parts = parts
        self._p = [[(UNSURE * part) ** 2 * (i == j) for j in range(len(parts))] for i, part in enumerate(parts)]

    def observe(self, features: tuple[float, ...], ms: float) -> None:
        if ms <= 0:  # a clock too coarse for it
            return
        x = [value / ms for value in features]  # what is fitted is 1
        px = [sum(p * v for p, v in zip(row, x, strict=True)) for row in self._p]
        error = 1.0 - sum(v * part for v, part in zip(x, self.parts, strict=True))
        slow = ms > OUTLIER * self.at(features)  # another process took the core
        total = NOISE * (16.0 if slow else 1.0) + sum(v * w for v, w in zip(x, px, strict=True))
        self.parts = [part + w / total * error for part, w in zip(self.parts, px, strict=True)]
        for i, row in enumerate(self._p):
            self._p[i] = [p - px[i] * other / total for p, other in zip(row, px, strict=True)]
            self._p[i][i] += (DRIFT * self.parts[i]) ** 2  # it may change with time


class StepCost:
    """Of a step that decodes `texts` texts with `drafts` rows of drafts in all: base + per text + per draft. In ms."""

    def __init__(self) -> None:
        self._fit = Fit()

    @property
    def known(self) -> bool:
        return bool(self._fit.parts)

    def at(self, texts: int, drafts: int) -> float:
        """Never less for more rows, and never nothing: a fit of noisy times may say so, and rates are divided by it."""
        return max(LEAST_MS, self._fit.at((1.0, texts, drafts)))

    def observe(self, texts: int, drafts: int, ms: float) -> None:
        if not self.known:
            row = ms / (BASE_ROWS + texts + drafts)
            self._fit.guess([BASE_ROWS * row, row, row])
        self._fit.observe((1.0, texts, drafts), ms)

    def state(self) -> list[float]:
        return list(self._fit.parts)

    def restore(self, state: list[float]) -> None:
        self._fit.guess(list(state))


class ProposalCost:
    """Of one proposal for `texts` texts of up to `k` drafts each: base + per draft + per draft of each text. In ms."""

    def __init__(self) -> None:
        self._fit = Fit()

    @property
    def known(self) -> bool:
        return bool(self._fit.parts)

    def at(self, texts: int, k: int) -> float:
        """Nothing before the first was seen: so it is seen."""
        return self._fit.at((1.0, k, k * texts)) if self.known and texts and k else 0.0

    def observe(self, texts: int, k: int, ms: float) -> None:
        if not self.known:
            self._fit.guess([0.2 * ms, 0.5 * ms / k, 0.3 * ms / (k * texts)])  # guess
        self._fit.observe((1.0, k, k * texts), ms)
