"""Whether speculation pays, from recorded drafts and measured times. Arithmetic alone: no model and no clock.

A plain step of B sequences takes T(B, 0, 0) ms and yields one token for each. A round with K drafts takes
T(B, B, B K) + P(B, K) ms and yields E = 1 + S_1 + ... + S_K tokens for each, where S_j is the share of rounds
whose first j drafts are all accepted. T and P are the cost model of the engine (`control.cost`), fitted to
the measured rounds. With one acceptance rate a at every position S_j = a^j (Leviathan 2023, eq. 1).

E is counted. What each method drafts at every position of a plainly generated text is known, so the rounds
that speculation would have run are walked: from a position over the accepted drafts and one token more. That
is exact for greedy and for seeded texts, at every K and for every chain of methods. The mean over all
positions is higher: rounds begin after rejected drafts, where drafting is harder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

from speculon.bench.cell import at_share
from speculon.bench.rounds import equal_acceptance
from speculon.cascade import ask_in_turn
from speculon.control.acceptance import POSITIONS, Acceptance
from speculon.control.cost import Costs
from speculon.core import Ask, Proposal

DRAWS = 200  # resampled sets of texts behind an interval
REFITS = 12  # cost models fitted to resampled rounds, which the draws use in turn: one fit takes 0.2 s
PASSES = 4  # over the rounds: the cost model forgets, and begins at nothing
INTERVAL = (0.05, 0.95)


class Recorded(NamedTuple):
    """What a method drafted at one position: how many tokens, and how many of the first ones are what
    follows.
    """

    length: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Text:
    """A plainly generated text: the length of its prompt, and what each method drafted after each of its
    tokens.
    """

    prompt: int
    drafts: Sequence[Mapping[str, Recorded]]


@dataclass(frozen=True, slots=True)
class Way:
    """A value of `method`, and the methods behind it in the order they are asked."""

    name: str
    chain: tuple[str, ...]


class Walk(NamedTuple):
    """The rounds that a way of drafting needs for some texts.

    The last two are by method, in the order of the chain.
    """

    rounds: int
    tokens: int
    drafting: int  # rounds with a draft
    drafts: int
    accepted: int
    asked: tuple[int, ...]  # rounds in which the method was asked
    unread: tuple[int, ...]  # tokens that the method had to read before it drafted

    @property
    def tokens_per_call(self) -> float:
        """E."""
        return self.tokens / self.rounds


def walk(text: Text, chain: Sequence[str], k: int, acceptance: Acceptance) -> Walk:
    """The rounds over one text when the methods of `chain` are asked in turn for at most `k` drafts;
    `acceptance` learns.
    """
    asks = {0: [Ask(method, k) for method in chain]}
    asked, unread, has = (dict.fromkeys(chain, 0) for _ in range(3))
    at = rounds = drafting = drafts = accepted = 0
    length = right = 0

    def propose(method: str, rooms: dict[int, int]) -> Iterable[int]:
        nonlocal length, right
        found, tokens = text.drafts[at].get(method, Recorded(0, 0)), text.prompt + 1 + at
        length, right = min(found.length, k), min(found.accepted, k)
        asked[method] += 1
        unread[method] += max(0, tokens - has[method] - 1)
        has[method] = tokens + min(right, max(0, length - 1))
        return rooms if length else ()

    while at < len(text.drafts):
        length = right = 0
        ask_in_turn(asks, propose)
        rounds, drafts, accepted = rounds + 1, drafts + length, accepted + right
        if length:
            drafting += 1
            acceptance.observe(min(length, right + (at + right < len(text.drafts))), right)
        at += right + 1
    return Walk(
        rounds, len(text.drafts), drafting, drafts, accepted, tuple(asked.values()), tuple(unread.values())
    )


def total(walks: Iterable[Walk]) -> Walk:
    rounds, tokens, drafting, drafts, accepted, *by_method = zip(*walks, strict=True)
    asked, unread = (tuple(map(sum, zip(*some, strict=True))) for some in by_method)
    return Walk(sum(rounds), sum(tokens), sum(drafting), sum(drafts), sum(accepted), asked, unread)


def by_position(acceptance: Acceptance) -> list[float]:
    """Acceptance rate at position 1, 2, .. of drafts that were judged: those before them were accepted."""
    rates = map(acceptance.rate, range(POSITIONS))
    return [rate for rate in rates if rate is not None]


# costs


class Timed(NamedTuple):
    """A round that was timed: a step of the target, and the proposals before it."""

    sequences: int
    drafting: int  # sequences with drafts
    rows: int  # drafts of all of them
    ms: float  # without the proposals
    proposals: Mapping[str, Proposal]


@dataclass(frozen=True, slots=True)
class Fit:
    """The cost model fitted to some rounds, and the methods that read a sequence before they draft."""

    costs: Costs
    readers: frozenset[str]

    @classmethod
    def of(cls, rounds: Sequence[Timed], rng: Random) -> Fit:
        """In random order: the model forgets, and no batch size is to be the last."""
        costs = Costs()
        for _ in range(PASSES):
            for one in rng.sample(rounds, len(rounds)):
                costs.observe_step(one.sequences, one.drafting, one.rows, one.ms)
                for method, call in one.proposals.items():
                    costs.observe_proposal(method, call)
        return cls(
            costs,
            frozenset(method for one in rounds for method, call in one.proposals.items() if call.unread),
        )

    def misfit(self, rounds: Sequence[Timed]) -> float:
        """Median relative error of a step's time."""
        return median(
            abs(self.costs.step(one.sequences, one.drafting, one.rows) / max(one.ms, 1e-6) - 1)
            for one in rounds
        )

    def step_ms(self, batch: int, done: Walk) -> float:
        """Mean time of a step of sequences that draft independently, each in the share of rounds that was
        found.
        """
        share, rows = done.drafting / done.rounds, done.drafts / max(1, done.drafting)
        none, every = (1 - share) ** batch, share**batch
        some = 1 - none - every
        ms = none * self.costs.step(batch)
        if every:
            ms += every * self.costs.step(batch, batch, batch * rows)
        if some > 1e-9:
            drafting = batch * (share - every) / some
            ms += some * self.costs.step(batch, drafting, drafting * rows)
        return ms

    def proposal_ms(self, method: str, asked: float, batch: int, k: int) -> float:
        """Mean time of a method's proposal per step, where each sequence asks it in this share of rounds."""
        price = self.costs.prices(method, batch)
        return (1 - (1 - asked) ** batch) * (price.call + price.depth * k) + price.draft * k * batch * asked

    def read_ms(self, method: str, unread: float, batch: int) -> float:
        """Mean time of reading per step, where each sequence has so many tokens to read: all wait while one
        is read.
        """
        return self.costs.prices(method, batch).unread * unread * batch if method in self.readers else 0.0

    def full_round(self, chain: Sequence[str], batch: int, k: int) -> float:
        """ms of a round in which every sequence has K drafts, of the last method of the chain."""
        return self.costs.step(batch, batch, batch * k) + sum(
            self.costs.proposal(method, batch, k) for method in chain
        )


