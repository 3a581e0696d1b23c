"""Whether drafting pays, from measured guesses and measured times. Arithmetic alone: no model and no clock.

A plain step of B texts takes c_1 ms and brings each of them one token. A round takes draft_ms(K) + verify_ms(K + 1) and brings
E = 1 + S_1 + ... + S_K tokens, where S_j is the share of rounds whose first j drafts all stand. With one acceptance a at every
position S_j = a^j (Leviathan 2023, eq. 1). So drafting is E * c_1 / (draft_ms(K) + verify_ms(K + 1)) times as fast as plain.

E is counted, not modelled. What each method guesses at every position of a plainly written text is known, so the rounds that
drafting would have run over it are walked: from a position over the guesses that agree and one token more. That is exact
for greedy and for seeded texts, at every K and for every chain of methods. The mean over all positions would not be: rounds
begin after mistakes, where guessing is harder, so it promises too much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from statistics import median

from speculon.bench.cell import at_share
from speculon.bench.rounds import equal_acceptance

DRAWS = 200  # resampled worlds behind an interval
POLISH = 3  # rounds of it: a fourth changes nothing that is shown
INTERVAL = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class Guess:
    """What a method says at one position: how many tokens, and how many of the first ones are what follows."""

    length: int
    right: int


Guesses = Sequence[Mapping[str, Guess]]  # of one text, position by position: method -> guess; no entry: it has none


@dataclass(slots=True)
class Walk:
    """The rounds that a way of drafting needs for some texts."""

    texts: int = 0
    tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    asked: dict[str, int] = field(default_factory=dict)  # method -> rounds in which it was asked
    began: dict[str, int] = field(default_factory=dict)  # method -> texts that it was asked for
    judged: dict[int, int] = field(default_factory=dict)  # position -> drafts there whose forerunners all stood
    stood: dict[int, int] = field(default_factory=dict)  # position -> those of them that stood, too

    @property
    def tokens_per_round(self) -> float:
        """E."""
        return self.tokens / self.rounds

    @property
    def acceptance(self) -> float | None:
        """Of drafts whose forerunners all stood; None when nothing was drafted."""
        return sum(self.stood.values()) / sum(self.judged.values()) if self.judged else None

    @property
    def per_position(self) -> list[float]:
        """Acceptance at position 1, 2, .., of drafts whose forerunners all stood."""
        return [self.stood.get(i, 0) / n for i, n in sorted(self.judged.items())]

    @property
    def survival(self) -> list[float]:
        """S_1 .. S_K, over all rounds, those without a draft too."""
        return [self.stood.get(i, 0) / self.rounds for i in range(max(self.stood, default=-1) + 1)]


def walk(guesses: Guesses, chain: Sequence[str], k: int) -> Walk:
    """The rounds over one text when the methods of `chain` are asked in turn for at most `k` tokens, until one has some."""
    done, at = Walk(texts=1), 0
    while at < len(guesses):
        length = right = 0
        for method in chain if k else ():
            done.asked[method] = done.asked.get(method, 0) + 1
            if guess := guesses[at].get(method):
                length, right = min(guess.length, k), min(guess.right, k)
                break
        done.rounds += 1
        done.drafts += length
        for position in range(min(right + 1, length)):
            done.judged[position] = done.judged.get(position, 0) + 1
        done.tokens += min(right + 1, len(guesses) - at)
        for position in range(right):
            done.stood[position] = done.stood.get(position, 0) + 1
        at += right + 1
    done.began = dict.fromkeys(done.asked, 1)
    return done


def total(walks: Iterable[Walk]) -> Walk:
    whole = Walk()
    for one in walks:
        for part in fields(Walk):
            mine, theirs = getattr(whole, part.name), getattr(one, part.name)
            if isinstance(mine, dict):
                for key, n in theirs.items():
                    mine[key] = mine.get(key, 0) + n
            else:
                setattr(whole, part.name, mine + theirs)
    return whole


class Grid:
    """Milliseconds over (texts at once, drafts of each), linear between what was measured, and constant beyond."""

    def __init__(self, ms: Mapping[tuple[int, int], float]):
        self._ms = ms
        self._axes = [sorted({point[axis] for point in ms}) for axis in (0, 1)]

    def at(self, texts: float, drafts: float) -> float:
        (x0, x1, u), (y0, y1, v) = (bracket(axis, value) for axis, value in zip(self._axes, (texts, drafts), strict=True))
        low = self._ms[x0, y0] * (1 - v) + self._ms[x0, y1] * v
        high = self._ms[x1, y0] * (1 - v) + self._ms[x1, y1] * v
        return low * (1 - u) + high * u


def bracket(axis: list[int], value: float) -> tuple[int, int, float]:
    """The neighbours of a value, and how far it is from the lower one as a share of their distance."""
    value = min(max(value, axis[0]), axis[-1])
    i = min(bisect_right(axis, value), len(axis) - 1)
    low, high = axis[max(i - 1, 0)], axis[i]
    return low, high, (value - low) / (high - low) if high > low else 0.0


Samples = dict[tuple[int, int], list[float]]  # (texts, drafts of each) -> ms, once measured


Cycle = dict[tuple[str | None, int], list[float]]  # (method, K) -> ms of a proposal; no method: of a step with K drafts


def levelled(cycles: Sequence[Cycle]) -> list[Cycle]:
    """The same times as if the machine had been equally fast in all cycles.

    A busy machine slows everything for a while. How much is told by each cycle itself: its level is the median of its times, as
    multiples of the medians of the same things over all cycles (the rows of a median polish; Tukey 1977).
    """
    levels = [1.0] * len(cycles)
    for _ in range(POLISH):
        usual = {
            what: median(ms / level for cycle, level in zip(cycles, levels, strict=True) for ms in cycle.get(what, ()))
            for what in {what for cycle in cycles for what in cycle}
        }
        levels = [median(ms / usual[what] for what, some in cycle.items() for ms in some if what[0] is None) for cycle in cycles]
    return [
        {what: [ms / level for ms in some] for what, some in cycle.items()} for cycle, level in zip(cycles, levels, strict=True)
    ]


@dataclass(slots=True)
class Costs:
    """All that was timed, in ms."""

    verify: Samples = field(default_factory=dict)  # a step without its proposals; no drafts: a plain step
    draft: dict[str, Samples] = field(default_factory=dict)  # method -> a proposal
    start: dict[str, list[float]] = field(default_factory=dict)  # method -> its first proposal for a text: it reads the prompt


@dataclass(frozen=True, slots=True)
class Prices:
    """One value for each cost."""

    verify: Grid
    draft: Mapping[str, Grid]
    start: Mapping[str, float]  # what the first proposal takes beyond any other

    @classmethod
    def of(cls, costs: Costs, rng: Random | None = None) -> Prices:
        """Medians; with `rng`, of as many samples drawn anew."""

        def middle(samples: list[float]) -> float:
            return median(samples if rng is None else rng.choices(samples, k=len(samples)))

        def grid(samples: Samples) -> Grid:
            return Grid({point: middle(ms) for point, ms in samples.items()})

        draft = {method: grid(samples) for method, samples in costs.draft.items()}
        start = {method: max(0.0, middle(ms) - draft[method].at(1, 1)) for method, ms in costs.start.items()}
        return cls(grid(costs.verify), draft, start)

    def plain_ms(self, texts: int) -> float:
        return self.verify.at(texts, 0)

    def call_ms(self, method: str, share: float, texts: int, k: int) -> float:
        """Of a method in a round of `texts` texts, a `share` of which ask it, each by chance: mostly all, or few of many."""
        some = 1 - (1 - min(share, 1.0)) ** texts
        return some * self.draft[method].at(texts * share / some, k) if some else 0.0

    def full_round(self, chain: Sequence[str], texts: int, k: int) -> float:
        """Ms of a round in which every text has K drafts, of the last method of the chain."""
        return self.verify.at(texts, k) + sum(self.draft[method].at(texts, k) for method in chain)


@dataclass(frozen=True, slots=True)
class Way:
    """A value of `method`, and the methods behind it in the order they are asked."""

    name: str
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Speed:
    """A round, and how many times as fast as plain decoding it makes it."""

    ratio: float
    tokens_per_call: float  # E
    plain_ms: float
    verify_ms: float
    draft_ms: float
    start_ms: float  # the drafter's reading of prompts, spread over all rounds


def speed(done: Walk, way: Way, k: int, texts: int, prices: Prices) -> Speed:
    """E * plain_ms / (verify_ms + draft_ms + start_ms) of the walked rounds, `texts` of them at once.

    A text without a draft is a row without drafts, so rows are taken at their mean; and all texts wait while a drafter reads
    the prompt of one. Not counted: what a draft model has to catch up on after rounds in which it was not asked.
    """
    e = done.tokens_per_round
    plain_ms, verify_ms = prices.plain_ms(texts), prices.verify.at(texts, done.drafts / done.rounds)
    draft_ms = sum(prices.call_ms(method, n / done.rounds, texts, k) for method, n in done.asked.items())
    start_ms = sum(prices.start[method] * texts * n / done.rounds for method, n in done.began.items())
    return Speed(e * plain_ms / (verify_ms + draft_ms + start_ms), e, plain_ms, verify_ms, draft_ms, start_ms)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a setting is expected to bring, with 90 % of the worlds that the same measurements could have come from."""

    way: Way
    k: int
    texts: int  # at once
    speed: Speed
    low: float
    high: float
    walk: Walk

    @property
    def ratio(self) -> float:
        return self.speed.ratio

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain beyond the noise."""
        return self.low > 1

    @property
    def open(self) -> bool:
        """Whether the noise leaves open if it pays."""
        return self.low <= 1 < self.ratio

    @property
    def guess_cost(self) -> float:
        """Ms of one guess / ms of a plain step: the size ratio that counts."""
        return self.speed.draft_ms / max(1, self.k) / self.speed.plain_ms


def estimate(
    texts: Sequence[Guesses], ways: Sequence[Way], ks: Sequence[int], crowds: Sequence[int], costs: Costs, seed: int = 0
) -> list[Estimate]:
    """Every way at every K and crowd. The interval draws texts and times anew, the same ones for all settings."""
    rng, prices = Random(seed), Prices.of(costs)
    walks = {(way, k): [walk(guesses, way.chain, k) for guesses in texts] for way in ways for k in ks}
    counts = {(way, k): [counted(one, way) for one in some] for (way, k), some in walks.items()}
    settings = [(way, k, crowd) for way in ways for k in ks for crowd in crowds]
    drawn: dict[tuple[Way, int, int], list[float]] = {setting: [] for setting in settings}
    for _ in range(DRAWS):
        world, chosen = Prices.of(costs, rng), rng.choices(range(len(texts)), k=len(texts))
        wholes = {setting: added([some[i] for i in chosen], setting[0]) for setting, some in counts.items()}
        for way, k, crowd in settings:
            drawn[way, k, crowd].append(speed(wholes[way, k], way, k, crowd, world).ratio)
    found = []
    for way, k, crowd in settings:
        whole, ordered = total(walks[way, k]), sorted(drawn[way, k, crowd])
        low, high = (at_share(ordered, share) for share in INTERVAL)
        found.append(Estimate(way, k, crowd, speed(whole, way, k, crowd, prices), low, high, whole))
    return found


def counted(done: Walk, way: Way) -> tuple[int, ...]:
    """What `speed` wants to know, in a form that is added up quickly: it is, for every world and setting."""
    asked = (done.asked.get(method, 0) for method in way.chain)
    return (done.tokens, done.rounds, done.drafts, *asked, *(done.began.get(method, 0) for method in way.chain))


def added(counts: list[tuple[int, ...]], way: Way) -> Walk:
    tokens, rounds, drafts, *rest = map(sum, zip(*counts, strict=True))
    asked, began = rest[: len(way.chain)], rest[len(way.chain) :]
    done = Walk(len(counts), tokens, rounds, drafts)
    done.asked, done.began = (dict(zip(way.chain, some, strict=True)) for some in (asked, began))
    return done


def best(estimates: Iterable[Estimate]) -> Estimate:
    """The fastest; among equals the shallowest."""
    return min(estimates, key=lambda one: (-one.ratio, one.k))


# what it would take


def expected_tokens(acceptance: float, k: int) -> float:
    """E = sum_{i=0..K} a^i."""
    return sum(acceptance**i for i in range(k + 1))


def best_k(acceptance: float, round_costs: Sequence[float]) -> int:
    """The K of the fastest rounds when every draft stands with probability a; 0 when none is faster than plain.

    `round_costs[K - 1]` is (draft_ms(K) + verify_ms(K + 1)) / plain_ms.
    """
    speeds = [1.0, *(expected_tokens(acceptance, k) / cost for k, cost in enumerate(round_costs, 1))]
    return max(range(len(speeds)), key=speeds.__getitem__)


def break_even(round_costs: Sequence[float]) -> tuple[float, int] | None:
    """The lowest acceptance from which on some K pays, and that K; None when none would even if every draft stood.

    The a of sum_{i=0..K} a^i = round_costs[K - 1], at the K where it is lowest.
    """
    needed = [(a, k) for k, cost in enumerate(round_costs, 1) if (a := equal_acceptance(cost, k)) is not None]
    return min(needed) if needed else None


def dearest_guess(estimates: Iterable[Estimate]) -> float:
    """The most that a guess may cost, as a share of a plain step, for some K to pay at the acceptance found; below 0: none may.

    E * plain_ms = r * K * plain_ms + verify_ms + start_ms, solved for r, at the K where it is largest.
    """
    found = []
    for one in estimates:
        now = one.speed
        found.append((now.tokens_per_call * now.plain_ms - now.verify_ms - now.start_ms) / (one.k * now.plain_ms))
    return max(found)


def largest_crowd(pays: Mapping[int, bool]) -> int | None:
    """The most texts at once up to which it pays without a gap; None when it does not pay at the fewest."""
    largest = None
    for crowd in sorted(pays):
        if not pays[crowd]:
            break
        largest = crowd
    return largest
