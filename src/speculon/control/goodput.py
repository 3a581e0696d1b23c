"""The policy `goodput`: as many accepted tokens per millisecond as drafts can bring, plain decoding among the choices.

A round of B sequences in which method m drafts k_i tokens for sequence i has (Liu 2024, SmartSpec, section 3)

    goodput = sum_i (1 + S_i1 + .. + S_ik_i) / (T(B, D, R) + sum_m P_m(n, k, unread))

S_ij = P(d_1..d_j of i accepted), T and P the ms of a step and of a proposal (`cost`), R = sum k_i, k = max k_i. A ratio is
maximised by maximising  tokens - r ms  at the r it leads to (Dinkelbach 1967); r is the goodput of late, or that of plain
decoding where it is more. With  T = .. + c D + d R  and  P = a + b k + e n k + f unread  it follows what drafts must bring:

    trim     draft j of i is verified while  S_ij > r d, if the sum of  S_ij - r d  over them exceeds  r c
    decide   i gains  G_i = max over k_i of  sum_j (S_ij - r (d + e)) - r c - r f unread (1 + sum_j S_ij) / tokens left;
             m is asked for  k = argmax of  sum_i G_i - r (a + b k), where that is > 0

Lookups, whose P is next to nothing, are asked first, for it is not known before whether they find anything: in every round
while what they gained of late exceeds r P, else ever more rarely. `confirm` weighs the model again for the sequences that
lookups left. S carries the bonus of UCB; a model out of use gets single probes, for a fixed share of all time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, log2
from operator import mul
from typing import Any

from pydantic import TypeAdapter

from speculon.control.acceptance import PRIOR, Acceptance, SequenceAcceptance, buckets_of
from speculon.control.cost import OF_LATE, Costs
from speculon.control.policy import Policy, Timing
from speculon.control.shadow import Shadow
from speculon.core import Ask, Decision, Draft, Load, Reason, Sequence, Span, SpanKind, Verdict

COLD = 2  # measured proposals before a cost is believed; watched continuations that must match where the prompt is no sign
LONGEST_GAP = 16  # rounds between two proposals of a lookup that finds nothing
PROBE_SHARE = 0.005  # of all time, for single drafts of models out of use
IDLE_FADE = 0.995  # weight left to a model's evidence by a round in which it is out of use: a memory of 200 rounds

STATE: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, dict[str, list[Any]]])


@dataclass(slots=True)
class Added:
    """What drafting adds to a round for one sequence, of late."""

    tokens: float = 0.0
    ms: float = 0.0
    found: float = 0.0  # share of rounds in which a lookup's draft was kept
    gain: float = PRIOR  # tokens that a lookup's proposal brings, less the price of its rows

    def move(self, to: Added, weight: float = OF_LATE) -> None:
        for name in self.__slots__:
            before = getattr(self, name)
            setattr(self, name, before + weight * (getattr(to, name) - before))


@dataclass(slots=True)
class PromptClass:
    """Statistics of the sequences of one class of prompts."""

    added: Added = field(default_factory=Added)
    ended: int = 0
    length: float = 0.0  # tokens of those that ended
    acceptance: dict[str, Acceptance] = field(default_factory=dict)  # by method


@dataclass(slots=True)
class Running:
    """Statistics of one sequence."""

    of: PromptClass
    added: Added
    missing: int = 0  # continuations that must match before a lookup's drafts are verified
    own: dict[str, SequenceAcceptance] = field(default_factory=dict)  # by method

    def shift(self, method: str) -> int:
        return self.own[method].shift if method in self.own else 0


Group = list[tuple[Sequence, Running]]
Offers = dict[int, Ask]  # sequence -> what a model would draft for it


@dataclass(slots=True)
class Round:
    """Prices of the round that runs, in tokens: r times ms."""

    number: int = 0
    batch: int = 0
    rate: float = 0.0  # r, tokens per ms
    row: float = 0.0  # r d
    first: float = 0.0  # r c
    lookups: dict[str, float] = field(default_factory=dict)  # method -> price of a proposal
    models: dict[str, Group] = field(default_factory=dict)  # method -> the sequences it may draft for
    offers: Offers = field(default_factory=dict)
    probe: int | None = None  # the sequence whose draft is a probe
    asked: set[int] = field(default_factory=set)  # sequences for which lookups were asked


class Goodput(Policy):
    """One engine's policy. The costs are measured by their owner."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._methods: dict[str, Acceptance] = {}  # over all classes
        self._classes: dict[str, PromptClass] = {}
        self._running: dict[int, Running] = {}
        self._shadow = Shadow()  # drafts that were not worth their rows are compared with what is generated anyway
        self._budget_ms = 0.0  # for probes
        self._round = Round()

    # before the drafts

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        if not self.costs.known:
            return [plain(seq, Reason.COLD) for seq in seqs]
        now = self._begin(seqs, max(len(seqs), load.running))
        now.offers, refused = self._offer()
        return [self._decision(seq, refused) for seq in seqs]

    def _begin(self, seqs: list[Sequence], batch: int) -> Round:
        """The prices, and who may draft for whom."""
        costs, plain_ms = self.costs, self.costs.step(batch)
        now = self._round = Round(self._round.number + 1, batch)
        running = [self._running.get(seq.id) or self._meet(seq) for seq in seqs]
        tokens, ms = batch + sum(one.added.tokens for one in running), plain_ms + sum(one.added.ms for one in running)
        now.rate = max(batch / plain_ms, tokens / ms)
        now.row, now.first = now.rate * costs.row(batch), now.rate * costs.first(batch)
        for seq, one in zip(seqs, running, strict=True):
            for method in seq.methods if seq.room > 1 and not seq.plain else ():
                if method not in seq.lookups:
                    now.models.setdefault(method, []).append((seq, one))
                elif method not in now.lookups:
                    now.lookups[method] = now.rate * costs.proposal(method, 1, seq.most(method))
        return now

    def _meet(self, seq: Sequence) -> Running:
        """A sequence begins where those of its class ended."""
        of = self._classes.setdefault(seq.shape.name, PromptClass())
        seq.cold_matches = 0 if seq.shape.favourable or of.added.found > OF_LATE else COLD
        return self._running.setdefault(seq.id, Running(of, replace(of.added), seq.cold_matches))

    def _offer(self) -> tuple[Offers, Reason]:
        """What the model that gains most would draft, a probe where none gains anything; or why there is nothing."""
        now, best, most, refused = self._round, Offers(), 0.0, Reason.COOLDOWN
        for method, group in now.models.items():
            if self.costs.calls(method) < COLD:
                return self._try(method, group), refused
            offers, gain = self._weigh(method, group)
            if gain > most:
                most, best = gain, offers
            elif not best:
                refused = self._refusal(method, group)
        for method in now.models if not best else ():
            acceptance = self._methods.get(method)
            if acceptance is not None and not now.number % LONGEST_GAP:
                acceptance.discount(IDLE_FADE**LONGEST_GAP)
        return best or self._probe(), refused

    def _weigh(self, method: str, group: Group) -> tuple[Offers, float]:
        """One proposal for these sequences at its best K, and the tokens that it gains in all: 0 where it does not pay."""
        now, price = self._round, self.costs.prices(method, len(group))
        call, depth, each = now.rate * price.call, now.rate * price.depth, now.row + now.rate * price.draft
        gains = []
        for seq, one in group:
            read = now.rate * price.unread * unread_per_token(seq, method, one)
            curve = self._acceptance(method, one.of).survival(one.shift(method))
            gains.append(gains_of(curve[: min(seq.most(method), seq.room - 1)], each, now.first, read))
        k, gain = best_depth(gains, call, depth)
        if not k:
            return {}, 0.0
        drafting = ((seq.id, min(k, len(some))) for (seq, _), some in zip(group, gains, strict=True) if some and max(some) > 0)
        return {number: Ask(method, depth) for number, depth in drafting}, gain

    def _refusal(self, method: str, group: Group) -> Reason:
        """Why a model does not pay: in this batch, at this acceptance, or at any."""
        price, rate = self.costs.prices(method, 1), 1 / self.costs.step(1)
        each, call = rate * (self.costs.row(1) + price.draft), rate * (price.call + price.depth)
        seq, one = max(group, key=lambda each: each[1].shift(method))
        curve = self._acceptance(method, one.of).survival(one.shift(method))
        pays, would = (
            best_depth([gains_of(some, each, rate * self.costs.first(1))], call, rate * price.depth)[0]
            for some in (curve, (1.0,) * seq.most(method))
        )
        if pays:
            return Reason.LOAD if self._round.batch > 1 else Reason.COST
        return Reason.LOW_ACCEPTANCE if would else Reason.COST

    def _try(self, method: str, group: Group) -> Offers:
        """A model that is not known yet drafts for one sequence, to be measured."""
        seq, _ = group[0]
        self._round.probe = seq.id
        return {seq.id: Ask(method, min(COLD, seq.most(method), seq.room - 1))}

    def _probe(self) -> Offers:
        """A single draft of a model out of use for the sequence of which it has least to read, once it is paid for."""
        now = self._round
        for method, group in now.models.items():
            seq, _ = min(group, key=lambda each: len(each[0].tokens) - each[0].drafted.get(method, 0))
            unread = len(seq.tokens) - seq.drafted.get(method, 0) - 1
            ms = self.costs.proposal(method, 1, 1, unread) + self.costs.step(now.batch, 1, 1) - self.costs.step(now.batch)
            if self._budget_ms >= ms:
                self._budget_ms -= ms
                now.probe = seq.id
                now.models = {method: group}
                return {seq.id: Ask(method, 1)}
        return {}

    def _decision(self, seq: Sequence, refused: Reason) -> Decision:
        now = self._round
        if seq.plain or seq.room <= 1:
            return plain(seq, refused)
        offer = now.offers.get(seq.id)
        asks = [] if now.probe == seq.id else [Ask(m, min(seq.most(m), seq.room - 1)) for m in seq.methods if self._due(seq, m)]
        if asks:
            now.asked.add(seq.id)
        if offer is not None:
            asks.append(offer)
        if not asks:
            return plain(seq, refused)
        chained = seq.join is not False and now.probe != seq.id and any(method in now.lookups for method in seq.methods)
        reach = min(seq.room - 1, max(map(seq.most, seq.methods))) if chained else 0
        return Decision.of(asks, reach=reach)

    def _due(self, seq: Sequence, method: str) -> bool:
        """Whether a lookup is asked: in every round while it gains what it costs, then in every 2nd, 4th, .. LONGEST_GAPth."""
        price = self._round.lookups.get(method)
        if price is None:
            return False
        gain = self._running[seq.id].added.gain
        if gain >= price:
            return True
        gap = 2 ** ceil(log2(min(LONGEST_GAP, price / max(gain, 1e-9))))
        return bool(self._round.number % gap == 0)

    # after the lookups, and after the drafts

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        """The model is weighed again, for the sequences that lookups left."""
        now = self._round
        if method not in now.models or now.probe in {seq.id for seq in seqs}:
            return ks
        offers, _ = self._weigh(method, [(seq, self._running[seq.id]) for seq in seqs])
        return [min(k, offers[seq.id].k) if seq.id in offers else 0 for seq, k in zip(seqs, ks, strict=True)]

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """The part of a draft that is worth its rows; none where the model is to gain more, or where it is only watched."""
        now, one = self._round, self._running[seq.id]
        if now.probe == seq.id:
            return draft
        best, most, net = 0, 0.0, -now.first
        if method in now.lookups and seq.id in now.offers:  # what the model would gain if nobody else asked it
            most = self._weigh(now.offers[seq.id].method, [(seq, one)])[1]
        if not (one.missing and method in now.lookups and method not in seq.given):
            for k, survival in enumerate(accumulate(self._chances(seq, one, draft, method), mul), 1):
                net += survival - now.row
                if net > most:
                    best, most = k, net
        if not best:
            self._shadow.watch(seq, method, draft.cut(draft.own(seq.methods)))
        return draft.cut(best)

    def _chances(self, seq: Sequence, one: Running, draft: Draft, method: str) -> Iterator[float]:
        for name, _, buckets in parts(seq, draft, method):
            yield from self._acceptance(name, one.of).chances(buckets, one.shift(name))

    # afterwards

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        self._budget_ms += PROBE_SHARE * (timing.target_ms or 0.0)
        for span, verdict in zip(spans, verdicts, strict=True):
            if span.seq.id in self._running:
                self._learn(span, verdict, timing)

    def _learn(self, span: Span, verdict: Verdict, timing: Timing) -> None:
        seq, draft, one, now = span.seq, span.draft, self._running[span.seq.id], self._round
        if draft.tokens:
            ended = verdict.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
            judged = min(verdict.accepted + (not ended), len(draft.tokens))
            for name, before, buckets in parts(seq, draft):
                if before < judged:
                    self._judge(one, name, buckets[: judged - before], min(len(buckets), verdict.accepted - before))
        for fate in self._shadow.settle(seq):
            if not fate.overlaps:
                one.missing = max(0, one.missing - (fate.accepted > 0))
                self._judge(one, fate.method, buckets_of(fate.confidence, fate.judged), fate.accepted)
        method = draft.sources[0] if draft.tokens else ""
        gained, rows = max(0, len(verdict.tokens) - 1), now.first + now.row * len(draft.tokens) if method else 0.0
        ms = rows / now.rate if rows else 0.0
        if method in now.models and method in timing.proposals:
            call = timing.proposals[method]
            ms += self.costs.proposal(method, call.texts, call.k) / call.texts
        lookup = method in now.lookups
        gain = gained - rows if lookup else 0.0 if seq.id in now.asked else one.added.gain
        one.added.move(Added(gained if method else 0.0, ms, lookup, gain))

    def _judge(self, one: Running, method: str, buckets: list[int], accepted: int) -> None:
        """Drafts of these buckets were judged, and the first `accepted` accepted."""
        acceptance = self._acceptance(method, one.of)
        one.own.setdefault(method, SequenceAcceptance()).observe(acceptance, buckets, accepted)
        acceptance.observe(buckets, accepted)

    def _acceptance(self, method: str, of: PromptClass) -> Acceptance:
        found = of.acceptance.get(method)
        if found is None:
            found = of.acceptance[method] = Acceptance(self._methods.setdefault(method, Acceptance()))
        return found

    def forget(self, seq: Sequence) -> None:
        if (one := self._running.pop(seq.id, None)) is not None:
            of = one.of
            of.ended += 1
            weight = max(OF_LATE, 1 / of.ended)
            of.added.move(one.added, weight)
            of.length += weight * (seq.num_output - of.length)
        self._shadow.forget(seq)

    def state(self) -> dict[str, Any]:
        every = {"": self._methods, **{name: of.acceptance for name, of in self._classes.items()}}
        return {name: {method: one.state() for method, one in some.items()} for name, some in every.items()}

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        for name, some in STATE.validate_python(state).items():
            for method, told in some.items():
                of = self._classes.setdefault(name, PromptClass())
                (self._acceptance(method, of) if name else self._methods.setdefault(method, Acceptance())).restore(told)