def fits(rounds: Sequence[Timed], seed: int = 0) -> list[Fit]:
    """The cost model fitted to all rounds, then to rounds that are drawn anew."""
    rng = Random(seed)
    return [Fit.of(rounds, rng), *(Fit.of(rng.choices(rounds, k=len(rounds)), rng) for _ in range(REFITS))]


# speed


@dataclass(frozen=True, slots=True)
class Speed:
    """A round, and how many times as fast as plain decoding it makes it."""

    ratio: float
    tokens_per_call: float  # E
    plain_ms: float
    verify_ms: float
    draft_ms: float
    # the drafters' reading of prompts and of tokens that others drafted, spread over all rounds
    read_ms: float

    @property
    def round_ms(self) -> float:
        return self.verify_ms + self.draft_ms + self.read_ms


def speed(done: Walk, way: Way, k: int, batch: int, fit: Fit) -> Speed:
    """E * plain_ms / (verify_ms + draft_ms + read_ms) of the walked rounds, in batches of this size."""
    e, rounds = done.tokens_per_call, done.rounds
    plain_ms, verify_ms = fit.costs.step(batch), fit.step_ms(batch, done)
    draft_ms = sum(
        fit.proposal_ms(method, n / rounds, batch, k) for method, n in zip(way.chain, done.asked, strict=True)
    )
    read_ms = sum(
        fit.read_ms(method, n / rounds, batch) for method, n in zip(way.chain, done.unread, strict=True)
    )
    return Speed(e * plain_ms / (verify_ms + draft_ms + read_ms), e, plain_ms, verify_ms, draft_ms, read_ms)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted speed of a setting, with a 90 % interval from texts and times that are drawn anew."""

    way: Way
    k: int
    batch: int
    speed: Speed
    low: float
    high: float
    acceptance: Acceptance

    @property
    def ratio(self) -> float:
        return self.speed.ratio

    @property
    def draft_cost(self) -> float:
        """ms of one draft / ms of a plain step: the size ratio that counts."""
        return self.speed.draft_ms / max(1, self.k) / self.speed.plain_ms


def estimate(
    texts: Sequence[Text],
    ways: Sequence[Way],
    ks: Iterable[int],
    batches: Sequence[int],
    worlds: Sequence[Fit],
    seed: int = 0,
) -> list[Estimate]:
    """Every way at every K and batch size, by the first of the fits.

    The interval draws texts, the same ones for all settings.
    """
    rng, found = Random(seed), list[Estimate]()
    drawn = [rng.choices(range(len(texts)), k=len(texts)) for _ in range(DRAWS)]
    for way, k in [(way, k) for way in ways for k in ks]:
        acceptance = Acceptance(fade=1.0)
        walks = [walk(text, way.chain, k, acceptance) for text in texts]
        whole, wholes = total(walks), [total(walks[i] for i in chosen) for chosen in drawn]
        for batch in batches:
            ratios = sorted(
                speed(one, way, k, batch, worlds[1 + i % (len(worlds) - 1)]).ratio
                for i, one in enumerate(wholes)
            )
            low, high = (at_share(ratios, share) for share in INTERVAL)
            found.append(
                Estimate(way, k, batch, speed(whole, way, k, batch, worlds[0]), low, high, acceptance)
            )
    return found


def best(estimates: Iterable[Estimate]) -> Estimate:
    """The fastest; among equals the shallowest."""
    return min(estimates, key=lambda one: (-one.ratio, one.k))


# what it would take


def break_even(round_costs: Sequence[float]) -> tuple[float, int] | None:
    """The lowest acceptance rate from which on some K pays, and that K; None when none would even if every
    draft were accepted.

    `round_costs[K - 1]` is (draft_ms(K) + verify_ms(K + 1)) / plain_ms. It is the a of
    sum_{i=0..K} a^i = round_costs[K - 1], at the K where it is lowest.
    """
    needed = [(a, k) for k, cost in enumerate(round_costs, 1) if (a := equal_acceptance(cost, k)) is not None]
    return min(needed) if needed else None


def dearest_draft(estimates: Iterable[Estimate]) -> float:
    """The most that a draft may cost, as a share of a plain step, for some K to pay at the acceptance found;
    below 0: none may.

    E * plain_ms = r * K * plain_ms + verify_ms + read_ms, solved for r, at the K where it is largest.
    """
    speeds = [(one.k, one.speed) for one in estimates]
    return max(
        (now.tokens_per_call * now.plain_ms - now.verify_ms - now.read_ms) / (k * now.plain_ms)
        for k, now in speeds
    )
