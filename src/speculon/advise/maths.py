"""Predicted speeds, from recorded drafts and measured times. Arithmetic alone: no model and no clock.

A plain step of B sequences takes T(B, 0, 0) ms and yields one token for each. A round with K drafts takes
T(B, B, B K) + P(B, K) ms and yields E = 1 + S_1 + ... + S_K tokens for each, where S_j is the share of rounds
whose first j drafts are all accepted. T and P are the cost model of the engine (`control.cost`), fitted to
the measured rounds. With one acceptance rate a at every position S_j = a^j (Leviathan 2023, eq. 1).

E is counted. What each method drafts at every position of a plain text is known. So the rounds of a
speculative run follow one by one: from a position over the accepted drafts and one token more. That is exact
for greedy and for seeded texts, at every K and for every cascade. The mean over all positions is higher:
rounds begin after rejected drafts, where drafting is harder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

from speculon.bench.quantiles import quantile
from speculon.bench.rounds import equal_acceptance
from speculon.cascade import ask_in_turn
from speculon.control.acceptance import POSITIONS, Acceptance
from speculon.control.cost import Costs
from speculon.core import Ask, Proposal

DRAWS = 200  # resampled sets of texts behind an interval
REFITS = 12  # cost models fitted to resampled rounds, which the draws use in turn: one fit takes 0.2 s
PASSES = 4  # over the rounds: the cost model forgets, and begins without data
INTERVAL = (0.05, 0.95)


class RecordedDraft(NamedTuple):
    """What a method drafted at one position: its length, and how many of its first tokens are right."""

    length: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """A plain text: the length of its prompt, and what each method drafted after each of its tokens."""

    prompt: int
    drafts: Sequence[Mapping[str, RecordedDraft]]


@dataclass(frozen=True, slots=True)
class Cascade:
    """A value of the setting `method`, and its methods in the order in which they are asked."""

    name: str
    methods: tuple[str, ...]


class Walk(NamedTuple):
    """The rounds that a cascade needs for some texts. The last two are by method, in its order."""

    rounds: int
    tokens: int
    drafting: int  # rounds with a draft
    drafts: int
    accepted: int
    calls: tuple[int, ...]  # rounds in which the method was asked
    unread: tuple[int, ...]  # tokens that the method had to read before it drafted

    @property
    def tokens_per_call(self) -> float:
        """E."""
        return self.tokens / self.rounds


def walk(text: DraftTrace, methods: Sequence[str], k: int, acceptance: Acceptance) -> Walk:
    """The rounds over one text with at most `k` drafts each; updates `acceptance`."""
    asks = {0: [Ask(method, k) for method in methods]}
    calls, unread, has = (dict.fromkeys(methods, 0) for _ in range(3))
    at = rounds = drafting = drafts = accepted = 0
    length = right = 0

    def propose(method: str, rooms: dict[int, int]) -> Iterable[int]:
        nonlocal length, right
        found, tokens = text.drafts[at].get(method, RecordedDraft(0, 0)), text.prompt + 1 + at
        length, right = min(found.length, k), min(found.accepted, k)
        calls[method] += 1
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
        rounds, len(text.drafts), drafting, drafts, accepted, tuple(calls.values()), tuple(unread.values())
    )


def total(walks: Iterable[Walk]) -> Walk:
    rounds, tokens, drafting, drafts, accepted, *by_method = zip(*walks, strict=True)
    calls, unread = (tuple(map(sum, zip(*some, strict=True))) for some in by_method)
    return Walk(sum(rounds), sum(tokens), sum(drafting), sum(drafts), sum(accepted), calls, unread)


def by_position(acceptance: Acceptance) -> list[float]:
    """Acceptance rate at position 1, 2, .. of judged drafts: those before them were accepted."""
    rates = map(acceptance.rate, range(POSITIONS))
    return [rate for rate in rates if rate is not None]


# costs


class TimedRound(NamedTuple):
    """A step of the target, and the proposals before it."""

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
    def of(cls, rounds: Sequence[TimedRound], rng: Random) -> Fit:
        """In random order: the model forgets, so no batch size may always come last."""
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

    def misfit(self, rounds: Sequence[TimedRound]) -> float:
        """Median relative error of a step's time."""
        return median(
            abs(self.costs.step(one.sequences, one.drafting, one.rows) / max(one.ms, 1e-6) - 1)
            for one in rounds
        )

    def step_ms(self, batch: int, done: Walk) -> float:
        """Mean time of a step whose sequences draft independently, each in the share of rounds found."""
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

    def proposal_ms(self, method: str, share: float, batch: int, k: int) -> float:
        """Mean time of a method's proposals per step, where each sequence asks it in this share of rounds."""
        price = self.costs.prices(method, batch)
        return (1 - (1 - share) ** batch) * (price.call + price.depth * k) + price.draft * k * batch * share

    def read_ms(self, method: str, unread: float, batch: int) -> float:
        """Mean time per step of reading so many tokens of each sequence: all wait while one is read."""
        return self.costs.prices(method, batch).unread * unread * batch if method in self.readers else 0.0

    def full_round(self, methods: Sequence[str], batch: int, k: int) -> float:
        """ms of a round in which every sequence has K drafts, of the last method."""
        return self.costs.step(batch, batch, batch * k) + sum(
            self.costs.proposal(method, batch, k) for method in methods
        )


