"""As far as it pays: for each round, which method drafts for which text, and how many positions of it are verified.

What is maximised is the number of committed tokens per millisecond of all running texts together, in the long run. At a
long-run rate of r tokens per millisecond, whatever takes dt must bring r dt: one more row is verified while its survival
probability S > r dt, a proposal is asked for while what it brings exceeds r times what it takes (a ratio is maximised by
maximising numerator - r x denominator at the r it leads to; Dinkelbach 1967). So r is what was reached of late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from speculon.control.estimate import Acceptance, Own, ProposalCost, StepCost, grade
from speculon.control.timing import Timing
from speculon.core import NO_DRAFT, Ask, Decision, Draft, Load, Reason, Sequence, Span, SpanKind, Verdict

GAIN_LEARN = 0.02
CHEAP = 0.02  # of a plain step: a proposal below this is always asked for
PROBE_K = 4  # drafts of a probe
PROBE_SHARE = 0.005  # of all time, for trying what is not believed to pay
BACK_OFF = 2.0  # after a probe that changed nothing
LONGEST = 64.0  # times the usual distance between two probes
MARGIN = 1.02  # guess: what pays by less than this is noise


@dataclass(slots=True)
class Method:
    """What is known of one way of drafting."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    cost: ProposalCost = field(default_factory=ProposalCost)
    saved_ms: float = 0.0  # time that may be spent on a probe
    distance: float = 1.0  # between probes, in multiples of what the share of time allows


@dataclass(slots=True)
class Round:
    """What `decide` knows of the round that runs."""

    texts: int = 0
    rate: float = 0.0  # tokens per ms
    drafts: int = 0  # rows given out so far
    rest: dict[int, float] = field(default_factory=dict)  # text -> what the methods still to be asked would gain
    probes: set[int] = field(default_factory=set)  # texts whose draft is kept whole, to learn from it