def gains_of(curve: tuple[float, ...], each: float, first: float, read: float = 0.0) -> list[float]:
    """What 1, 2, .. drafts of survival S gain: at a price of each draft, of the first, and of reading for each token."""
    net, found = -first - read, []
    for survival in curve:
        worth = survival * (1 - read) - each
        if worth <= 0:
            break
        net += worth
        found.append(max(0.0, net))
    return found


def best_depth(gains: list[list[float]], call: float, depth: float) -> tuple[int, float]:
    """The K that maximises what one call gains for all of them, and that gain; (0, 0.0) where it does not pay."""
    best, most = 0, 0.0
    for k in range(1, max(map(len, gains), default=0) + 1):
        gain = sum(some[min(k, len(some)) - 1] for some in gains if some) - call - depth * k
        if gain > most:
            best, most = k, gain
    return best, most


def unread_per_token(seq: Sequence, method: str, one: Running) -> float:
    """Tokens to read before the draft, for each token that the sequence may yet generate with it."""
    unread = len(seq.tokens) - seq.drafted.get(method, 0) - 1
    if not unread:
        return 0.0
    usual = one.of.length if one.of.ended else seq.room
    left = min(seq.room, max(usual / 2, usual - seq.num_output))
    return unread / max(1.0, left * (1 - one.added.found))


def parts(seq: Sequence, draft: Draft, method: str = "") -> Iterator[tuple[str, int, list[int]]]:
    """(name, drafts before it, buckets) of one proposal and of what was chained to it, which is learned under its own name."""
    name, own = method or draft.sources[0], draft.own(seq.methods)
    buckets = buckets_of(draft.confidence, len(draft.tokens))
    yield name, 0, buckets[:own]
    if own < len(buckets):
        yield f"{name}+{draft.sources[own]}", own, buckets[own:]


def plain(seq: Sequence, reason: Reason) -> Decision:
    if seq.plain and seq.off is not None:
        reason = seq.off
    elif seq.room <= 1:
        reason = Reason.MAX_TOKENS
    return Decision(None, 0, reason)
