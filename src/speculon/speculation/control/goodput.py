"""The policy `goodput`: as many accepted tokens per millisecond as drafts can bring, plain decoding among the
choices.

A round of B sequences in which method m drafts k_i tokens for sequence i has (Liu 2024, SmartSpec, section 3)

    goodput = sum_i (1 + S_i1 + .. + S_ik_i) / (T(B, M, N) + sum_m P_m(n, k, unread))

S_ij = P(d_1..d_j of i accepted), T and P the ms of a step and of a proposal (`cost`), N = sum k_i the drafts
of M sequences that have any, k = max k_i. A ratio is maximised by maximising  tokens - r ms  at the r it
leads to (Dinkelbach 1967); r is the goodput of late, or that of plain decoding where it is more. With
T = .. + c M + d_1 + .. + d_N, where the d_j of a step rise (`cost`), and  P = a + b k + e n k + f unread  it
follows what drafts must bring:

    trim     draft j of i is verified while  S_ij > r d, if the sum of  S_ij - r d  over them exceeds  r c;
             d is that of the row which it adds to the rows of the round so far
    decide   i gains  G_i(k) = max over k_i <= k of  sum_j (S_ij (1 - u_i) - r (d + e)) - r c - u_i,
             u_i = r f unread / tokens left; m is asked for  k = argmax of  sum_i G_i(k) - r (a + b k), where
             that is > 0; d is the mean of the j-th rows of all n

Of a tree, S_ij is the chance that the path of node j is accepted, and k in P its depth (`trees`).

Lookups, whose P is next to nothing, are asked first, for it is not known before whether they find anything:
in every round while what they are expected to gain, of late, exceeds r P, else ever more rarely. A draft that
trim drops is compared with the tokens of its round. The chance of a draft depends on the tokens that agree
before it, matched or drafted (`acceptance`). What came with a request is verified whole until a draft of it
is rejected. `confirm` weighs the model again for the sequences that lookups left. S carries the bonus of UCB;
a model out of use gets single proposals, for a fixed share of all time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, log2
from typing import Any

from speculon.core.types import (
    Ask,
    Decision,
    Draft,
    Estimate,
    Load,
    Reason,
    SpanOutcome,
    Timing,
    Verdict,
    shared_length,
)
from speculon.decoding.rounds import Budget, Drafted, Judged
from speculon.decoding.sequence import Sequence
from speculon.speculation.control.acceptance import POSITIONS, STATE, Acceptance
from speculon.speculation.control.cost import BENDS, OF_LATE, Costs
from speculon.speculation.control.policy import Policy
from speculon.speculation.control.statistics import Added, PromptClass, Running, class_of, parts
from speculon.speculation.control.trees import DraftShape, forks

COLD = 2  # proposals before a cost is believed, drafts of a probe
LONGEST_GAP = 16  # rounds between two proposals of a lookup that finds nothing
# rounds between two weighings of models while none pays: each takes 0.1 ms for 8 sequences and two models
WEIGH_GAP = 2
PROBE_SHARE = 0.005  # of all time, for single proposals of models out of use
# judged drafts of a model before it is out of use: in scenes with two, 0 chose the worse one in 5 %, 4 in 2 %
TRIED = 4


@dataclass(slots=True)
class RoundPrices:
    """The round that runs; prices are in tokens: r times ms."""

    number: int = 0
    batch: int = 0
    rate: float = 0.0  # r, tokens per ms
    first: float = 0.0  # r c
    branch: float = 0.0  # of one more branch of a tree
    rows: int = 0  # of the step so far, beside one of each sequence
    lookups: dict[str, float] = field(default_factory=dict)  # method -> price of a proposal
    # method -> the sequences it may draft for
    models: dict[str, list[Running]] = field(default_factory=dict)
    probe: Budget | None = None  # whose draft is a probe

    def with_forks(self, prices: list[float], forks: Seq[bool]) -> list[float]:
        """The prices of rows, of which some begin a branch."""
        return [price + fork * self.branch for price, fork in zip(prices, forks, strict=False)]


class Goodput(Policy):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._methods: defaultdict[str, Acceptance] = defaultdict(Acceptance)  # over all classes
        self._classes: dict[str, PromptClass] = {}
        self._running: dict[int, Running] = {}
        self._budget_ms = 0.0  # for probes
        self._refused: Reason | None = None  # why no model paid when they were last weighed
        self._now = RoundPrices()

    # before the drafts

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        if not self.costs.known:
            return [Decision.plain(budget.reason or Reason.COLD) for budget in budgets]
        running = [self._stats(budget) for budget in budgets]
        now = self._now = self._begin(running, max(len(budgets), load.running))
        offers: dict[Budget, Ask] = {}
        if self._refused is None or now.number % WEIGH_GAP == 0:
            self._refused = self._offer(now, offers)
        plain = Decision.plain(self._refused or Reason.COOLDOWN)
        for stats in running:
            stats.decision = self._decision(now, stats, offers.get(stats.budget), plain)
        return [stats.decision for stats in running]

    def _stats(self, budget: Budget) -> Running:
        """A sequence begins with what its class had on average: the last rounds of a text are its best."""
        seq = budget.seq
        if stats := self._running.get(seq.id):
            stats.budget = budget
            return stats
        cls = self._classes.setdefault(class_of(seq.request), PromptClass(self._methods))
        # lookups are asked at first: it may repeat what they know
        added = replace(cls.added, gain=max(OF_LATE, cls.added.gain))
        return self._running.setdefault(seq.id, Running(budget, cls, added))

    def _begin(self, running: list[Running], batch: int) -> RoundPrices:
        """The prices, and who may draft for whom."""
        plain_ms = self.costs.step(batch)
        tokens = batch + sum(stats.added.tokens for stats in running)
        ms = plain_ms + sum(stats.added.ms for stats in running)
        now = self._priced(max(batch / plain_ms, tokens / ms), batch)
        # rows of prompts, and of other policies' sequences, are in the step, too
        now.rows = BENDS[-1] if batch > len(running) else 0
        for stats in running:
            for method, k in stats.budget.max_drafts.items():
                if not k:
                    continue
                if method not in stats.seq.request.lookups:
                    now.models.setdefault(method, []).append(stats)
                elif method not in now.lookups:
                    now.lookups[method] = now.rate * self.costs.proposal(method, 1, k)
        return now

    def _priced(self, rate: float, batch: int) -> RoundPrices:
        first, branch = rate * self.costs.first(batch), rate * self.costs.branch(batch)
        return RoundPrices(self._now.number + 1, batch, rate, first, branch)

    def _offer(self, now: RoundPrices, offers: dict[Budget, Ask]) -> Reason | None:
        """Adds what the best model is to draft, and a probe of another; returns why no model gains."""
        best, used, refused, asks = 0.0, "", Reason.COOLDOWN, dict[Budget, Ask]()
        for method, group in now.models.items():
            weighed, gain = self._weigh(now, method, group) if self.costs.calls(method) >= COLD else ({}, 0.0)
            if gain > best:
                best, used, asks = gain, method, weighed
            elif not best:
                refused = self._refusal(method, group)
        offers.update(asks)
        for method in now.models.keys() - {used}:
            self._probe(now, method, offers)
        return None if best else refused

    def _weigh(
        self,
        now: RoundPrices,
        method: str,
        group: list[Running],
        sure: bool = False,
        bounds: Seq[int] = (),
    ) -> tuple[dict[Budget, Ask], float]:
        """The drafts of each in one proposal at its best, chains or trees, and the tokens that they gain
        (`sure`: if all are accepted). `bounds` are the most drafts of each, instead of those of its budget.
        """
        price = self.costs.prices(method, len(group))
        call, depth = now.rate * price.call, now.rate * price.depth
        bounds = bounds or [stats.budget.max_drafts[method] for stats in group]
        rows = self.costs.rows(now.batch, now.rows, len(group), max(bounds))
        prices = [now.rate * (row + price.draft) for row in rows]
        reads = [now.rate * price.unread * stats.unread(method) / stats.left() for stats in group]
        asks, best_gain = dict[Budget, Ask](), 0.0
        for shapes in self._shapes(method, group, sure):
            gains = [
                draft_gains(shape.values[:bound], now.with_forks(prices, shape.forks), now.first, read)
                for shape, bound, read in zip(shapes, bounds, reads, strict=True)
            ]
            for k in range(1, max(map(len, gains), default=0) + 1):
                ends = [min(k, len(some)) for some in gains]
                deepest = max(shape.depths[end - 1] for shape, end in zip(shapes, ends, strict=True) if end)
                gain = sum(some[end - 1] for some, end in zip(gains, ends, strict=True) if end)
                if (gain := gain - call - depth * deepest) > best_gain:
                    best_gain = gain
                    asks = {
                        stats.budget: Ask(method, end, shape.depths[end - 1] * shape.tree)
                        for stats, shape, some, end in zip(group, shapes, gains, ends, strict=True)
                        if any(some)
                    }
        return asks, best_gain

    def _shapes(self, method: str, group: list[Running], sure: bool) -> Iterator[list[DraftShape]]:
        """What all drafts of a proposal may be: chains, then trees where any sequence may have one."""
        if sure:
            yield [DraftShape((1.0,) * POSITIONS)] * len(group)
            return
        limits = [stats.depth(method) for stats in group]
        chains, found = (
            list[DraftShape](),
            [(stats.cls.of(method), stats.own[method].shift) for stats in group],
        )
        for (acceptance, shift), limit in zip(found, limits, strict=True):
            chains.append(DraftShape(acceptance.survival(shift)[: limit or POSITIONS]))
        yield chains
        if any(limits):
            yield [
                acceptance.nodes(shift, limit) if limit else chain
                for (acceptance, shift), limit, chain in zip(found, limits, chains, strict=True)
            ]

    def _refusal(self, method: str, group: list[Running]) -> Reason:
        """Why a model does not pay: in this batch, at this acceptance, or at any."""
        alone = self._priced(1 / self.costs.step(1), 1)
        best = max(group, key=lambda stats: stats.own[method].shift)
        if self._weigh(alone, method, [best])[1]:
            return Reason.LOAD if self._now.batch > 1 else Reason.COST
        return Reason.LOW_ACCEPTANCE if self._weigh(alone, method, [best], sure=True)[1] else Reason.COST

    def _probe(self, now: RoundPrices, method: str, offers: dict[Budget, Ask]) -> None:
        """A proposal of a model out of use, for the sequence that accepts most of it, once time was saved."""
        stats = min(now.models[method], key=lambda stats: (-stats.own[method].shift, stats.unread(method)))
        k = min(COLD, stats.budget.max_drafts[method])
        ms = (
            self.costs.proposal(method, 1, k, stats.unread(method))
            + self.costs.step(now.batch, 1, k)
            - self.costs.step(now.batch)
        )
        # else a model long in use would be probed in each round once it fails
        self._budget_ms = min(self._budget_ms, COLD * ms)
        new = self.costs.calls(method) < COLD or self._methods[method].seen < TRIED
        if now.probe is None and (self._budget_ms >= ms or new):
            self._budget_ms -= 0.0 if new else ms
            now.probe, offers[stats.budget] = stats.budget, Ask(method, k)

    def _decision(self, now: RoundPrices, stats: Running, offer: Ask | None, plain: Decision) -> Decision:
        budget, seq, probe = stats.budget, stats.seq, now.probe is stats.budget
        if budget.reason is not None:
            return Decision.plain(budget.reason)
        ks = budget.max_drafts
        asks = [
            Ask(method, k) for method, k in ks.items() if k and not probe and self._due(now, stats, method)
        ]
        stats.looked = bool(asks)
        if offer is not None:
            asks.append(offer)
        if not asks:
            return plain
        chained = (
            not probe and seq.request.chained is not False and not now.lookups.keys().isdisjoint(seq.methods)
        )
        return Decision.of(asks, chained=max(ks.values()) if chained else 0)

    def _due(self, now: RoundPrices, stats: Running, method: str) -> bool:
        """Whether a lookup is asked: in every round while it gains what it costs, then ever more rarely.

        The gap doubles up to LONGEST_GAP rounds.
        """
        if method not in now.lookups:
            return False
        price, gain = now.lookups[method], max(stats.added.gain, 1e-9)
        return (
            method in stats.seq.request.from_request
            or gain >= price
            or not now.number % int(2 ** ceil(log2(min(LONGEST_GAP, price / gain))))
        )

    # after the lookups, and after the drafts

    def confirm(self, method: str, asks: Mapping[Budget, Ask]) -> Mapping[Budget, Ask]:
        """The model is weighed again, for the sequences that lookups left."""
        now, none = self._now, Ask(method, 0)
        if method not in now.models or now.probe in asks:
            return asks
        group = [self._running[budget.seq.id] for budget in asks]
        weighed, _ = self._weigh(now, method, group, bounds=[ask.k for ask in asks.values()])
        return {budget: weighed.get(budget, none) for budget in asks}

    def trim(self, method: str, budget: Budget, draft: Draft) -> tuple[int, Estimate | None]:
        """The part of a draft that is verified."""
        now, seq, stats = self._now, budget.seq, self._running[budget.seq.id]
        curve = stats.curve(method, draft)
        prices = [now.rate * ms for ms in self.costs.rows(now.batch, now.rows, 1, len(curve))]
        if draft.parents is not None:
            prices = now.with_forks(prices, forks(draft.parents))
        from_request = method in seq.request.from_request
        verified = self._verified(now, stats, method, curve, prices)
        if from_request and method not in stats.rejected:
            verified = max(verified, draft.unchained(seq.methods))
        now.rows += verified
        if not verified:
            return 0, None
        return verified, Estimate(sum(curve[:verified]), now.first + sum(prices[:verified]))

    def _verified(
        self, now: RoundPrices, stats: Running, method: str, curve: list[float], prices: list[float]
    ) -> int:
        """The part of a draft that gains most; all of a probe's, and none where the model gains more."""
        if now.probe is stats.budget:
            return len(curve)
        least, asks = 0.0, stats.decision.asks
        model = next((ask.method for ask in asks if ask.method in now.models), None)
        if method in now.lookups and model is not None:  # what it would gain if nobody else asked it
            least = self._weigh(now, model, [stats])[1]
        nets = accumulate(
            (chance - price for chance, price in zip(curve, prices, strict=True)), initial=-now.first
        )
        gain, length = max(((net, -k) for k, net in enumerate(nets) if k), default=(0.0, 0))
        return -length if gain > least else 0

    # afterwards

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        self._budget_ms += PROBE_SHARE * (timing.target_ms or 0.0)
        row_ms = self._row_ms([one.draft for one in judged])
        for one in judged:
            if stats := self._running.get(one.seq.id):
                self._judge(stats, one.drafted, one.verdict)
                self._book(stats, one.drafted, one.verdict, row_ms, timing)
        self._now.probe = None

    def _row_ms(self, drafts: list[Draft]) -> float:
        """A draft's share of what the round's drafts have added to the step."""
        if not (rows := sum(len(draft.tokens) for draft in drafts)) or not self.costs.known:
            return 0.0
        batch, drafting = self._now.batch, sum(bool(draft.tokens) for draft in drafts)
        branches = sum(draft.branches for draft in drafts)
        return max(0.0, self.costs.step(batch, drafting, rows, branches) - self.costs.step(batch)) / rows

    def _judge(self, stats: Running, drafted: Drafted, verdict: Verdict) -> None:
        """Learns from the drafts that were verified; others are compared with the tokens of the round."""
        draft = drafted.draft
        for method, _, proposed in drafted.proposals:
            if not proposed.tokens and method not in stats.seq.request.lookups:
                stats.learn(method, 1, 0)  # an empty proposal costs as much as a rejected one
            elif not (draft.tokens and method == drafted.method):
                accepted = shared_length(proposed.tokens, verdict.tokens)
                judged = min(accepted + 1, len(proposed.tokens), len(verdict.tokens))
                stats.learn(method, judged, accepted, proposed.match)
        if draft.parents is not None:
            proposed = drafted.proposals[-1].draft
            stats.learn_tree(drafted.method, proposed.truncated(len(draft.tokens)), verdict.tokens)
            return
        judged = min(verdict.accepted + (verdict.outcome is not SpanOutcome.STOP), len(draft.tokens))
        if verdict.accepted < judged:
            stats.rejected.add(draft.sources[verdict.accepted])
        for name, before, count, match in parts(stats.seq, draft, drafted.method) if judged else ():
            if before < judged:
                stats.learn(name, min(count, judged - before), min(count, verdict.accepted - before), match)

    def _book(
        self, stats: Running, drafted: Drafted, verdict: Verdict, row_ms: float, timing: Timing
    ) -> None:
        """What drafting has added to the round for one sequence."""
        now, gain = self._now, 0.0 if stats.looked else stats.added.gain
        if not drafted.draft.tokens:
            return stats.book(Added(0.0, 0.0, 0.0, gain))
        ms = row_ms * len(drafted.draft.tokens)
        lookup = drafted.method in now.lookups
        if not lookup and (call := timing.calls.get(drafted.method)):
            ms += self.costs.proposal(drafted.method, call.sequences, call.k) / call.sequences
        gained = max(0, len(verdict.tokens) - 1)  # -1: it ended with this round
        if lookup and drafted.estimate is not None:
            gain = drafted.estimate.tokens - drafted.estimate.price
        stats.book(Added(gained, ms, (1 + gained) * lookup, gain))

    def forget(self, seq: Sequence) -> None:
        if stats := self._running.pop(seq.id, None):
            stats.cls.ended += 1
            weight = max(OF_LATE, 1 / stats.cls.ended)
            if stats.rounds:
                stats.cls.added.move(stats.mean, weight)
            stats.cls.length += weight * (seq.num_output - stats.cls.length)

    def state(self) -> dict[str, Any]:
        every = {"": self._methods, **{name: cls.acceptance for name, cls in self._classes.items()}}
        return {
            name: {method: acceptance.state() for method, acceptance in by_method.items()}
            for name, by_method in every.items()
        }

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        for name, some in STATE.validate_python(state).items():
            cls = self._classes.setdefault(name, PromptClass(self._methods)) if name else None
            for method, told in some.items():
                (cls.of(method) if cls else self._methods[method]).restore(told)


def draft_gains(curve: Seq[float], prices: list[float], first: float, read: float) -> list[float]:
    """What 1, 2, .. drafts of survival S gain, at the price of each, of any, and of reading per token."""
    net, gains = -first - read, list[float]()
    for survival, price in zip(curve, prices, strict=False):
        gain = survival * (1 - read) - price
        if gain <= 0:
            break
        net += gain
        gains.append(max(0.0, net))
    return gains
