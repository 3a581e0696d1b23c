"""One proposal of a costly method for a crowd: for which of its texts it pays, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from speculon.control.estimate import ProposalCost
from speculon.core import Ask, Reason

MARGIN = 0.05  # of the round's rate: what a costly method for all texts must add, since the luckiest of noisy estimates is chosen
TAKE_UP = 0.1  # ms
TURNS = 2  # of Dinkelbach's iteration

# of a text, for one method: its kind, how it departs from it, its most drafts, and what its reading adds to each, in TAKE_UP ms
Kind = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """At most `k` drafts of each text that takes part."""

    k: int
    depths: Mapping[Kind, int]  # of the texts that take part: drafts that are worth their rows
    tokens: float
    ms: float
    share_ms: float  # of the call, for each text that asks

    def of(self, kind: Kind) -> int:
        """The most drafts of a text."""
        return min(self.k, self.depths.get(kind, 0))


@dataclass(frozen=True, slots=True)
class Offer:
    """The texts of a round that a method may draft for, by kind, and what that costs."""

    cost: ProposalCost
    texts: Mapping[Kind, int]
    worths: Mapping[Kind, list[float]]  # tokens that each draft of such a text is expected to add; they only fall
    first_ms: float  # of a text's first draft beyond a draft's row
    row_ms: float  # of each draft
    keeps: float = 1.0  # the part of what was hoped for that `worths` are

    def best(self, share: float, tokens: float, ms: float, crowd: int) -> Plan | None:
        """The proposal for a share of these texts, out of a crowd, that raises a round's rate most; `tokens` and `ms` are those
        without it."""
        plan, rate = None, tokens / ms
        for _ in range(TURNS):
            found = self.plan(share, rate)
            if found is None:
                break
            plan, rate = found, (tokens + found.tokens) / (ms + found.ms)
        return plan if rate > (1 + MARGIN * sum(self.texts.values()) / crowd) * tokens / ms else None

    def plan(self, share: float, rate: float) -> Plan | None:
        """The proposal that gains most where one ms could write `rate` tokens."""
        price, each = rate * self.row_ms, rate * (self.row_ms + self.cost.row)
        depths, asking, first = {}, 0.0, 0.0
        for kind, worths in self.worths.items():
            begin = self.begin_ms(kind)
            good = depth(worths, each)
            if sum(worths[:good]) > each * good + rate * begin:  # else it is better left out
                depths[kind] = depth(worths, price)
                asking += share * self.texts[kind]
                first += share * self.texts[kind] * begin
        best, most, tokens, rows = None, 0.0, 0.0, 0.0
        for k in range(1, 1 + max(depths.values(), default=0)):
            for kind, deepest in depths.items():
                if k <= deepest:
                    texts = share * self.texts[kind]
                    tokens, rows = tokens + texts * self.worths[kind][k - 1], rows + texts
            call = self.cost.at(asking, k)
            ms = call + first + rows * self.row_ms
            if tokens - rate * ms > most:
                most, best = tokens - rate * ms, Plan(k, depths, tokens, ms, call / asking)
        return best

    def begin_ms(self, kind: Kind) -> float:
        """Of a text's first draft: beyond its row, and its share of what is read."""
        return self.first_ms + TAKE_UP * kind[3]


def depth(worths: list[float], price: float) -> int:
    """How many drafts are worth more than `price`."""
    for i, worth in enumerate(worths):
        if worth <= price:
            return i
    return len(worths)


ASKS: dict[tuple[str, int], Ask] = {}


def ask(method: str, k: int) -> Ask:
    """One object for equal ones, which are asked for in every round."""
    found = ASKS.get((method, k))
    if found is None:
        found = ASKS[method, k] = Ask(method, k)
    return found


@dataclass(frozen=True, slots=True)
class Promise:
    """What a costly method would add to a round for one text."""

    ask: Ask
    tokens: float
    ms: float

    def gain(self, rate: float) -> float:
        """In tokens, where one ms could write `rate` of them."""
        return self.tokens - rate * self.ms


class Promised(NamedTuple):
    """What was promised when costly methods were last weighed."""

    to: tuple[list[int], list[str]] = [], []  # which texts, by which methods
    number: int = 0  # of the round
    best: dict[int, Promise] = {}
    refused: Reason = Reason.COOLDOWN


def promised(method: str, plan: Plan, offer: Offer, kind: Kind) -> Promise:
    k = plan.of(kind)
    return Promise(ask(method, k), sum(offer.worths[kind][:k]), plan.share_ms + offer.begin_ms(kind) + k * offer.row_ms)


def refusal(cost: ProposalCost, survival: list[float], texts: int, rate: float, first_ms: float, row_ms: float) -> Reason:
    """Why a method does not pay whose drafts survive so: in this crowd, at this acceptance, or at any; `rate` is that of a text
    that is alone."""
    one: Kind = ("", 0, 0, 0)
    sure = [1.0] * len(survival)
    pays, would = (Offer(cost, {one: 1}, {one: each}, first_ms, row_ms).plan(1, rate) is not None for each in (survival, sure))
    if pays:
        return Reason.LOAD if texts > 1 else Reason.COST
    return Reason.LOW_ACCEPTANCE if would else Reason.COST
