"""A world without a model: how often each method's drafts stand and what everything costs is given, a policy plays in it.

So policies are compared in seconds, on costs that were measured, at any load, with drafters that change in the middle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from speculon.control.policy import Policy
from speculon.control.timing import Timing
from speculon.core import NO_DRAFT, Decision, Draft, Load, Reason, Span, SpanKind, Verdict


@dataclass(frozen=True, slots=True)
class Way:
    """A method of drafting in the world; both are asked in every round."""

    accept: Callable[[int, int], float]  # (round, text) -> P(a draft stands | those before it did)
    ms: Callable[[int, int], float]  # (texts, most drafts of one) -> of a proposal


@dataclass(frozen=True, slots=True)
class World:
    step_ms: Callable[[int, int], float]  # (texts, rows of drafts in all) -> of the target
    ways: Mapping[str, Way]
    texts: Callable[[int], int]  # round -> texts that run
    most: int = 16  # drafts of a text in a round
    noise: float = 0.05  # standard deviation of a measured time, as a share of it


@dataclass(slots=True, eq=False)
class Text:
    """What a policy sees of a sequence."""

    id: int
    methods: tuple[str, ...]
    k: int
    room: int = 1 << 30
    plain: bool = False
    off: Reason | None = None
    kind: str = ""
    tokens: list[int] = field(default_factory=lambda: [0])

    def most(self, method: str) -> int:
        return self.k


@dataclass(slots=True)
class Played:
    """What came of it, in all and round by round."""

    tokens: int = 0
    ms: float = 0.0
    drafted: list[Counter[str]] = field(default_factory=list)  # per round: method -> drafts that were verified
    rates: list[tuple[int, float, float]] = field(default_factory=list)  # per round: texts, tokens, ms

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per ms of some rounds."""
        rounds = self.rates[first:last]
        return sum(tokens for _, tokens, _ in rounds) / sum(ms for _, _, ms in rounds)


def play(policy: Policy, world: World, rounds: int, seed: int = 0) -> Played:
    """Lets the policy decide for `rounds` rounds; the same seed is the same luck."""
    played, random, texts = Played(), Random(seed), dict[int, Text]()
    for number in range(rounds):
        count = world.texts(number)
        for gone in [text for i, text in texts.items() if i >= count]:
            policy.forget(cast(Any, texts.pop(gone.id)))
        for new in range(len(texts), count):
            texts[new] = Text(new, tuple(world.ways), world.most)
        running = list(texts.values())
        decisions = policy.decide(cast(Any, running), Load(count, 0, 1 << 20))
        drafts, proposals = propose(policy, world, running, decisions)
        rows = sum(len(draft.tokens) for draft in drafts)
        target_ms = world.step_ms(count, rows) * max(0.5, random.gauss(1, world.noise))
        verdicts = [judge(draft, text, number, world, random) for draft, text in zip(drafts, running, strict=True)]
        spans = [Span(cast(Any, Seen(text)), 0, 1, draft) for text, draft in zip(running, drafts, strict=True)]
        policy.observe(spans, verdicts, Timing(target_ms, proposals))
        tokens, ms = sum(len(verdict.tokens) for verdict in verdicts), target_ms + sum(ms for _, _, ms in proposals.values())
        played.tokens, played.ms = played.tokens + tokens, played.ms + ms
        played.rates.append((count, tokens, ms))
        played.drafted.append(Counter(source for draft in drafts for source in draft.sources))
    return played


class Seen:
    """A text as a span wants it."""

    def __init__(self, text: Text):
        self.text, self.tokens = text, [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.text, name)


def propose(
    policy: Policy, world: World, running: list[Text], decisions: list[Decision]
) -> tuple[list[Draft], dict[str, tuple[int, int, float]]]:
    """As the engine asks: one method after the other, until one has a draft that is kept."""
    drafts = [NO_DRAFT] * len(running)
    asked: dict[str, list[int]] = {}
    for i, (text, decision) in enumerate(zip(running, decisions, strict=True)):
        for ask in decision.asks:
            asked.setdefault(ask.method, []).append(ask.k)
            drafts[i] = policy.trim(cast(Any, text), ask.method, Draft((0,) * ask.k, (ask.method,) * ask.k))
            if drafts[i].tokens:
                break
    return drafts, {m: (len(ks), max(ks), world.ways[m].ms(len(ks), max(ks))) for m, ks in asked.items()}


def judge(draft: Draft, text: Text, number: int, world: World, random: Random) -> Verdict:
    k, accepted = len(draft.tokens), 0
    while accepted < k and random.random() < world.ways[draft.sources[accepted]].accept(number, text.id):
        accepted += 1
    kind = None if not k else SpanKind.FULL if accepted == k else SpanKind.EARLY
    return Verdict((0,) * (accepted + 1), accepted, kind)
