"""Policies without a model: acceptance and costs are given, a policy decides round by round.

So policies are compared in seconds, on measured costs, at any load, with drafters that change on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from typing import Any, cast

from speculon.core.config import MAX_DRAFTS
from speculon.core.types import (
    CallCost,
    Draft,
    Load,
    PromptShape,
    Reason,
    SpanOutcome,
    Timing,
    Verdict,
)
from speculon.decoding.rounds import Budget, Grant, Judged, Span
from speculon.speculation.control.cost import Costs
from speculon.speculation.control.policy import Policy
from speculon.speculation.drafting import Drafting
from speculon.speculation.proposers.compose import DraftCall, DraftRequest

ENDLESS = 1 << 30
# tokens of drafts; generated tokens are ACCEPTED
REJECTED, ACCEPTED = range(2)


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """What a policy, and a span, read of a sequence."""

    id: int
    max_drafts: Mapping[str, int]  # methods in the order they are asked -> drafts of a round at most
    tokens_left: int = ENDLESS  # tokens it may still generate
    off: Reason | None = None
    chained: bool | None = None
    branching: frozenset[str] = frozenset()
    depth: int | None = None
    shape: PromptShape = PromptShape()
    adapter: str = ""
    from_request: tuple[str, ...] = ()
    lookups: frozenset[str] = frozenset()
    max_context: Mapping[str, int] = field(default_factory=dict)
    drafted: dict[str, int] = field(default_factory=dict)  # tokens that a method has read
    failed: bool = False
    written: int = 0
    tokens: list[int] = field(default_factory=lambda: [ACCEPTED])  # prompt included

    @property
    def budget(self) -> Budget:
        """Of its next round."""
        last = len(self.tokens) - 1
        unread = {method: last - self.drafted.get(method, 0) for method in self.methods}
        return Budget.of(Span.of(cast(Any, self), last, 1), Grant(MAX_DRAFTS), unread)

    @property
    def num_output(self) -> int:
        return self.written

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.max_drafts)

    @property
    def request(self) -> SimulatedSequence:
        """It has the fields of its request that a policy reads."""
        return self


@dataclass(frozen=True, slots=True)
class SimulatedMethod:
    """A method of drafting. Which methods are asked in a round is the policy's choice."""

    accept: Callable[[int, int], float]  # (round, sequence) -> P(accepted | those before it were)
    ms: Callable[[int, int], float]  # (sequences, most drafts of one) -> of a proposal
    read_ms: float = 0.0  # of a token that it has not read yet
    lookup: bool = False


