"""The policy `goodput`: it chooses drafts so that each millisecond yields as many tokens as possible. Plain
decoding is one of the choices.

A round of B sequences in which method m drafts k_i tokens for sequence i has (Liu 2024, SmartSpec, section 3)

    goodput = sum_i (1 + S_i1 + .. + S_ik_i) / (T(B, M, N) + sum_m P_m(n, k, unread))

where S_ij = P(drafts 1..j of sequence i are all accepted), T and P are the ms of a step and of a proposal
(module `cost`), N = sum k_i counts the drafts of the M sequences that have any, and k = max k_i. To maximise
this ratio, the policy maximises  tokens - r ms , where r is the ratio that results (Dinkelbach 1967). As r it
takes the recent goodput, or the goodput of plain decoding if that is higher. Because T = .. + c_0 [M > 0]
+ c M + d_1 + .. + d_N, with d_j that rise with j (`cost`), and  P = a + b k + e n k + f unread , drafts pay
under these conditions:

    trim     draft j of i is verified while  S_ij > r d, provided that the sum of  S_ij - r d  over the
             verified drafts exceeds  r c; d is the cost of the row that the draft adds to the round so far.
             What is left of these sums, over all drafts of a method, has to exceed  r c_0, unless drafts
             are verified already in this round. For lookups d counts 1 + CAUTION (1 - 1 / B) times
    decide   sequence i gains  G_i(k) = max over k_i <= k of  sum_j (S_ij (1 - u_i) - r (d + e)) - r c - u_i,
             with u_i = r f unread / tokens left; method m is asked for the k that maximises
             sum_i G_i(k) - r (a + b k), if this is > r c_0; d is the mean cost of the j-th rows of all n

For a tree, S_ij is the probability that the path of node j is accepted, and k in P is the depth (`trees`).

Lookups are asked before models: their P is almost zero, and nobody knows beforehand whether they find a
match. They are asked in every round while their recent expected gain exceeds r P, and otherwise less and less
often. A draft that trim drops is compared with the tokens that the round yields. The acceptance probability
of a draft depends on the number of agreeing tokens before it, matched or drafted (`acceptance`). A draft
taken from the request itself, such as a prediction, is verified whole until one of its tokens is rejected.
`confirm` repeats the choice for a model with the sequences for which lookups found nothing. S includes the
bonus of UCB, and a model that is not in use gets single proposals as probes, for a fixed share of all time.
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
from speculon.speculation.control.policy import Policy, Trimmed
from speculon.speculation.control.statistics import Added, PromptClass, Running, class_of, parts
from speculon.speculation.control.trees import DraftShape, forks

COLD = 2  # proposals until a measured cost is believed; also the drafts of a probe
LONGEST_GAP = 16  # most rounds between two proposals of a lookup that finds nothing
# while no model pays, models are weighed only every so many rounds, or half as many as there are sequences:
# weighing takes 0.1 ms for 8 sequences and two models
WEIGH_GAP = 2
# Only drafts with a high estimate are verified, and many estimates are high by chance. The other sequences
# pay for a lookup's drafts, too: their share of the price, 1 - 1 / B, counts this much more (decision 050)
CAUTION = 0.4
PROBE_SHARE = 0.005  # share of all time that goes into probes of models that are not in use
# judged drafts until a model may be given up: in simulations with two models, 0 led to the worse one in 5 %
# of the cases, 4 in 2 %
TRIED = 4


@dataclass(slots=True)
class RoundPrices:
    """The prices of the current round, in tokens: r times ms."""

    number: int = 0
    batch: int = 0
    rate: float = 0.0  # r, tokens per ms
    drafting: float = 0.0  # r c_0, and 0 where the step pays it anyway
    first: float = 0.0  # r c
    branch: float = 0.0  # price of one more branch of a tree
    rows: int = 0  # rows of the step so far, besides one row per sequence
    lookups: dict[str, float] = field(default_factory=dict)  # method -> price of a proposal
    # method -> the sequences for which it may draft
    models: dict[str, list[Running]] = field(default_factory=dict)
    probe: Budget | None = None  # the sequence whose draft is a probe

    def with_forks(self, prices: list[float], forks: Seq[bool]) -> list[float]:
        """The prices of rows, where a row that begins a branch also costs `branch`."""
        return [price + fork * self.branch for price, fork in zip(prices, forks, strict=False)]


class Goodput(Policy):
    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._methods: defaultdict[str, Acceptance] = defaultdict(Acceptance)  # over all classes
        self._classes: dict[str, PromptClass] = {}
        self._running: dict[int, Running] = {}
        self._budget_ms = 0.0  # for probes
        self._refused: Reason | None = None  # why no model paid when models were last weighed
        self._now = RoundPrices()

    # before the drafts

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        if not self.costs.known:
            return [Decision.plain(budget.reason or Reason.COLD) for budget in budgets]
        running = [self._stats(budget) for budget in budgets]
        now = self._now = self._begin(running, max(len(budgets), load.running))
        offers: dict[Budget, Ask] = {}
        if self._refused is None or now.number % max(WEIGH_GAP, now.batch // 2) == 0:
            self._refused = self._offer(now, offers)
        plain = Decision.plain(self._refused or Reason.COOLDOWN)
        for stats in running:
            stats.decision = self._decision(now, stats, offers.get(stats.budget), plain)
        return [stats.decision for stats in running]

    def _stats(self, budget: Budget) -> Running:
        """The statistics of a sequence. A new one begins with the averages of its class, because the later
        rounds of a text are better than its first ones.
        """
        seq = budget.seq
        if stats := self._running.get(seq.id):
            stats.budget = budget
            return stats
        cls = self._classes.setdefault(class_of(seq.request), PromptClass(self._methods))
        # at first lookups are asked in any case, because the text may repeat something that they know
        added = replace(cls.added, gain=max(OF_LATE, cls.added.gain))
        return self._running.setdefault(seq.id, Running(budget, cls, added))

    def _begin(self, running: list[Running], batch: int) -> RoundPrices:
        """The prices of this round, and which methods may draft for which sequences."""
        plain_ms = self.costs.step(batch)
        tokens = batch + sum(stats.added.tokens for stats in running)
        ms = plain_ms + sum(stats.added.ms for stats in running)
        now = self._priced(max(batch / plain_ms, tokens / ms), batch)
        if batch > len(running):  # the step also has rows of prompts, or of sequences with other policies
            now.rows, now.drafting = BENDS[-1], 0.0
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
        drafting, first = (rate * ms for ms in self.costs.first(batch))
        return RoundPrices(
            self._now.number + 1, batch, rate, drafting, first, rate * self.costs.branch(batch)
        )

    def _offer(self, now: RoundPrices, offers: dict[Budget, Ask]) -> Reason | None:
        """Adds to `offers` what the best model shall draft, and a probe of another model. Returns the reason
        if no model pays.
        """
        best, used, refused, asks = now.drafting, "", Reason.COOLDOWN, dict[Budget, Ask]()
        for method, group in now.models.items():
            weighed, gain = self._weigh(now, method, group) if self.costs.calls(method) >= COLD else ({}, 0.0)
            if gain > best:
                best, used, asks = gain, method, weighed
            elif not used:
                refused = self._refusal(method, group)
        offers.update(asks)
        for method in now.models.keys() - {used}:
            self._probe(now, method, offers)
        return None if used else refused

    def _weigh(
        self,
        now: RoundPrices,
        method: str,
        group: list[Running],
        sure: bool = False,
        bounds: Seq[int] = (),
    ) -> tuple[dict[Budget, Ask], float]:
        """The best drafts for each sequence in one proposal, as chains or trees, and the tokens gained by
        them.

        With `sure` every draft counts as accepted. `bounds` replace the most drafts of each sequence's
        budget.
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
        """The shapes that the drafts of a proposal may have: all chains, and then trees, if any sequence may
        have one.
        """
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
        """Why a model does not pay: only in this batch (`load`), only at this acceptance rate
        (`low_acceptance`), or not even if every draft were accepted (`cost`).
        """
        alone = self._priced(1 / self.costs.step(1), 1)
        best = max(group, key=lambda stats: stats.own[method].shift)
        if self._weigh(alone, method, [best])[1] > alone.drafting:
            return Reason.LOAD if self._now.batch > 1 else Reason.COST
        sure = self._weigh(alone, method, [best], sure=True)[1]
        return Reason.LOW_ACCEPTANCE if sure > alone.drafting else Reason.COST

    def _probe(self, now: RoundPrices, method: str, offers: dict[Budget, Ask]) -> None:
        """Offers a single proposal of a model that is not in use, to the sequence that accepts its drafts
        most often, once enough time has been put aside for it.
        """
        stats = min(now.models[method], key=lambda stats: (-stats.own[method].shift, stats.unread(method)))
        k = min(COLD, stats.budget.max_drafts[method])
        ms = (
            self.costs.proposal(method, 1, k, stats.unread(method))
            + self.costs.step(now.batch, 1, k)
            - self.costs.step(now.batch)
        )
        # a model that was in use for long has a large budget: without this limit, it would be probed in every
        # round as soon as it stops paying
        self._budget_ms = min(self._budget_ms, COLD * ms)
        new = self.costs.calls(method) < COLD or self._methods[method].seen < TRIED
        if now.probe is None and (self._budget_ms >= ms or new):
            self._budget_ms -= 0.0 if new else ms
            now.probe, offers[stats.budget] = stats.budget, Ask(method, k)
            now.drafting = 0.0

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
        """Whether a lookup is asked in this round: always while its expected gain covers its price, otherwise
        less and less often. The gap doubles up to LONGEST_GAP rounds.
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
        """Weighs a model again, only with the sequences for which lookups found nothing."""
        now, none = self._now, Ask(method, 0)
        if method not in now.models or now.probe in asks:
            return asks
        group = [self._running[budget.seq.id] for budget in asks]
        weighed, gain = self._weigh(now, method, group, bounds=[ask.k for ask in asks.values()])
        if gain <= now.drafting:
            weighed = {}
        return {budget: weighed.get(budget, none) for budget in asks}

    def trim(self, method: str, drafts: Mapping[Budget, Draft]) -> Mapping[Budget, Trimmed]:
        """How many tokens of each draft are verified, and what is expected of them: none of any, if together
        they gain less than the first draft costs the step.
        """
        now, rows = self._now, self._now.rows
        trimmed = {budget: self._trim(method, budget, draft) for budget, draft in drafts.items()}
        gain = sum(one.estimate.tokens - one.estimate.price for one in trimmed.values() if one.estimate)
        if gain <= now.drafting and not any(self._whole(method, budget) for budget in drafts):
            now.rows = rows
            return dict.fromkeys(drafts, Trimmed(0))
        now.drafting = 0.0
        return trimmed

    def _whole(self, method: str, budget: Budget) -> bool:
        """Whether a draft is verified whatever it is expected to gain."""
        stats = self._running[budget.seq.id]
        from_request = method in budget.seq.request.from_request and method not in stats.rejected
        return from_request or self._now.probe is budget

    def _trim(self, method: str, budget: Budget, draft: Draft) -> Trimmed:
        now, seq, stats = self._now, budget.seq, self._running[budget.seq.id]
        curve = stats.curve(method, draft)
        prices = [now.rate * ms for ms in self.costs.rows(now.batch, now.rows, 1, len(curve))]
        if draft.parents is not None:
            prices = now.with_forks(prices, forks(draft.parents))
        verified = self._verified(now, stats, method, curve, prices)
        if self._whole(method, budget):
            verified = max(verified, draft.unchained(seq.methods))
        now.rows += verified
        if not verified:
            return Trimmed(0)
        return Trimmed(verified, Estimate(sum(curve[:verified]), now.first + sum(prices[:verified])))

    def _verified(
        self, now: RoundPrices, stats: Running, method: str, curve: list[float], prices: list[float]
    ) -> int:
        """How many of the first tokens gain most: none of a lookup's if the model would gain more."""
        caution = 1 + CAUTION * (1 - 1 / now.batch) * (method in now.lookups)
        nets = accumulate(
            (chance - caution * price for chance, price in zip(curve, prices, strict=True)),
            initial=-now.first,
        )
        gain, length = max(((net, -k) for k, net in enumerate(nets) if k), default=(0.0, 0))
        model = next((ask.method for ask in stats.decision.asks if ask.method in now.models), None)
        if method in now.lookups and model is not None and gain > 0:
            # without caution, beside what the model would gain if only this sequence used it
            gain = sum(curve[:-length]) - sum(prices[:-length]) - now.first
            gain -= self._weigh(now, model, [stats])[1]
        return -length if gain > 0 else 0

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
        """The ms that each draft has added to the step, on average over the drafts of the round."""
        if not (rows := sum(len(draft.tokens) for draft in drafts)) or not self.costs.known:
            return 0.0
        batch, drafting = self._now.batch, sum(bool(draft.tokens) for draft in drafts)
        branches = sum(draft.branches for draft in drafts)
        return max(0.0, self.costs.step(batch, drafting, rows, branches) - self.costs.step(batch)) / rows

    def _judge(self, stats: Running, drafted: Drafted, verdict: Verdict) -> None:
        """Learns from the drafts: verified ones by their verdict, others by comparison with the tokens of the
        round.
        """
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
        """Books the tokens and the ms that drafting has added to the round of one sequence."""
        now, gain = self._now, 0.0 if stats.looked else stats.added.gain
        if not drafted.draft.tokens:
            return stats.book(Added(0.0, 0.0, 0.0, gain))
        ms = row_ms * len(drafted.draft.tokens)
        lookup = drafted.method in now.lookups
        if not lookup and (call := timing.calls.get(drafted.method)):
            ms += self.costs.proposal(drafted.method, call.sequences, call.k) / call.sequences
        gained = max(0, len(verdict.tokens) - 1)  # without tokens the sequence ended in this round
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
        """Continues with a result of `state`. Raises `ValueError` for anything else."""
        for name, some in STATE.validate_python(state).items():
            cls = self._classes.setdefault(name, PromptClass(self._methods)) if name else None
            for method, told in some.items():
                (cls.of(method) if cls else self._methods[method]).restore(told)


def draft_gains(curve: Seq[float], prices: list[float], first: float, read: float) -> list[float]:
    """The gain of 1, 2, .. drafts, in tokens, up to the first draft that does not pay.

    `curve` is S_1, S_2, .., `prices` the price of each draft, `first` that of having any draft, and `read`
    that of reading the context, per token that is still to come.
    """
    net, gains = -first - read, list[float]()
    for survival, price in zip(curve, prices, strict=False):
        gain = survival * (1 - read) - price
        if gain <= 0:
            break
        net += gain
        gains.append(max(0.0, net))
    return gains
