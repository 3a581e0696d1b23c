"""A world without a model: how often each method's drafts stand and what everything costs is given, a policy
plays in it.

So policies are compared in seconds, on costs that were measured, at any load, with drafters that change in
the middle. `World` is made of formulas; `bench.replay` makes one of a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from typing import Any, Protocol, cast

from speculon.cascade import ask_in_turn
from speculon.control.cost import Costs
from speculon.control.policy import Policy
from speculon.core import (
    NO_DRAFT,
    Decision,
    Draft,
    Load,
    PromptShape,
    Proposal,
    Reason,
    SpanKind,
    Timing,
    Verdict,
)
from speculon.sequence import Span

ENDLESS = 1 << 30
# tokens of drafts; what is generated is ACCEPTED, so that all can be judged
REJECTED, ACCEPTED, UNKNOWN = range(3)


@dataclass(slots=True, eq=False)
class Text:
    """What a policy, and a span, see of a sequence."""

    id: int
    limits: Mapping[str, int]  # methods in the order they are asked -> most drafts of a round
    room: int = ENDLESS  # tokens it may still write
    off: Reason | None = None
    chained: bool | None = None
    shape: PromptShape = PromptShape()
    cold_matches: int = 0
    brought: tuple[str, ...] = ()
    lookups: frozenset[str] = frozenset()
    drafted: dict[str, int] = field(default_factory=dict)
    written: int = 0
    tokens: list[int] = field(default_factory=lambda: [ACCEPTED])  # those of its prompt among them

    @property
    def num_output(self) -> int:
        return self.written

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.limits)

    @property
    def request(self) -> Text:
        """It has the fields of its request that a policy reads."""
        return self


class Scene(Protocol):
    """What a policy plays in. Times in ms."""

    noise: float  # standard deviation of a measured time of the target, as a share of it

    def crowds(self) -> Iterator[list[Text]]:
        """Who runs, round by round; it goes by what the texts have written meanwhile."""
        ...

    def step_ms(self, texts: int, drafting: int, drafts: int, /) -> float:
        """Of a step of the target: of so many texts, those that draft, and rows of drafts in all."""
        ...

    def proposal_ms(self, method: str, texts: int, k: int, unread: int = 0) -> float:
        """Of one proposal, with at most `k` drafts for each text, and so many tokens of them that it reads
        first.
        """
        ...

    def draft(self, number: int, text: Text, method: str, k: int, random: Random) -> Draft:
        """What a method guesses in round `number`, as REJECTED, ACCEPTED and UNKNOWN."""
        ...

    def join(self, number: int, text: Text, draft: Draft, k: int, random: Random) -> Draft:
        """The draft, and up to `k` tokens that a lookup puts behind it."""
        ...

    def chance(self, number: int, text: Text, draft: Draft, position: int) -> float:
        """P(the draft at `position` stands | those before it did)."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """A method of drafting. All are there in every round; which are asked is the policy's choice."""

    accept: Callable[[int, int], float]  # (round, text) -> P(a draft stands | those before it did)
    ms: Callable[[int, int], float]  # (texts, most drafts of one) -> of a proposal
    read_ms: float = 0.0  # of a token of a text that it has not seen yet
    lookup: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """A scene of formulas."""

    step: Callable[[int, int], float]  # (texts, rows of drafts in all) -> ms of the target
    ways: Mapping[str, Way]
    texts: Callable[[int], int]  # round -> texts that run
    most: int = 16  # drafts of a text in a round
    prompt: int = 1  # tokens of each text
    length: int = 0  # tokens that each text writes; another takes its place then. 0: it has no end
    noise: float = 0.05

    def crowds(self) -> Iterator[list[Text]]:
        running: list[Text] = []
        ids = count()
        for number in count():
            wanted = self.texts(number)
            running = [text for text in running if text.room][:wanted]
            running += [self._text(next(ids)) for _ in range(len(running), wanted)]
            yield running

    def step_ms(self, texts: int, drafting: int, drafts: int, /) -> float:
        return self.step(texts, drafts)

    def _text(self, number: int) -> Text:
        room = self.length or ENDLESS
        lookups = frozenset(name for name, way in self.ways.items() if way.lookup)
        limits = dict.fromkeys(self.ways, self.most)
        return Text(number, limits, room, tokens=[ACCEPTED] * self.prompt, lookups=lookups)

    def proposal_ms(self, method: str, texts: int, k: int, unread: int = 0) -> float:
        return self.ways[method].ms(texts, k) + self.ways[method].read_ms * unread

    def draft(self, number: int, text: Text, method: str, k: int, random: Random) -> Draft:
        chance = self.ways[method].accept(number, text.id)
        return Draft(
            tuple(ACCEPTED if random.random() < chance else REJECTED for _ in range(k)), (method,) * k
        )

    def join(self, number: int, text: Text, draft: Draft, k: int, random: Random) -> Draft:
        return draft

    def chance(self, number: int, text: Text, draft: Draft, position: int) -> float:
        return float(draft.tokens[position])