def bootstrap_fits(rounds: Sequence[TimedRound], seed: int = 0) -> list[Fit]:
    """The cost model fitted to all rounds, then to resampled rounds."""
    rng = Random(seed)
    return [Fit.of(rounds, rng), *(Fit.of(rng.choices(rounds, k=len(rounds)), rng) for _ in range(REFITS))]


# speed


@dataclass(frozen=True, slots=True)
class Speed:
    """A mean round, and the speed of decoding over plain."""

    ratio: float
    tokens_per_call: float  # E
    plain_ms: float
    verify_ms: float
    draft_ms: float
    read_ms: float  # of drafters, for prompts and others' drafts, spread over all rounds

    @property
    def round_ms(self) -> float:
        return self.verify_ms + self.draft_ms + self.read_ms


def speed(done: Walk, cascade: Cascade, k: int, batch: int, fit: Fit) -> Speed:
    """E * plain_ms / (verify_ms + draft_ms + read_ms) of the walked rounds, in batches of this size."""
    e, rounds = done.tokens_per_call, done.rounds
    plain_ms, verify_ms = fit.costs.step(batch), fit.step_ms(batch, done)
    draft_ms = sum(
        fit.proposal_ms(method, n / rounds, batch, k)
        for method, n in zip(cascade.methods, done.calls, strict=True)
    )
    read_ms = sum(
        fit.read_ms(method, n / rounds, batch) for method, n in zip(cascade.methods, done.unread, strict=True)
    )
    return Speed(e * plain_ms / (verify_ms + draft_ms + read_ms), e, plain_ms, verify_ms, draft_ms, read_ms)


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """The predicted speed of a setting, with a 90 % interval from resampled texts and times."""

    cascade: Cascade
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
    texts: Sequence[DraftTrace],
    cascades: Sequence[Cascade],
    ks: Iterable[int],
    batches: Sequence[int],
    fits: Sequence[Fit],
    seed: int = 0,
) -> list[SpeedEstimate]:
    """Every cascade at every K and batch size, by the first of the fits.

    The intervals resample texts, the same for all settings.
    """
    rng, found = Random(seed), list[SpeedEstimate]()
    drawn = [rng.choices(range(len(texts)), k=len(texts)) for _ in range(DRAWS)]
    for cascade, k in [(cascade, k) for cascade in cascades for k in ks]:
        acceptance = Acceptance(fade=1.0)
        walks = [walk(text, cascade.methods, k, acceptance) for text in texts]
        whole, wholes = total(walks), [total(walks[i] for i in chosen) for chosen in drawn]
        for batch in batches:
            ratios = sorted(
                speed(one, cascade, k, batch, fits[1 + i % (len(fits) - 1)]).ratio
                for i, one in enumerate(wholes)
            )
            low, high = (quantile(ratios, share) for share in INTERVAL)
            found.append(
                SpeedEstimate(
                    cascade, k, batch, speed(whole, cascade, k, batch, fits[0]), low, high, acceptance
                )
            )
    return found


def best(estimates: Iterable[SpeedEstimate]) -> SpeedEstimate:
    """The fastest; among equals the one with the smallest K."""
    return min(estimates, key=lambda one: (-one.ratio, one.k))


# what it would take


def break_even(round_costs: Sequence[float]) -> tuple[float, int] | None:
    """The lowest acceptance rate from which on some K pays, and that K; None: none ever pays.

    `round_costs[K - 1]` is (draft_ms(K) + verify_ms(K + 1)) / plain_ms. It is the a of
    sum_{i=0..K} a^i = round_costs[K - 1], at the K where it is lowest.
    """
    needed = [(a, k) for k, cost in enumerate(round_costs, 1) if (a := equal_acceptance(cost, k)) is not None]
    return min(needed) if needed else None


def dearest_draft(estimates: Iterable[SpeedEstimate]) -> float:
    """The highest cost of a draft, in plain steps, at which some K pays at the acceptance found.

    Below 0: not even a free draft pays.

    E * plain_ms = r * K * plain_ms + verify_ms + read_ms, solved for r, at the K where it is largest.
    """
    speeds = [(one.k, one.speed) for one in estimates]
    return max(
        (now.tokens_per_call * now.plain_ms - now.verify_ms - now.read_ms) / (k * now.plain_ms)
        for k, now in speeds
    )
