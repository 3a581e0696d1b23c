"""The policy `goodput`: as many accepted tokens per millisecond as drafts can bring, plain decoding among the choices.

A round of B sequences in which method m drafts k_i tokens for sequence i has (Liu 2024, SmartSpec, section 3)

    goodput = sum_i (1 + S_i1 + .. + S_ik_i) / (T(B, D, R) + sum_m P_m(n, k, unread))

S_ij = P(d_1..d_j of i accepted), T and P the ms of a step and of a proposal (`cost`), R = sum k_i, k = max k_i. A ratio is
maximised by maximising  tokens - r ms  at the r it leads to (Dinkelbach 1967); r is the goodput of late, or that of plain
decoding where it is more. With  T = .. + c D + d R  and  P = a + b k + e n k + f unread  it follows what drafts must bring:

    trim     draft j of i is verified while  S_ij > r d, if the sum of  S_ij - r d  over them exceeds  r c
    decide   i gains  G_i(k) = max over k_i <= k of  sum_j (S_ij (1 - u_i) - r (d + e)) - r c - u_i,
             u_i = r f unread / tokens left; m is asked for  k = argmax of  sum_i G_i(k) - r (a + b k), where that is > 0

Lookups, whose P is next to nothing, are asked first, for it is not known before whether they find anything: in every round
while what they gained of late exceeds r P, else ever more rarely. `confirm` weighs the model again for the sequences that
lookups left. S carries the bonus of UCB; a model out of use gets single drafts, for a fixed share of all time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, log2
from operator import mul
from typing import Any

from speculon.control.acceptance import POSITIONS, PRIOR, STATE, Acceptance, SequenceAcceptance, buckets_of
from speculon.control.cost import OF_LATE, Costs
from speculon.control.policy import Estimate, Policy, Timing
from speculon.control.shadow import Shadow
from speculon.core import Ask, Decision, Draft, Load, Reason, Sequence, Span, SpanKind, Verdict

COLD = 2  # measured proposals before a cost is believed; watched continuations that must match where the prompt is no sign
LONGEST_GAP = 16  # rounds between two proposals of a lookup that finds nothing
PROBE_SHARE = 0.005  # of all time, for single drafts of models out of use
IDLE_FADE = 0.995  # weight left to a model's evidence by a round in which it is out of use: a memory of 200 rounds


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

    seq: Sequence
    of: PromptClass
    added: Added
    missing: int = 0  # continuations that must match before a lookup's drafts are verified
    own: dict[str, SequenceAcceptance] = field(default_factory=dict)  # by method

    @property
    def able(self) -> bool:
        return self.seq.room > 1 and not self.seq.plain

    def shift(self, method: str) -> int:
        return self.own[method].shift if method in self.own else 0

    def unread(self, method: str) -> int:
        return len(self.seq.tokens) - self.seq.drafted.get(method, 0) - 1

    @property
    def left(self) -> float:
        """Tokens that it may yet generate without lookups."""
        usual = self.of.length if self.of.ended else self.seq.room
        return max(1.0, min(self.seq.room, max(usual / 2, usual - self.seq.num_output)) * (1 - self.added.found))


@dataclass(slots=True)
class Round:
    """The round that runs; prices are in tokens: r times ms."""

    number: int = 0
    batch: int = 0
    rate: float = 0.0  # r, tokens per ms
    row: float = 0.0  # r d
    first: float = 0.0  # r c
    lookups: dict[str, float] = field(default_factory=dict)  # method -> price of a proposal
    models: dict[str, list[Running]] = field(default_factory=dict)  # method -> the sequences it may draft for
    offers: dict[int, Ask] = field(default_factory=dict)  # sequence -> what a model would draft for it
    probe: int | None = None  # the sequence whose draft is a probe
    asked: set[int] = field(default_factory=set)  # sequences for which lookups were asked
    estimates: dict[int, Estimate] = field(default_factory=dict)  # by sequence


class Goodput(Policy):
    """One engine's policy. The costs are measured by their owner."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._methods: dict[str, Acceptance] = {}  # over all classes
        self._classes: dict[str, PromptClass] = {}
        self._running: dict[int, Running] = {}
        self._shadow = Shadow()  # drafts that were not worth their rows are compared with what is generated anyway
        self._budget_ms = 0.0  # for probes
        self._now = Round()

    # before the drafts

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        if not self.costs.known:
            return [plain(seq, Reason.COLD) for seq in seqs]
        running = [self._running.get(seq.id) or self._meet(seq) for seq in seqs]
        now = self._now = self._begin(running, max(len(seqs), load.running))
        refused = self._offer(now)
        return [self._decision(now, one, refused) for one in running]

    def _meet(self, seq: Sequence) -> Running:
        """A sequence begins where those of its class ended."""
        of = self._classes.setdefault(seq.shape.name, PromptClass())
        seq.cold_matches = 0 if seq.shape.favourable or of.added.found > OF_LATE else COLD
        return self._running.setdefault(seq.id, Running(seq, of, replace(of.added), seq.cold_matches))

    def _begin(self, running: list[Running], batch: int) -> Round:
        """The prices, and who may draft for whom."""
        plain_ms = self.costs.step(batch)
        tokens, ms = batch + sum(one.added.tokens for one in running), plain_ms + sum(one.added.ms for one in running)
        now = self._priced(max(batch / plain_ms, tokens / ms), batch)
        for one in running:
            for method in one.seq.methods if one.able else ():
                if method not in one.seq.lookups:
                    now.models.setdefault(method, []).append(one)
                elif method not in now.lookups:
                    now.lookups[method] = now.rate * self.costs.proposal(method, 1, one.seq.most(method))
        return now

    def _priced(self, rate: float, batch: int) -> Round:
        return Round(self._now.number + 1, batch, rate, rate * self.costs.row(batch), rate * self.costs.first(batch))

    def _offer(self, now: Round) -> Reason:
        """Sets what the model that gains most is to draft, and probes of the others; returns why nothing is drafted."""
        best, used, refused = 0.0, "", Reason.COOLDOWN
        for method, group in now.models.items():
            offers, gain = self._weigh(now, method, group) if self.costs.calls(method) >= COLD else ({}, 0.0)
            if gain > best:
                best, used, now.offers = gain, method, offers
            elif not best:
                refused = self._refusal(method, group)
        for method in now.models.keys() - {used}:
            self._probe(now, method)
            if not now.number % LONGEST_GAP and method in self._methods:
                self._methods[method].discount(IDLE_FADE**LONGEST_GAP)
        return refused

    def _weigh(self, now: Round, method: str, group: list[Running], sure: bool = False) -> tuple[dict[int, Ask], float]:
        """One proposal for these sequences at its best K, and the tokens that it gains: 0 where it does not pay.

        With `sure` every draft is taken for accepted.
        """
        price = self.costs.prices(method, len(group))
        call, depth, each = now.rate * price.call, now.rate * price.depth, now.row + now.rate * price.draft
        gains = []
        for one in group:
            curve = self._acceptance(method, one.of).survival(one.shift(method)) if not sure else (1.0,) * POSITIONS
            read = now.rate * price.unread * one.unread(method) / one.left
            gains.append(gains_of(curve[: min(one.seq.most(method), one.seq.room - 1)], each, now.first, read))
        k, gain = best_depth(gains, call, depth)
        asks = {one.seq.id: Ask(method, min(k, len(some))) for one, some in zip(group, gains, strict=True) if k and any(some)}
        return asks, gain

    def _refusal(self, method: str, group: list[Running]) -> Reason:
        """Why a model does not pay: in this batch, at this acceptance, or at any."""
        alone = self._priced(1 / self.costs.step(1), 1)
        best = max(group, key=lambda one: one.shift(method))
        if self._weigh(alone, method, [best])[1]:
            return Reason.LOAD if self._now.batch > 1 else Reason.COST
        return Reason.LOW_ACCEPTANCE if self._weigh(alone, method, [best], sure=True)[1] else Reason.COST

    def _probe(self, now: Round, method: str) -> None:
        """A draft by a model out of use, for the sequence of which it has least to read; what is not known yet is free."""
        one = min(now.models[method], key=lambda one: one.unread(method))
        costs, k = self.costs, min(COLD, one.seq.most(method), one.seq.room - 1)
        if known := costs.calls(method) >= COLD:
            k = 1
        ms = costs.proposal(method, 1, k, one.unread(method)) + costs.step(now.batch, 1, k) - costs.step(now.batch)
        if now.probe is None and (not known or self._budget_ms >= ms):
            self._budget_ms -= ms if known else 0.0
            now.probe, now.offers[one.seq.id] = one.seq.id, Ask(method, k)

    def _decision(self, now: Round, one: Running, refused: Reason) -> Decision:
        seq, probe = one.seq, now.probe == one.seq.id
        asks = [Ask(m, min(seq.most(m), seq.room - 1)) for m in seq.methods if not probe and self._due(now, one, m)]
        if asks:
            now.asked.add(seq.id)
        if seq.id in now.offers:
            asks.append(now.offers[seq.id])
        if not asks:
            return plain(seq, refused)
        chained = not probe and seq.join is not False and not now.lookups.keys().isdisjoint(seq.methods)
        return Decision.of(asks, reach=min(seq.room - 1, max(map(seq.most, seq.methods))) if chained else 0)

    def _due(self, now: Round, one: Running, method: str) -> bool:
        """Whether a lookup is asked: in every round while it gains what it costs, then in every 2nd, 4th, .. LONGEST_GAPth."""
        if method not in now.lookups or not one.able:
            return False
        price, gain = now.lookups[method], one.added.gain
        gap = 1 if gain >= price else 2 ** ceil(log2(min(LONGEST_GAP, price / max(gain, 1e-9))))
        return now.number % gap == 0

    # after the lookups, and after the drafts

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        """The model is weighed again, for the sequences that lookups left."""
        now = self._now
        if method not in now.models or now.probe in {seq.id for seq in seqs}:
            return ks
        offers, _ = self._weigh(now, method, [self._running[seq.id] for seq in seqs])
        return [min(k, offers[seq.id].k) if seq.id in offers else 0 for seq, k in zip(seqs, ks, strict=True)]

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """The part of a draft that is worth its rows; none where the model is to gain more, or where it is only watched."""
        now, one = self._now, self._running[seq.id]
        chances = [chance for name, _, buckets in parts(seq, draft, method) for chance in self._chances(name, one, buckets)]
        curve, tokens = list(accumulate(chances, mul)), 0.0
        lookup, best, most = method in now.lookups, 0, 0.0
        if lookup and seq.id in now.offers:  # what the model would gain if nobody else asked it
            most = self._weigh(now, now.offers[seq.id].method, [one])[1]
        for k, survival in enumerate(curve if not (lookup and one.missing and method not in seq.given) else (), 1):
            tokens += survival
            if (gain := tokens - now.first - k * now.row) > most:
                best, most = k, gain
        if now.probe == seq.id:
            best = len(curve)
        if not best:
            self._shadow.watch(seq, method, draft.cut(draft.own(seq.methods)))
        now.estimates[seq.id] = Estimate(sum(curve[:best]), now.first + best * now.row)
        return draft.cut(best)

    def estimate(self, seq: Sequence) -> Estimate | None:
        return self._now.estimates.get(seq.id)

    # afterwards

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        self._budget_ms += PROBE_SHARE * (timing.target_ms or 0.0)
        for span, verdict in zip(spans, verdicts, strict=True):
            if one := self._running.get(span.seq.id):
                self._judge(one, span.draft, verdict)
                self._book(one, span.draft, verdict, timing)

    def _judge(self, one: Running, draft: Draft, verdict: Verdict) -> None:
        """Learns from the drafts that were verified, and from those that were only watched."""
        ended = verdict.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
        judged = min(verdict.accepted + (not ended), len(draft.tokens))
        for name, before, buckets in parts(one.seq, draft) if judged else ():
            if before < judged:
                self._learn(one, name, buckets[: judged - before], min(len(buckets), verdict.accepted - before))
        for fate in self._shadow.settle(one.seq):
            if not fate.overlaps:
                one.missing = max(0, one.missing - (fate.accepted > 0))
                self._learn(one, fate.method, buckets_of(fate.confidence, fate.judged), fate.accepted)

    def _learn(self, one: Running, method: str, buckets: list[int], accepted: int) -> None:
        acceptance = self._acceptance(method, one.of)
        one.own.setdefault(method, SequenceAcceptance()).observe(acceptance, buckets, accepted)
        acceptance.observe(buckets, accepted)

    def _book(self, one: Running, draft: Draft, verdict: Verdict, timing: Timing) -> None:
        """What drafting has added to the round for one sequence."""
        now, method = self._now, draft.sources[0] if draft.tokens else ""
        lookup, rows = method in now.lookups, now.first + len(draft.tokens) * now.row if method else 0.0
        gained, ms = max(0, len(verdict.tokens) - 1) if method else 0, rows / now.rate if rows else 0.0
        if not lookup and (call := timing.proposals.get(method)):
            ms += self.costs.proposal(method, call.texts, call.k) / call.texts
        gain = gained - rows if lookup else 0.0 if one.seq.id in now.asked else one.added.gain
        one.added.move(Added(gained, ms, lookup, gain))

    def forget(self, seq: Sequence) -> None:
        if one := self._running.pop(seq.id, None):
            of = one.of
            of.ended += 1
            weight = max(OF_LATE, 1 / of.ended)
            of.added.move(one.added, weight)
            of.length += weight * (seq.num_output - of.length)
        self._shadow.forget(seq)

    def _chances(self, method: str, one: Running, buckets: list[int]) -> list[float]:
        return self._acceptance(method, one.of).chances(buckets, one.shift(method))

    def _acceptance(self, method: str, of: PromptClass) -> Acceptance:
        found = of.acceptance.get(method)
        if found is None:
            found = of.acceptance[method] = Acceptance(self._methods.setdefault(method, Acceptance()))
        return found

    def state(self) -> dict[str, Any]:
        every = {"": self._methods, **{name: of.acceptance for name, of in self._classes.items()}}
        return {name: {method: one.state() for method, one in some.items()} for name, some in every.items()}

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        for name, some in STATE.validate_python(state).items():
            of = self._classes.setdefault(name, PromptClass()) if name else None
            for method, told in some.items():
                (self._acceptance(method, of) if of else self._methods.setdefault(method, Acceptance())).restore(told)


def gains_of(curve: Iterable[float], each: float, first: float, read: float) -> list[float]:
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
