"""As far as it pays: for each round, which method drafts for which text, and how many positions of it are verified.

A round writes N tokens in M milliseconds. A draft whose first k tokens survive with probabilities S_1..S_k adds their sum to
N and its rows, and what the proposal takes, to M; of all that a text may do, plain decoding included, it does what makes N / M
greatest, given what the other texts of the round add of late. Where one proposal serves many texts they choose together: a
ratio is maximised by maximising N - r M at the r it leads to (Dinkelbach 1967), so a position is drafted while S > r x its
price. Look-ups that cost next to nothing are asked first; what they found is weighed against the costly method's promise,
and that method once more (`confirm`) for the texts that are then without a draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, islice
from math import log, prod
from operator import mul
from typing import Any

from speculon.control.estimate import OUTLIER, Own, StepCost, grades_of
from speculon.control.known import OF_ALL, OF_LATE, Method, Others, Text, parts
from speculon.control.plan import TAKE_UP, Kind, Offer, Plan, Promise, Promised, ask, promised, refusal
from speculon.control.round import Group, Round
from speculon.control.saved import check
from speculon.control.shadow import Shadow
from speculon.control.timing import Timing
from speculon.core import Ask, Decision, Draft, Load, Proposal, Reason, Sequence, Span, SpanKind, Verdict

CHEAP = 0.05  # of a plain step of one text: what a look-up may cost
SELDOM = 8, 16  # rounds at most between two look-ups of a text: the longer where being awake costs more; all may rest meanwhile
IN_VAIN = 0.005  # guess: of all time, for being awake in vain in one round of so many
COLD_K = 4  # drafts of the first proposals of a method
AWAKE = 3.5  # guess: times what deciding takes, with looking, learning, and what both put out of the caches
PROBE_K = 2  # drafts of a probe
PROBE_SHARE = 0.005  # of all time, for trying what is not believed to pay; more where it must read long texts first
PROBE_DEBT = 4.0  # times its price, at most, that is saved afterwards for what it read: else the next one would never be due
SURPRISE = 0.1  # guess: the chance that so many drafts of a probe were believed to have to stand
LONGEST = 2.0  # times the usual distance between two probes, after some that changed nothing
AGAIN = 4  # rounds for which what costly methods promise is believed, of the same texts
NEWS = 8  # rounds for which a plan is kept, for the same texts
ALIKE = 20  # steps of a factor e in which what plans are made of is told apart
WHY_ROUNDS = 32  # for which a reason to refuse is taken for unchanged


class Auto:
    """The policy `auto`."""

    def __init__(self, probe_share: float = PROBE_SHARE) -> None:
        self.costs = StepCost()
        self.methods: dict[str, Method] = {}
        self._texts: dict[int, Text] = {}
        self._others: dict[str, Others] = {}  # by kind of text: what look-ups add
        self._shadow = Shadow()  # of the drafts that were not worth their rows: they are evidence, too
        self._share = probe_share
        self._round = Round()
        self._why: dict[tuple[str, int], tuple[int, Reason]] = {}  # method, texts -> when it was found out
        self._made: dict[tuple[tuple[Ask, ...], int] | Reason, Decision] = {}
        self._plans: dict[tuple[str, tuple[Kind, ...], int, int, int], tuple[Offer, Plan | None]] = {}
        self._promised = Promised()
        self._rest = 0  # rounds for which nothing is to be asked
        self._rested = 0  # of them, those that are over
        self._decide_ms = 0.0  # in rounds that are no rest, of late
        self._last: tuple[list[int], list[Decision]] = [], []  # texts and decisions of the last round

    # deciding

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        if not self.costs.known:
            return [self._plain(seq, Reason.COLD) for seq in seqs]
        ids = [seq.id for seq in seqs]
        if self._rested < self._rest and ids == self._last[0]:
            self._rested += 1
            return self._last[1]
        if self._goes_on(ids):
            self._round.again(map(self._texts.__getitem__, ids))
            return self._last[1]
        now = self._begin(seqs)
        now.promise, now.refused = self._promises(ids)
        self._probe()
        awake_ms = AWAKE * self._decide_ms
        now.seldom = SELDOM[awake_ms > SELDOM[0] * IN_VAIN * now.ms]
        now.awake = 0.0 if now.promise or now.probes else awake_ms * now.tokens / now.ms / len(seqs)
        decided = {seq.id: self._decision(seq, self._asks(seq, text)) for seq, text in now.able}
        self._last = ids, [decided.get(seq.id) or self._plain(seq, now.refused) for seq in seqs]
        self._rest = 0 if now.busy or len(self._shadow) else now.seldom - 1 - now.number % now.seldom
        return self._last[1]

    def _promises(self, ids: list[int]) -> tuple[dict[int, Promise], Reason]:
        """What the costly method that gains most would add, and why there is none; the same for a few rounds."""
        now, last = self._round, self._promised
        to, rate = (ids, [*now.costly]), now.tokens / now.ms
        if to != last.to or now.number - last.number >= AGAIN:
            offers = [self._offer(method, group) for method, group in now.costly.items()]
            # one for all: a call costs nearly as much for half of the texts
            best = max(offers, key=lambda offer: sum(promise.gain(rate) for promise in offer.values()), default={})
            last = self._promised = Promised(to, now.number, best, now.refused)
        return last.best, last.refused

    def _goes_on(self, ids: list[int]) -> bool:
        """Whether the round asks like the last one, of the same texts: to decide would take more than it may bring."""
        now, number = self._round, self._round.number + self._round.age + 1
        if ids != self._last[0] or not (now.busy and now.steady):
            return False
        if not number % now.seldom or number >= self._promised.number + AGAIN:  # all look, or promises are made anew
            return False
        return all(seq.room > now.longest and not seq.plain for seq, _ in now.able)

    def _begin(self, seqs: list[Sequence]) -> Round:
        """What the round would be if it went on as of late, and which texts may draft."""
        number = self._round.number + self._round.age + self._rested + 1
        for text in self._texts.values() if self._rested else ():
            text.bare += self._rested * bool(text.bare)
        self._rested = 0
        if number // NEWS != self._round.number // NEWS:
            self._plans.clear()
        now = self._round = Round(number, texts=len(seqs), plain_ms=self.costs.at(len(seqs), 0, 0))
        now.first_ms, now.row_ms = self.costs.first(max(1, len(seqs))), self.costs.row
        now.add(texts := [self._texts.get(seq.id) or self._meet(seq) for seq in seqs])
        least = CHEAP * self.costs.at(1, 0, 0)
        for seq, text in zip(seqs, texts, strict=True):
            if seq.plain or seq.room <= 1:
                continue
            now.able.append((seq, text))
            for method in seq.methods:
                if method in now.costly:
                    now.costly[method].append((seq, text))
                elif method not in now.cheap:
                    known = self._know(method)
                    ms = known.cost.at(1, seq.most(method))
                    known.costly = ms > least
                    if ms <= least:
                        now.cheap[method] = ms
                    else:
                        now.costly[method] = [(seq, text)]
        now.cheap = {method: ms * now.tokens / now.ms for method, ms in now.cheap.items()}
        return now

    def _meet(self, seq: Sequence) -> Text:
        """A new text: look-ups are believed to bring what they bring to others of its kind."""
        others = self._others.setdefault(seq.kind, Others())
        own = {} if seq.plain else {name: Own(worth=others.worth[name]) for name in seq.methods if name in others.worth}
        return self._texts.setdefault(seq.id, Text(replace(others.added), replace(others.added), own=own))

    def _asks(self, seq: Sequence, text: Text) -> tuple[Ask, ...]:
        """Look-ups in every round where they bring what they cost, else now and then; then what promises most."""
        now = self._round
        if seq.id in now.probes:
            now.busy, now.steady = True, False
            return (now.probes[seq.id],)
        asks = []
        for method in seq.methods:
            if (price := now.cheap.get(method)) is None or (not price and now.new.setdefault(method, seq.id) != seq.id):
                continue
            worth = text.of(method).worth - now.awake
            distance = 1.0 if not price or price < worth else (price / max(worth, 1e-9)) ** 2
            pause = int(distance) if distance < SELDOM[0] else now.seldom  # all at once: one that looks keeps all awake
            now.busy |= pause < now.seldom
            now.steady &= bool(price) and (pause == 1 or (pause == now.seldom and bool(now.number % pause)))
            if not now.number % pause:
                most = seq.most(method) if price else COLD_K  # nothing is known to cost nothing: what is new does
                asks.append(ask(method, min(most, seq.most(method), seq.room - 1)))
        if (promise := now.promise.get(seq.id)) is not None:
            asks.append(ask(promise.ask.method, min(promise.ask.k, seq.room - 1)))
        now.busy |= bool(asks)
        return tuple(asks)

    def _offer(self, method: str, group: Group) -> dict[int, Promise]:
        """What one proposal of a costly method would add for the texts it pays for."""
        now = self._round
        kinds = self._kinds(method, group, (seq.most(method) for seq, _ in group))
        alone = 1 / len(group)  # seen from one of them, whose look-ups found nothing
        reach = 1 - sum(text.cheap.share for _, text in group) * alone  # of the others, for whom they find nothing either
        tokens = now.tokens - sum(text.costly.tokens + text.cheap.tokens * alone for _, text in group)
        ms = now.ms - sum(text.costly.ms + text.cheap.ms * alone for _, text in group)
        offer, plan = self._planned(method, kinds, alone + reach * (1 - alone), tokens, ms)
        if plan is None:
            now.refused = self._refusal(method, kinds)
            return {}
        promises = {kind: promised(method, plan, offer, kind) for kind in plan.depths}
        return {seq.id: promises[kind] for (seq, _), kind in zip(group, kinds, strict=True) if kind in promises}

    def _planned(self, method: str, kinds: list[Kind], share: float, tokens: float, ms: float) -> tuple[Offer, Plan | None]:
        """The best proposal for a share of these texts; for a while the same where next to nothing is different."""
        key = method, tuple(kinds), round(ALIKE * share), round(ALIKE * log(tokens / ms)), round(ALIKE * log(ms))
        if (found := self._plans.get(key)) is None:
            offer = self._offered(method, kinds, tokens, ms)
            found = self._plans[key] = offer, offer.best(share, tokens, ms, self._round.texts)
        return found

    def _offered(self, method: str, kinds: list[Kind], tokens: float, ms: float) -> Offer:
        """What each draft is expected to save, in tokens, as far as one may be worth its row: where look-ups will soon have
        something again, they would write it in less time than others take for a token."""
        now, known, rate = self._round, self._know(method), tokens / ms
        texts, worths, price, keeps = Counter(kinds), dict[Kind, list[float]](), rate * now.row_ms, known.keeps(now.texts)
        for kind in texts:
            found, survivals = worths.setdefault(kind, []), known.of(kind[0]).survival(kind[1], kind[2])
            for survival, saved in zip(survivals, self._others[kind[0]].worths(rate, ms / now.texts), strict=False):
                worth = keeps * survival * saved
                if worth <= price:
                    break
                found.append(worth)
        return Offer(known.cost, texts, worths, now.first_ms, now.row_ms, keeps)

    def _kinds(self, method: str, group: Group, ks: Iterable[int]) -> list[Kind]:
        known, read_ms = self._know(method), self._know(method).cost.read
        found = []
        for (seq, text), k in zip(group, ks, strict=True):
            ms = read_ms * (len(seq.tokens) - seq.drafted.get(method, 0) - 1)
            part = 0
            if ms > TAKE_UP:  # its drafts share the price of reading it
                comes = 1.0 if method in text.wanted else known.comes(seq.kind)
                part = round(ms / max(1.0, comes * text.wants(known, self._others[seq.kind].left(seq))) / TAKE_UP)
            found.append((seq.kind, text.of(method).kind(known.of(seq.kind)), min(k, seq.room - 1), part))
        return found

    def _refusal(self, method: str, kinds: list[Kind]) -> Reason:
        """Why a costly method does not pay: in this crowd, at this acceptance, or at any."""
        now, known = self._round, self._know(method)
        key, rate = (method, now.texts), 1 / self.costs.at(1, 0, 0)
        since, reason = self._why.get(key, (-WHY_ROUNDS, Reason.COST))
        if now.number - since >= WHY_ROUNDS:
            best = max((known.of(kind[0]).survival(kind[1], kind[2]) for kind in {*kinds}), key=lambda survival: survival[0])
            reason = refusal(known.cost, best, now.texts, rate, self.costs.first(1), now.row_ms)
            self._why[key] = now.number, reason
        return reason

    def _probe(self) -> None:
        """Has one text try a costly method that nobody is asked for, when time has been saved for it."""
        now = self._round
        used = {promise.ask.method for promise in now.promise.values()}
        for method, group in now.costly.items():
            known, bare = self._know(method), [seq for seq, text in group if text.bare]  # the others are left to look-ups
            if method in used or not bare:
                continue
            seq = bare[known.probes % len(bare)]
            k = min(PROBE_K, seq.most(method), seq.room - 1)
            if known.saved_ms >= known.cost.at(1, k) + max(0.0, self.costs.at(now.texts, 1, k) - now.plain_ms):
                known.saved_ms = 0.0
                known.probes += 1
                now.probes[seq.id] = ask(method, k)

    # after the look-ups, and after the drafts

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        """A costly method is weighed once more, for the texts that nothing cheaper had a draft for."""
        now = self._round
        if method not in now.costly or any(seq.id in now.probes for seq in seqs):
            return ks
        kinds = self._kinds(method, [(seq, self._texts[seq.id]) for seq in seqs], ks)
        tokens, ms = now.texts + now.kept_tokens, now.plain_ms + now.kept_ms
        offer, plan = self._planned(method, kinds, 1.0, tokens, ms)
        found = [plan.of(kind) for kind in kinds] if plan else [0] * len(seqs)
        for seq, kind, k in zip(seqs, kinds, found, strict=True):
            now.hoped[seq.id] = method, sum(offer.worths[kind][:k]) / offer.keeps if k else 0.0, tokens / ms, ms / now.texts
        return found

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """The part of a draft that is worth its rows; none where another method promises more."""
        now, text = self._round, self._texts[seq.id]
        if seq.id in now.probes:
            return draft
        tokens = now.tokens - text.cheap.tokens - text.costly.tokens
        ms = now.ms - text.cheap.ms - text.costly.ms
        alone = kept = tokens, ms
        best, rate, rows = 0, tokens / ms, ms + now.first_ms
        promise = now.promise.get(seq.id)
        if promise is not None and promise.ask.method != method:
            now.passed.add(seq.id)
            rate = max(rate, (tokens + promise.tokens) / (ms + promise.ms))
        for k, survival in enumerate(accumulate(self._chances(seq, text, draft, method), mul), 1):
            tokens, rows = tokens + survival, rows + now.row_ms
            if tokens > rate * rows:
                best, rate, kept = k, tokens / rows, (tokens, rows)
        if best:
            now.kept_tokens += kept[0] - alone[0]
            now.kept_ms += kept[1] - alone[1]
        if (own := draft.own(seq.methods)) == best < len(draft.tokens):
            now.tails[seq.id] = draft
        if not best:
            self._shadow.watch(seq, method, draft.cut(own))
        return draft.cut(best)

    def _chances(self, seq: Sequence, text: Text, draft: Draft, method: str) -> list[float]:
        found: list[float] = []
        for name, _, grades in parts(seq, draft, method):
            found += text.of(name).chances(self._know(name).of(seq.kind), grades)
        return found

    # learning

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        whose = [span.seq.id in self._texts for span in spans]
        mine, own = any(whose), all(whose)
        if mine:  # others' rounds would pay for probes of this policy's texts
            self._pass_by(self._share * (timing.target_ms or 0.0))
        if self._rested:  # nothing to learn from
            return
        if mine:
            before = self._decide_ms or timing.decide_ms
            self._decide_ms = before + OF_LATE * (min(timing.decide_ms, OUTLIER * before) - before)
        now, drafting = self._round, [span for span in spans if span.draft.tokens]
        if spans and timing.target_ms is not None:
            drafts = sum(len(span.draft.tokens) for span in drafting)
            self.costs.observe(len(spans), len(drafting), drafts, timing.target_ms, own)
        probed = {ask.method for ask in now.probes.values()}
        for method, call in timing.proposals.items():
            known = self._know(method)
            if method in probed and call.texts == 1:  # else others read, too
                price = known.cost.at(call.texts, call.k)
                known.saved_ms -= min(max(0.0, call.ms - price), PROBE_DEBT * price)
            known.cost.observe(*call, own=own)
        for span, verdict in zip(spans, verdicts, strict=True):
            self._learn(span, verdict, timing)
        now.probes.clear()  # a round of which `decide` heard nothing may come next
        now.tails.clear()

    def _pass_by(self, ms: float) -> None:
        """A round goes by: `ms` of it are saved for probes of all costly methods together, and what is not seen fades."""
        now = self._round
        self.costs.fade(now.texts)
        for name, known in self.methods.items():
            known.save(now.texts, ms / len(now.costly) if name in now.costly else 0.0)

    def forget(self, seq: Sequence) -> None:
        if (text := self._texts.pop(seq.id, None)) is not None:
            for name, wanted in text.wanted.items():
                self._know(name).ended(seq.kind, wanted)
            self._others[seq.kind].ended(seq.num_output)
        self._shadow.forget(seq)

    def _learn(self, span: Span, verdict: Verdict, timing: Timing) -> None:
        seq, draft, text = span.seq, span.draft, self._texts.get(span.seq.id)
        if draft.tokens:
            ended = verdict.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
            judged = min(verdict.accepted + (not ended), len(draft.tokens))
            if text is not None and seq.id in self._round.probes:
                self._conclude(seq, text, draft.sources[0], grades_of(draft.confidence, judged), verdict.accepted)
            whole, stood = self._round.tails.get(seq.id, draft), verdict.accepted
            if len(draft.tokens) == stood < min(len(whole.tokens), len(verdict.tokens)):  # the bonus tells of what was dropped
                judged, stood = judged + 1, stood + (whole.tokens[stood] == verdict.tokens[stood])
            for name, before, grades in parts(seq, whole):
                if before < judged:
                    self._judge(seq, text, name, grades[: judged - before], min(len(grades), stood - before))
        if text is not None:  # it is this policy's
            self._book(seq, text, draft, len(verdict.tokens) - 1, timing)
            for fate in self._shadow.settle(seq):
                if not fate.overlaps:
                    self._judge(seq, text, fate.method, grades_of(fate.confidence, fate.judged), fate.accepted)

    def _judge(self, seq: Sequence, text: Text | None, method: str, grades: list[int], accepted: int) -> None:
        """Drafts of these classes were held against the text, and the first `accepted` are in it."""
        known = self._know(method)
        acceptance = known.of_others(seq.kind) if text is None and known.costly else known.of(seq.kind)
        if text is not None:
            text.of(method).observe(acceptance, grades, accepted)
        acceptance.observe(grades, accepted)

    def _book(self, seq: Sequence, text: Text, draft: Draft, gained: int, timing: Timing) -> None:
        """What the text has added to the round, by which kind of method, and what look-ups brought."""
        now, method = self._round, draft.sources[0] if draft.tokens else ""
        own = draft.own(seq.methods)
        if seq.id in now.hoped:
            name, hoped, rate, slot_ms = now.hoped[seq.id]
            saved = sum(islice(self._others[seq.kind].worths(rate, slot_ms), max(0, min(gained, own))))  # -1: it has ended
            self._know(name).keep(now.texts, saved, hoped)
            if hoped:
                text.ask(name, self._know(name), self._others[seq.kind].left(seq))
        rows = now.first_ms + len(draft.tokens) * now.row_ms if method else 0.0
        if method in now.costly:
            known, call = self._know(method), timing.proposals.get(method, Proposal(1, 0, 0.0))
            known.brings += OF_ALL * (gained - known.brings)
            text.costly.add(True, gained, rows + (call.ms - known.cost.read * call.unread) / call.texts)
            if seq.id in now.passed:  # what the draft that was passed over would have brought is not known
                return
            found, wrote = (False, 0.0, 0.0), gained
        else:
            text.costly.add(False, 0.0, 0.0)
            found, wrote = (bool(method), float(gained), rows), gained
        text.rounds += 1
        text.cheap.add(*found)
        text.ever.add(*found, 1 / text.rounds)
        others = self._others[seq.kind]
        others.added.add(*found, OF_ALL)
        if text.bare:
            others.back.add(found[0], text.bare, 1 - OF_ALL)
        if method in now.costly and own < len(draft.tokens) and gained >= own:  # behind its draft they had something again
            others.back.add(True, own, 1 - OF_ALL)
            wrote = 0
        text.bare = 0 if found[0] else wrote + 1
        for name in now.cheap:
            if name in text.own:
                text.own[name].asked(gained if name == method else 0.0)
                others.asked(name, gained if name == method else 0.0)

    def _conclude(self, seq: Sequence, text: Text, method: str, grades: list[int], accepted: int) -> None:
        """What a probe has shown, beside what was believed."""
        known, own = self._know(method), text.of(method)
        chances = own.chances(known.of(seq.kind), grades)
        surprised = accepted > 0 and prod(chances[:accepted]) < SURPRISE
        known.distance = 1.0 if surprised else LONGEST
        if surprised:  # at once again: it is either luck or news
            known.saved_ms = float("inf")
            known.kept.clear()
            for evidence in (known.acceptance, known.of_others(seq.kind), known.of(seq.kind), own):
                evidence.doubt()

    # what is known

    def _know(self, method: str) -> Method:
        found = self.methods.get(method)
        if found is None:
            found = self.methods[method] = Method()
        return found

    def _decision(self, seq: Sequence, asks: tuple[Ask, ...]) -> Decision | None:
        if not asks:
            return None
        now, methods = self._round, seq.methods
        joins = seq.join is not False and seq.id not in now.probes and methods[1:] and not now.cheap.keys().isdisjoint(methods)
        key = asks, min(seq.room - 1, max(map(seq.most, methods))) if joins else 0  # a look-up may go on at the end of a draft
        if (found := self._made.get(key)) is None:
            found = self._made[key] = Decision.of(asks, reach=key[1])
        now.longest = max(now.longest, found.k)
        return found

    def _plain(self, seq: Sequence, reason: Reason) -> Decision:
        if seq.plain and seq.off is not None:
            reason = seq.off
        elif seq.room <= 1:
            reason = Reason.MAX_TOKENS
        if (found := self._made.get(reason)) is None:
            found = self._made[reason] = Decision(None, 0, reason)
        return found

    def costs_alone(self) -> None:
        self.methods = {name: Method(cost=known.cost) for name, known in self.methods.items()}

    def state(self) -> dict[str, Any]:
        return {"costs": self.costs.state(), "methods": {name: known.state() for name, known in self.methods.items()}}

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        said = check(state)
        self.costs.restore(said["costs"])
        for name, known in said["methods"].items():
            self._know(name).restore(known)
