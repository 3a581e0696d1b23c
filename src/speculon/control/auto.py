"""As far as it pays: for each round, which method drafts for which text, and how many positions of it are verified.

A round writes N tokens in M milliseconds. A draft whose first k tokens survive with probabilities S_1..S_k adds their sum to
N and its rows, and what the proposal takes, to M; of all that a text may do, plain decoding included, it does what makes N / M
greatest, given what the other texts of the round add of late. Where one proposal serves many texts they choose together: a
ratio is maximised by maximising N - r M at the r it leads to (Dinkelbach 1967), so a position is drafted while S > r x its
price. Look-ups that cost next to nothing are asked first; what they found is weighed against the costly method's promise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from speculon.control.estimate import Acceptance, Own, ProposalCost, StepCost, grade
from speculon.control.shadow import Shadow
from speculon.control.timing import Timing
from speculon.core import Ask, Decision, Draft, Load, Reason, Sequence, Span, SpanKind, Verdict

CHEAP = 0.05  # of a plain step of one text: what a look-up may cost
SELDOM = 16  # rounds between two look-ups of a text in which they find nothing
PROBE_K = 2  # drafts of a probe
PROBE_SHARE = 0.005  # of all time, for trying what is not believed to pay
BACK_OFF = 2.0  # after a probe that changed nothing
LONGEST = 2.0  # times the usual distance between two probes
MARGIN = 0.02  # of the round's rate: what a costly method must add to it
OF_LATE = 0.15  # weight of the last round in what a text adds
TURNS = 3  # of Dinkelbach's iteration


@dataclass(slots=True)
class Method:
    """What is known of one way of drafting."""

    acceptance: Acceptance = field(default_factory=Acceptance)  # of all texts
    kinds: dict[str, Acceptance] = field(default_factory=dict)  # of texts of one kind
    cost: ProposalCost = field(default_factory=ProposalCost)
    reach: float = 1.0  # share of the texts it is offered that ask it in the end: look-ups found nothing for them
    saved_ms: float = 0.0  # time that may be spent on a probe
    distance: float = 1.0  # between probes, in multiples of what the share of time allows

    def of(self, kind: str) -> Acceptance:
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = Acceptance(self.acceptance)
        return found


@dataclass(slots=True)
class Added:
    """Tokens and ms that a text adds to a round of late, beyond its one token and its one row."""

    tokens: float = 0.0
    ms: float = 0.0

    def late(self, tokens: float, ms: float) -> None:
        self.tokens += OF_LATE * (tokens - self.tokens)
        self.ms += OF_LATE * (ms - self.ms)


@dataclass(slots=True)
class Text:
    """What is known of one text."""

    cheap: Added = field(default_factory=Added)  # by look-ups
    costly: Added = field(default_factory=Added)
    own: dict[str, Own] = field(default_factory=dict)

    def of(self, method: str) -> Own:
        found = self.own.get(method)
        if found is None:
            found = self.own[method] = Own()
        return found


@dataclass(slots=True)
class Round:
    """What is believed of the round that runs."""

    number: int = 0
    plain_ms: float = 1.0
    tokens: float = 0.0
    ms: float = 1.0
    first_ms: float = 0.0  # of a text's first draft beyond a draft's row
    row_ms: float = 0.0  # of each draft
    cheap: set[str] = field(default_factory=set)  # methods
    costly: dict[str, list[Sequence]] = field(default_factory=dict)  # method -> texts it may draft for
    promise: dict[int, Promise] = field(default_factory=dict)  # text -> what a costly method would add
    kept: dict[int, list[float]] = field(
        default_factory=dict
    )  # text -> chances of the drafts it was given, were it like all others
    probes: set[int] = field(default_factory=set)  # texts whose draft is kept whole, to learn from it

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


@dataclass(frozen=True, slots=True)
class Promise:
    ask: Ask
    tokens: float
    ms: float


class Auto:
    """The policy `auto`."""

    def __init__(self, probe_share: float = PROBE_SHARE) -> None:
        self.costs = StepCost()
        self.methods: dict[str, Method] = {}
        self._texts: dict[int, Text] = {}
        self._shadow = Shadow()  # of the drafts that were not worth their rows: they are evidence, too
        self._share = probe_share
        self._round = Round()

    # deciding

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        if not self.costs.known:
            return [self._plain(seq, Reason.COLD) for seq in seqs]
        able = [seq for seq in seqs if not seq.plain and seq.room > 1]
        now = self._begin(seqs, able)
        for method, wanting in now.costly.items():
            self._offer(method, wanting)
        asks = {seq.id: self._asks(seq) for seq in able}
        self._probe(able, asks)
        return [Decision.of(asks[seq.id]) if asks.get(seq.id) else self._plain(seq, Reason.COST) for seq in seqs]

    def _begin(self, seqs: list[Sequence], able: list[Sequence]) -> Round:
        now = self._round = Round(self._round.number + 1, self.costs.at(len(seqs), 0, 0))
        now.tokens, now.ms = float(len(seqs)), now.plain_ms
        for seq in seqs:
            text = self._text(seq)
            now.tokens += text.cheap.tokens + text.costly.tokens
            now.ms += text.cheap.ms + text.costly.ms
        now.first_ms, now.row_ms = self.costs.first, self.costs.row
        least = CHEAP * self.costs.at(1, 0, 0)
        for seq in able:
            for method in seq.methods:
                if method in now.costly:
                    now.costly[method].append(seq)
                elif method not in now.cheap and self._know(method).cost.at(1, seq.most(method)) <= least:
                    now.cheap.add(method)
                elif method not in now.cheap:
                    now.costly[method] = [seq]
        return now

    def _asks(self, seq: Sequence) -> list[Ask]:
        """Look-ups in every round where they have found something of late, else now and then; then what promises most."""
        asks, now, text = [], self._round, self._text(seq)
        for method in seq.methods:
            if method in now.cheap:
                k = min(seq.most(method), seq.room - 1)
                price = now.rate * self._know(method).cost.at(1, k)
                distance = int(min(SELDOM, price / max(text.of(method).worth, 1e-9)))
                if distance < 2 or not (now.number + seq.id) % distance:
                    asks.append(Ask(method, k))
        promise = now.promise.get(seq.id)
        return [*asks, promise.ask] if promise else asks

    def _offer(self, method: str, seqs: list[Sequence]) -> None:
        """Notes what one proposal of a costly method would add to the texts it pays for, where none promises more."""
        now, known = self._round, self._know(method)
        group = [(self._text(seq), min(seq.most(method), seq.room - 1)) for seq in seqs]
        others = 1 - 1 / len(seqs)  # seen from one of them: whose look-ups found nothing
        tokens = now.tokens - sum(text.costly.tokens + text.cheap.tokens * (1 - others) for text, _ in group)
        ms = now.ms - sum(text.costly.ms + text.cheap.ms * (1 - others) for text, _ in group)
        survivals = [known.of(seq.kind).survival(text.of(method), k)[:k] for seq, (text, k) in zip(seqs, group, strict=True)]
        asking = 1 + known.reach * (len(seqs) - 1)  # how many come to it
        rate, plan = tokens / ms, None
        for _ in range(TURNS):
            found = self._best(known, survivals, asking, rate)
            if found is None:
                break
            plan, gain, cost = found
            rate = (tokens + gain) / (ms + cost)
        if plan is None or rate < (1 + MARGIN / len(seqs)) * tokens / ms:
            return
        best, price = plan
        call = known.cost.at(asking, best) / asking
        for seq, survival in zip(seqs, survivals, strict=True):
            k = sum(chance > price for chance in survival[:best])
            promise = Promise(Ask(method, k), sum(survival[:k]), call + now.first_ms + k * now.row_ms)
            had = now.promise.get(seq.id)
            if k and (had is None or promise.tokens - rate * promise.ms > had.tokens - rate * had.ms):
                now.promise[seq.id] = promise

    def _best(
        self, known: Method, survivals: list[list[float]], asking: float, rate: float
    ) -> tuple[tuple[int, float], float, float] | None:
        """((most positions, least survival), tokens, ms) of the proposal that gains most where a ms could write `rate` tokens."""
        now, share = self._round, asking / len(survivals)
        price = rate * now.row_ms
        kept = [[chance for chance in survival if chance > price] for survival in survivals]
        kept = [survival for survival in kept if survival]
        if not kept:
            return None
        first = share * len(kept) * now.first_ms
        best, most, tokens, rows = None, 0.0, 0.0, 0.0
        for k in range(1, max(map(len, kept)) + 1):
            there = [survival[k - 1] for survival in kept if len(survival) >= k]
            tokens, rows = tokens + share * sum(there), rows + share * len(there)
            ms = known.cost.at(asking, k) + first + rows * now.row_ms
            if tokens - rate * ms > most:
                most, best = tokens - rate * ms, ((k, price), tokens, ms)
        return best

    # after the drafts

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """The part of a draft that is worth its rows; none where another method promises more."""
        now, text, grades = self._round, self._text(seq), grades_of(draft.confidence, len(draft.tokens))
        acceptance, own = self._know(method).of(seq.kind), text.of(method)
        chances = (own.adjust(acceptance.chance(i, grade)) for i, grade in enumerate(grades))
        if seq.id in now.probes:
            return draft
        tokens = now.tokens - text.cheap.tokens - text.costly.tokens
        ms = now.ms - text.cheap.ms - text.costly.ms
        best, rate, row = 0, tokens / ms, ms + now.first_ms
        promise = now.promise.get(seq.id)
        if promise is not None and promise.ask.method != method:
            rate = max(rate, (tokens + promise.tokens) / (ms + promise.ms))
        for k, survival in enumerate(accumulate(chances, mul), 1):
            tokens, row = tokens + survival, row + now.row_ms
            if tokens > rate * row:
                best, rate = k, tokens / row
        if not best:
            self._shadow.watch(seq, method, draft)
        return draft.cut(best)

    # learning

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        now, drafting = self._round, [span for span in spans if span.draft.tokens]
        if spans and timing.target_ms is not None:
            drafts = sum(len(span.draft.tokens) for span in drafting)
            self.costs.observe(len(spans), len(drafting), drafts, timing.target_ms)
        for method, (texts, k, ms) in timing.proposals.items():
            known = self._know(method)
            known.cost.observe(texts, k, ms)
            if method in now.costly:
                known.reach += OF_LATE * (texts / len(now.costly[method]) - known.reach)
        for span, verdict in zip(spans, verdicts, strict=True):
            seq, draft = span.seq, span.draft
            if draft.tokens:
                ended = verdict.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
                judged = min(verdict.accepted + (not ended), len(draft.tokens))
                self._judge(seq, draft.sources[0], draft.confidence, len(draft.tokens), verdict.accepted, judged)
                if seq.id in now.probes:
                    self._conclude(seq, draft.sources[0], 2 * verdict.accepted >= judged)
            if seq.id in self._texts:
                self._learn(self._texts[seq.id], span, verdict, timing)
                for fate in self._shadow.settle(seq):
                    if not fate.overlaps:
                        self._judge(seq, fate.method, fate.confidence, fate.drafted, fate.accepted, fate.judged)
        for known in self.methods.values():
            known.saved_ms += self._share / known.distance * (timing.target_ms or 0.0)
        now.probes.clear()  # a round of which `decide` heard nothing may come next

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)
        self._shadow.forget(seq)

    def _learn(self, text: Text, span: Span, verdict: Verdict, timing: Timing) -> None:
        """What the text has added to the round, by which kind of method."""
        now, draft = self._round, span.draft
        method = draft.sources[0] if draft.tokens else None
        rows = now.first_ms + len(draft.tokens) * now.row_ms if method else 0.0
        accepted = len(verdict.tokens) - 1
        if method in now.costly:
            texts, _, ms = timing.proposals.get(method, (1, 0, 0.0))
            text.costly.late(accepted, rows + ms / texts)
            text.cheap.late(0.0, 0.0)
        else:
            text.cheap.late(accepted, rows)
            text.costly.late(0.0, 0.0)
        for name in now.cheap.intersection(span.seq.methods):
            text.of(name).asked(accepted - now.rate * rows if name == method else 0.0)

    def _judge(
        self, seq: Sequence, method: str, confidence: tuple[float, ...] | None, drafted: int, accepted: int, judged: int
    ) -> None:
        """Of a draft's tokens the first `judged` were held against the text, and the first `accepted` are in it."""
        grades = grades_of(confidence, drafted)
        known = self._know(method).of(seq.kind)
        if seq.id in self._texts:
            self._texts[seq.id].of(method).observe([known.chance(i, grade) for i, grade in enumerate(grades[:judged])], accepted)
        known.observe(grades, accepted, judged)

    def _conclude(self, seq: Sequence, method: str, worked: bool) -> None:
        """What a probe has shown."""
        known = self._know(method)
        known.distance = 1.0 if worked else min(LONGEST, known.distance * BACK_OFF)
        if worked:  # at once again: a surprise is either luck or news
            known.saved_ms = float("inf")
            for evidence in (known.acceptance, known.of(seq.kind), self._text(seq).of(method)):
                evidence.doubt()

    def _probe(self, seqs: list[Sequence], asks: dict[int, list[Ask]]) -> None:
        """Has one text try a costly method that nobody is asked for, when time has been saved for it."""
        now = self._round
        used = {promise.ask.method for promise in now.promise.values()}
        for method, wanting in now.costly.items():
            known, seq = self._know(method), wanting[now.number % len(wanting)]
            if method in used:
                continue
            k = min(PROBE_K, seq.most(method), seq.room - 1)
            if known.saved_ms >= known.cost.at(1, k) + now.first_ms + k * now.row_ms:
                known.saved_ms = 0.0
                asks[seq.id] = [Ask(method, k)]
                now.probes.add(seq.id)

    # what is known

    def _know(self, method: str) -> Method:
        found = self.methods.get(method)
        if found is None:
            found = self.methods[method] = Method()
        return found

    def _text(self, seq: Sequence) -> Text:
        found = self._texts.get(seq.id)
        if found is None:
            found = self._texts[seq.id] = Text()
        return found

    def _plain(self, seq: Sequence, reason: Reason) -> Decision:
        if seq.plain and seq.off is not None:
            reason = seq.off
        elif seq.room <= 1:
            reason = Reason.MAX_TOKENS
        return Decision(None, 0, reason)


def grades_of(confidence: tuple[float, ...] | None, drafted: int) -> list[int]:
    return [grade(value) for value in confidence] if confidence else [0] * drafted