@dataclass(frozen=True, slots=True)
class SyntheticEnvironment:
    """Sequences, acceptance and costs, made of formulas. Times in ms."""

    step: Callable[[int, int], float]  # (sequences, drafts in all) -> ms of the target
    methods: Mapping[str, SimulatedMethod]
    concurrency: Callable[[int], int]  # round -> sequences
    most: int = 16  # drafts of a sequence in a round
    prompt: int = 1  # tokens
    length: int = 0  # tokens of each sequence, which another one then replaces; 0: no end
    noise: float = 0.05  # standard deviation of a measured time of the target, as a share of it

    def batches(self) -> Iterator[list[SimulatedSequence]]:
        running: list[SimulatedSequence] = []
        ids = count()
        for number in count():
            size = self.concurrency(number)
            running = [seq for seq in running if seq.tokens_left][:size]
            running += [self._sequence(next(ids)) for _ in range(len(running), size)]
            yield running

    def step_ms(self, sequences: int, drafting: int, drafts: int, /) -> float:
        return self.step(sequences, drafts)

    def _sequence(self, number: int) -> SimulatedSequence:
        tokens_left = self.length or ENDLESS
        lookups = frozenset(name for name, method in self.methods.items() if method.lookup)
        max_drafts, prompt = dict.fromkeys(self.methods, self.most), [ACCEPTED] * self.prompt
        return SimulatedSequence(number, max_drafts, tokens_left, tokens=prompt, lookups=lookups)

    def proposal_ms(self, method: str, sequences: int, k: int, unread: int = 0) -> float:
        return self.methods[method].ms(sequences, k) + self.methods[method].read_ms * unread

    def draft(self, number: int, seq: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
        chance = self.methods[method].accept(number, seq.id)
        return Draft(
            tuple(ACCEPTED if random.random() < chance else REJECTED for _ in range(k)), (method,) * k
        )

    def chain(self, number: int, seq: SimulatedSequence, draft: Draft, k: int, random: Random) -> Draft:
        return draft


@dataclass(slots=True)
class SimulationResult:
    """The outcome, in total and by round."""

    tokens: int = 0
    ms: float = 0.0
    # per round: method -> drafts that were verified
    drafted: list[Counter[str]] = field(default_factory=list)
    accepted: int = 0
    rates: list[tuple[int, float, float]] = field(default_factory=list)  # per round: sequences, tokens, ms

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per ms of some rounds."""
        rounds = self.rates[first:last]
        return sum(tokens for _, tokens, _ in rounds) / sum(ms for _, _, ms in rounds)


def simulate(
    policy: Policy,
    environment: SyntheticEnvironment,
    rounds: int | None = None,
    seed: int = 0,
    costs: Costs | None = None,
) -> SimulationResult:
    """Lets the policy decide for `rounds` rounds, or until all sequences have ended.

    `costs`: the policy's cost model, if it has one; it observes each round.
    """
    result, random, before = SimulationResult(), Random(seed), list[SimulatedSequence]()
    for number, running in enumerate(islice(environment.batches(), rounds)):
        for gone in (seq for seq in before if seq not in running):
            policy.forget(cast(Any, gone))
        before = list(running)
        budgets = [seq.budget for seq in running]
        decisions = policy.decide(budgets, Load(len(running), 0, 1 << 20))
        drafters = cast(Any, Drafters(environment, number, random))
        drafting = Drafting(drafters, policy, budgets, decisions)
        drafting.ask_lookups()
        drafting.ask_models()
        drafted = drafting.drafted
        lengths = [len(one.draft.tokens) for one in drafted]
        target_ms = environment.step_ms(len(running), sum(map(bool, lengths)), sum(lengths)) * max(
            0.5, random.gauss(1, environment.noise)
        )
        judged = [Judged(one, judge(one.draft, random)) for one in drafted]
        for seq, verdict in ((seq, one.verdict) for seq, one in zip(running, judged, strict=True)):
            seq.written += len(verdict.tokens)
            seq.tokens += verdict.tokens
            seq.tokens_left -= len(verdict.tokens)
            seq.drafted = {method: min(done, len(seq.tokens) - 1) for method, done in seq.drafted.items()}
        timing = Timing(target_ms, drafting.calls)
        if costs is not None:
            costs.observe(judged, timing)
        policy.observe(judged, timing)
        tokens, ms = (
            sum(len(one.verdict.tokens) for one in judged),
            target_ms + sum(call.ms for call in drafting.calls.values()),
        )
        result.tokens, result.ms = result.tokens + tokens, result.ms + ms
        result.accepted += sum(one.verdict.accepted for one in judged)
        result.rates.append((len(running), tokens, ms))
        result.drafted.append(Counter(source for one in judged for source in one.draft.sources))
    return result


@dataclass(frozen=True, slots=True)
class Drafters:
    """The methods of an environment in one round, asked as `Proposers` are."""

    environment: SyntheticEnvironment
    number: int
    random: Random

    def ask(self, method: str, requests: list[DraftRequest]) -> DraftCall:
        unread, proposed, drafts = 0, list[Draft](), list[Draft]()
        for request in requests:
            seq = cast(SimulatedSequence, request.seq)
            if method not in seq.lookups:
                unread += len(seq.tokens) - seq.drafted.get(method, 0) - 1
            draft = self.environment.draft(self.number, seq, method, request.k, self.random)
            proposed.append(draft)
            seq.drafted[method] = len(seq.tokens) + max(0, len(draft.tokens) - 1)
            if draft.tokens and (room := request.chained - len(draft.tokens)) > 0:
                draft = self.environment.chain(self.number, seq, draft, room, self.random)
            drafts.append(draft)
        count, k = len(requests), max(request.k for request in requests)
        ms = self.environment.proposal_ms(method, count, k, unread)
        return DraftCall(proposed, drafts, CallCost(count, k, ms, unread))


def judge(draft: Draft, random: Random) -> Verdict:
    k, accepted = len(draft.tokens), 0
    while accepted < k and random.random() < draft.tokens[accepted]:  # the tests' seeds count this draw
        accepted += 1
    outcome = None if not k else SpanOutcome.FULL if accepted == k else SpanOutcome.EARLY
    return Verdict((ACCEPTED,) * (accepted + 1), accepted, outcome)