@dataclass(slots=True)
class Played:
    """What came of it, in all and round by round."""

    tokens: int = 0
    ms: float = 0.0
    # per round: method -> drafts that were verified
    drafted: list[Counter[str]] = field(default_factory=list)
    accepted: int = 0
    rates: list[tuple[int, float, float]] = field(default_factory=list)  # per round: texts, tokens, ms

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per ms of some rounds."""
        rounds = self.rates[first:last]
        return sum(tokens for _, tokens, _ in rounds) / sum(ms for _, _, ms in rounds)


def play(
    policy: Policy, scene: Scene, rounds: int | None = None, seed: int = 0, costs: Costs | None = None
) -> Played:
    """Lets the policy decide for `rounds` rounds, or until all texts have ended; equal seeds draw alike.

    `costs` is the policy's cost model, where it has one: it is told what each round took.
    """
    played, random, before = Played(), Random(seed), list[Text]()
    for number, running in enumerate(islice(scene.crowds(), rounds)):
        for gone in (text for text in before if text not in running):
            policy.forget(cast(Any, gone))
        before = list(running)
        decisions = policy.decide(cast(Any, running), Load(len(running), 0, 1 << 20))
        drafts, proposals = propose(policy, scene, number, running, decisions, random)
        lengths = [len(draft.tokens) for draft in drafts]
        target_ms = scene.step_ms(len(running), sum(map(bool, lengths)), sum(lengths)) * max(
            0.5, random.gauss(1, scene.noise)
        )
        verdicts = [
            judge(draft, text, number, scene, random) for draft, text in zip(drafts, running, strict=True)
        ]
        for text, verdict in zip(running, verdicts, strict=True):
            text.written += len(verdict.tokens)
            text.tokens += verdict.tokens
            text.room -= len(verdict.tokens)
            text.drafted = {method: min(done, len(text.tokens) - 1) for method, done in text.drafted.items()}
        spans = [Span(cast(Any, text), 0, 1, draft) for text, draft in zip(running, drafts, strict=True)]
        timing = Timing(target_ms, proposals)
        if costs is not None:
            costs.observe(spans, timing)
        policy.observe(spans, verdicts, timing)
        tokens, ms = (
            sum(len(verdict.tokens) for verdict in verdicts),
            target_ms + sum(call.ms for call in proposals.values()),
        )
        played.tokens, played.ms = played.tokens + tokens, played.ms + ms
        played.accepted += sum(verdict.accepted for verdict in verdicts)
        played.rates.append((len(running), tokens, ms))
        played.drafted.append(Counter(source for draft in drafts for source in draft.sources))
    return played


def propose(
    policy: Policy, scene: Scene, number: int, running: list[Text], decisions: list[Decision], random: Random
) -> tuple[list[Draft], dict[str, Proposal]]:
    """As the engine asks: one method after the other, until one has a draft that is kept."""
    drafts = [NO_DRAFT] * len(running)
    asked: dict[str, list[int]] = {}
    unread: Counter[str] = Counter()

    def ask(method: str, rooms: dict[int, int]) -> list[int]:
        ks = policy.confirm(method, cast(Any, [running[i] for i in rooms]), list(rooms.values()))
        for i, k in ((i, k) for i, k in zip(rooms, ks, strict=True) if k):
            asked.setdefault(method, []).append(k)
            if method not in running[i].lookups:
                unread[method] += len(running[i].tokens) - running[i].drafted.get(method, 0) - 1
            draft = scene.draft(number, running[i], method, k, random)
            running[i].drafted[method] = len(running[i].tokens) + max(0, len(draft.tokens) - 1)
            if draft.tokens and (room := decisions[i].chained - len(draft.tokens)) > 0:
                draft = scene.join(number, running[i], draft, room, random)
            drafts[i] = policy.trim(cast(Any, running[i]), method, draft) if draft.tokens else draft
        return [i for i in rooms if drafts[i].tokens]

    ask_in_turn({i: decision.asks for i, decision in enumerate(decisions) if decision.asks}, ask)
    calls = ((method, len(ks), max(ks), unread[method]) for method, ks in asked.items())
    return drafts, {call[0]: Proposal(*call[1:3], scene.proposal_ms(*call), call[3]) for call in calls}


def judge(draft: Draft, text: Text, number: int, scene: Scene, random: Random) -> Verdict:
    k, accepted = len(draft.tokens), 0
    while accepted < k and random.random() < scene.chance(number, text, draft, accepted):
        accepted += 1
    kind = None if not k else SpanKind.FULL if accepted == k else SpanKind.EARLY
    return Verdict((ACCEPTED,) * (accepted + 1), accepted, kind)