class Auto:
    """The policy `auto`."""

    def __init__(self, probe_share: float = PROBE_SHARE) -> None:
        self.costs = StepCost()
        self.methods: dict[str, Method] = {}
        self._own: dict[int, dict[str, Own]] = {}  # text -> by method
        self._share = probe_share
        self._gain = 1.0  # tokens per ms, as a multiple of plain decoding's, of late
        self._round = Round()

    # deciding

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        able = [seq for seq in seqs if not seq.plain and seq.room > 1]
        if not self.costs.known:
            return [self._plain(seq, Reason.COLD) for seq in seqs]
        self._round = Round(len(seqs), max(1.0, self._gain) * len(seqs) / self.costs.at(len(seqs), 0))
        asks: dict[int, list[Ask]] = {}
        asks = self._choose(able)
        self._probe(able, asks)
        return [Decision.of(asks[seq.id]) if asks.get(seq.id) else self._plain(seq, Reason.COST) for seq in seqs]

    def _choose(self, seqs: list[Sequence]) -> dict[int, list[Ask]]:
        """Who is asked for each text: what costs next to nothing, then the one costly method that gains most."""
        now = self._round
        plain = self.costs.at(now.texts, 0)
        asks: dict[int, list[Ask]] = {seq.id: [] for seq in seqs}
        costly: dict[str, list[Sequence]] = {}
        for seq in seqs:
            for method in seq.methods:
                if self._know(method).cost.at(1, seq.most(method)) <= CHEAP * plain:
                    asks[seq.id].append(Ask(method, min(seq.most(method), seq.room - 1)))
                else:
                    costly.setdefault(method, []).append(seq)
        now.rest = {}
        for method, wanting in costly.items():
            for seq, k, gain in self._call(method, wanting):
                if gain > now.rest.get(seq.id, 0.0):
                    now.rest[seq.id] = gain
                    asks[seq.id] = [ask for ask in asks[seq.id] if ask.method not in costly] + [Ask(method, k)]
        return asks

    def _call(self, method: str, seqs: list[Sequence]) -> list[tuple[Sequence, int, float]]:
        """(text, K, gain in tokens) of one call of a method, for the texts it pays for; none where it does not."""
        now, cost = self._round, self._know(method).cost
        price = now.rate * self._row_ms(now.texts, len(seqs))
        slots = [(seq, found) for seq in seqs if (found := self._worth(seq, method, price))]
        if not slots:
            return []
        marginal = [0.0] * max(len(found) for _, found in slots)
        for _, found in slots:
            for position, survival in enumerate(found):
                marginal[position] += survival - price
        calls = [now.rate * cost.at(len(slots), k) for k in range(1, len(marginal) + 1)]
        nets = [gain - call for gain, call in zip(accumulate(marginal), calls, strict=True)]
        best = max(range(len(nets)), key=nets.__getitem__)
        if nets[best] <= (MARGIN - 1) * len(slots):
            return []
        share = calls[best] / len(slots)
        return [(seq, len(kept), sum(kept) - price * len(kept) - share) for seq, found in slots if (kept := found[: best + 1])]

    def _worth(self, seq: Sequence, method: str, price: float) -> list[float]:
        """Survival of the drafts that a text should have of a method, whose confidence is not known yet."""
        own = self._owned(seq, method)
        survival, found = 1.0, []
        for chance in self._know(method).acceptance.chances(min(seq.most(method), seq.room - 1)):
            survival *= own.adjust(chance)
            if survival <= price:
                break
            found.append(survival)
        return found

    # after the drafts

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """The part of a draft that is worth its rows; none where another method would gain more."""
        now = self._round
        if seq.id in now.probes or not draft.tokens:
            now.drafts += len(draft.tokens)
            return draft
        survival = self._survival(seq, method, grades_of(draft))
        gains = [
            total - now.rate * (self.costs.at(now.texts, now.drafts + k) - self.costs.at(now.texts, now.drafts))
            for k, total in enumerate(accumulate(survival), 1)
        ]
        k = max(range(len(gains)), key=gains.__getitem__) + 1
        costly = self._know(method).cost.at(1, k) > CHEAP * self.costs.at(now.texts, 0)
        if gains[k - 1] <= (0.0 if costly else now.rest.get(seq.id, 0.0)):
            return NO_DRAFT
        now.drafts += k
        return draft.cut(k)

    # learning

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        drafts = sum(len(span.draft.tokens) for span in spans)
        if spans and timing.target_ms is not None:
            self.costs.observe(len(spans), drafts, timing.target_ms)
            ms = timing.target_ms + sum(ms for _, _, ms in timing.proposals.values())
            gain = sum(len(verdict.tokens) for verdict in verdicts) / len(spans) * self.costs.at(len(spans), 0) / ms
            self._gain += GAIN_LEARN * (gain - self._gain)
        for method, (texts, k, ms) in timing.proposals.items():
            self._know(method).cost.observe(texts, k, ms)
        for span, verdict in zip(spans, verdicts, strict=True):
            if span.draft.tokens:
                self._judge(span.seq, span.draft, verdict)
        for known in self.methods.values():
            known.saved_ms += self._share / known.distance * (timing.target_ms or 0.0)

    def forget(self, seq: Sequence) -> None:
        self._own.pop(seq.id, None)

    def _judge(self, seq: Sequence, draft: Draft, verdict: Verdict) -> None:
        method, grades = draft.sources[0], grades_of(draft)
        ended = verdict.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
        judged = min(verdict.accepted + (not ended), len(grades))
        chances = [self._know(method).acceptance.chance(i, g) for i, g in enumerate(grades[:judged])]
        self._know(method).acceptance.observe(grades, verdict.accepted, judged)
        self._own.setdefault(seq.id, {}).setdefault(method, Own()).observe(chances, verdict.accepted)
        if seq.id in self._round.probes:
            known = self._know(method)
            worked = 2 * verdict.accepted >= judged
            known.distance = 1.0 if worked else min(LONGEST, known.distance * BACK_OFF)
            if worked:  # at once again: a surprise is either luck or news
                known.acceptance.doubt()
                known.saved_ms = float("inf")

    def _probe(self, seqs: list[Sequence], asks: dict[int, list[Ask]]) -> None:
        """Has one text try a method that nobody is asked for, when time has been saved for it."""
        used = {ask.method for chosen in asks.values() for ask in chosen}
        for method, known in self.methods.items():
            seq = next((seq for seq in seqs if method in seq.methods), None)
            if method in used or seq is None:
                continue
            k = min(PROBE_K, seq.most(method), seq.room - 1)
            price = known.cost.at(1, k) + k * self._row_ms(len(seqs), 1)
            if known.saved_ms >= price:
                known.saved_ms = 0.0
                asks[seq.id] = [Ask(method, k)]
                self._round.probes.add(seq.id)

    # numbers

    def _survival(self, seq: Sequence, method: str, grades: list[int]) -> list[float]:
        """P(d_1..d_j all stand), j = 1..K."""
        acceptance, own = self._know(method).acceptance, self._owned(seq, method)
        return list(accumulate((own.adjust(acceptance.chance(i, g)) for i, g in enumerate(grades)), mul))

    def _owned(self, seq: Sequence, method: str) -> Own:
        """What the text itself has shown of the method; nothing yet: as all others."""
        return self._own.get(seq.id, {}).get(method) or Own()

    def _row_ms(self, texts: int, more: int) -> float:
        """Of one more row where `more` texts have a few."""
        rows = 4 * max(more, 1)
        return (self.costs.at(texts, rows) - self.costs.at(texts, 0)) / rows

    def _know(self, method: str) -> Method:
        return self.methods.setdefault(method, Method())

    def _plain(self, seq: Sequence, reason: Reason) -> Decision:
        if seq.plain and seq.off is not None:
            reason = seq.off
        elif seq.room <= 1:
            reason = Reason.MAX_TOKENS
        return Decision(None, 0, reason)


def grades_of(draft: Draft) -> list[int]:
    confidence = draft.confidence or (None,) * len(draft.tokens)
    return [grade(value) for value in confidence]
