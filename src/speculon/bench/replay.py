"""A world made of a record: other policies play the same texts, in the same crowd, at the costs and with the
luck recorded.

The clock is the work done, not the rounds: a text begins when as many tokens have been written as when it
began in the record, and ends after as many of its own. So every policy does the same work; what differs is
how long it takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from speculon.bench.simulate import ACCEPTED, REJECTED, UNKNOWN, Text
from speculon.control.acceptance import POSITIONS, Acceptance
from speculon.control.cost import Costs
from speculon.core import NO_DRAFT, Draft, Reason, SpanKind
from speculon.errors import RecordError
from speculon.events import Recording, Round, TextRound

NEAR = 4  # guess: recorded proposals around a place, any of which may be what is found there
FAILED = (Reason.ERROR, Reason.CONTEXT_LIMIT, Reason.NO_PAGES)  # of what was asked then nothing is known
MISFIT = 0.2  # guess: median error of a step's time from which on a note says so
SIGMA = 1.48  # standard deviation of normal errors / their median
# a text's own proposals, other texts', or longer than what was judged
OWN, OTHERS, BEYOND = "own", "others'", "beyond"

LOOKUP_SHARE = 0.05  # of a plain step: a method whose proposal costs less is one without weights
PASSES = 8  # over the record: the cost model forgets, and begins at nothing


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of one proposal in the record."""

    at: int  # tokens its text had written
    work: int  # tokens that all had
    k: int  # asked for
    found: int
    judged: int  # from the first on
    accepted: int
    confidence: tuple[float, ...] | None


@dataclass(slots=True)
class Past:
    """One text of the record."""

    begins: int  # tokens all texts had written
    prompt: int = 1  # rows of it, as far as the record tells them: those of its last chunk
    tokens: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    off: Reason | None = None
    seen: dict[str, list[Seen]] = field(default_factory=lambda: defaultdict(list))  # by method, in order


@dataclass(slots=True)
class Reached:
    """What the record itself reached, in the rounds that computed no prompt."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ms: float = 0.0  # with proposals
    fitted_ms: float = 0.0  # what replays are priced at: without what took unusually long


class Replay:
    """The scene of one record, in which texts have at most `k` drafts per round; None: as many as the record
    allows.

    Raises `RecordError` where the record says too little.
    """

    def __init__(self, recording: Recording, k: int | None = None):
        rounds, self._k = recording.rounds, k
        self.past = texts_of(rounds)
        self.asked: dict[str, list[Seen]] = defaultdict(list)  # by method, in order of time
        for method, seen in (item for past in self.past for item in past.seen.items()):
            self.asked[method] += seen
        for everybody in self.asked.values():
            everybody.sort(key=lambda seen: seen.work)
        self._acceptance = {method: acceptance_of(seen) for method, seen in self.asked.items()}
        steps = [(*batch_of(r), r.target_ms) for r in rounds if decoding(r)]
        if not steps:
            raise RecordError(
                "the record has no round of decoding alone: nothing is known of what a step costs"
            )
        self.costs, self.ks = Costs(), dict[str, set[int]]()
        for _ in range(PASSES):
            for sequences, drafting, drafts, ms in steps:
                self.costs.observe_step(sequences, drafting, drafts, ms)
            for method, call in (item for round_ in rounds for item in round_.proposals.items()):
                self.costs.observe_proposal(method, call)
                self.ks.setdefault(method, set()).add(call.k)
        self.misfit = median(abs(self.costs.step(*size) / max(ms, 1e-6) - 1) for *size, ms in steps)
        self.noise = min(SIGMA * self.misfit, MISFIT)
        cheap = LOOKUP_SHARE * self.costs.step(1)
        self._lookups = frozenset(
            method for method in self.asked if self.costs.proposal(method, 1, 1) < cheap
        )
        self.notes = list(notes(self, recording, steps))
        self.reached = self._reach(rounds)
        self.sources: Counter[str] = Counter()  # of the proposals that were replayed: what they were made of

    def crowds(self) -> Iterator[list[Text]]:
        waiting = deque(enumerate(self.past))
        running: list[Text] = []
        ended = 0
        while True:
            ended += sum(text.written for text in running if not text.room)
            running = [text for text in running if text.room]
            work = ended + sum(text.written for text in running)
            while waiting and (not running or waiting[0][1].begins <= work):
                running.append(self.text(waiting.popleft()[0]))
            if not running:
                return
            yield running

    def step_ms(self, texts: int, drafting: int, drafts: int, /) -> float:
        return self.costs.step(texts, drafting, drafts)

    def proposal_ms(self, method: str, texts: int, k: int, unread: int = 0) -> float:
        return self.costs.proposal(method, texts, k, unread)

    def draft(self, number: int, text: Text, method: str, k: int, random: Random) -> Draft:
        """One of the proposals recorded near this place of the text; where it was never asked, of any text at
        that time.
        """
        past = self.past[text.id]
        own = past.seen.get(method)
        if own:
            seen = random.choice(around(own, bisect_left(own, text.written, key=lambda seen: seen.at)))
        else:
            everybody = self.asked[method]
            seen = random.choice(
                around(everybody, bisect_left(everybody, past.begins + text.written, key=lambda s: s.work))
            )
        # what stopped at what was asked for might have gone on
        length = k if seen.found >= seen.k else min(k, seen.found)
        beyond = length > seen.judged == seen.accepted
        self.sources[BEYOND if beyond else OWN if own else OTHERS] += 1
        if not length:
            return NO_DRAFT
        fate = (
            ACCEPTED if i < seen.accepted else REJECTED if i < seen.judged else UNKNOWN for i in range(length)
        )
        return Draft(tuple(fate), (method,) * length, confidence=stretched(seen.confidence, length))

    def join(self, number: int, text: Text, draft: Draft, k: int, random: Random) -> Draft:
        return draft  # what would have been joined is in no record

    def chance(self, number: int, text: Text, draft: Draft, position: int) -> float:
        if (fate := draft.tokens[position]) != UNKNOWN:
            return float(fate)
        acceptance = self._acceptance[draft.sources[position]]
        return acceptance.rate(min(position, POSITIONS - 1)) or acceptance.rate() or 0.0

    def _reach(self, rounds: list[Round]) -> Reached:
        done = Reached()
        for round_ in filter(decoding, rounds):
            drafts = sum(told.drafted for told in round_.texts)
            done.rounds += 1
            done.tokens += sum(told.tokens for told in round_.texts)
            done.drafted += drafts
            done.accepted += sum(told.accepted for told in round_.texts)
            done.ms += round_.target_ms + round_.ms.get("propose", 0.0)
            done.fitted_ms += self.step_ms(*batch_of(round_))
            done.fitted_ms += sum(
                self.proposal_ms(m, call.sequences, call.k, call.unread)
                for m, call in round_.proposals.items()
            )
        return done

    def text(self, number: int) -> Text:
        """A text of the record, from its beginning."""
        past = self.past[number]
        methods = tuple(method for method in past.limits if method in self.asked)
        off = Reason.OFF_REQUEST if self._k == 0 else None if methods else past.off or Reason.NO_DRAFTER
        limits = {m: past.limits[m] if self._k is None else self._k for m in methods}
        prompt = [ACCEPTED] * past.prompt
        return Text(number, limits, past.tokens, off, tokens=prompt, lookups=self._lookups)


# reading the record


def decoding(round_: Round) -> bool:
    """Whether it computed no prompt, so that its time is that of its texts and drafts."""
    return bool(round_.texts) and not round_.prompt_rows


def batch_of(round_: Round) -> tuple[int, int, int]:
    """(sequences, those that draft, drafts)."""
    drafts = [told.drafted for told in round_.texts]
    return len(drafts), sum(map(bool, drafts)), sum(drafts)


def texts_of(rounds: list[Round]) -> list[Past]:
    """The texts that decode, in the order in which they begin; the token that a prompt gives is no round's
    work.
    """
    found: list[Past] = []
    open_: dict[tuple[str, int], Past] = {}
    limits: dict[tuple[str, int], Mapping[str, int]] = {}
    prompts: dict[tuple[str, int], int] = {}
    work = 0
    for round_ in rounds:
        for told in round_.texts:
            if told.methods is not None:
                limits[told.key] = told.methods
            if told.prompt:
                prompts[told.key] = told.prompt
            else:
                if told.key not in open_:
                    found.append(open_.setdefault(told.key, Past(work, prompts.get(told.key, 1))))
                past = open_[told.key]
                past.limits = limits.get(told.key, past.limits)
                past.off = past.off or told.reason
                note(past, told, work)
                past.tokens += told.tokens
            if told.finish:  # another may have the name then
                open_.pop(told.key, None)
        work += sum(told.tokens for told in round_.texts if not told.prompt)
    return found


def note(past: Past, told: TextRound, work: int) -> None:
    """What the proposals of a round came to; where it failed, nothing is known of them."""
    if told.reason in FAILED:
        return
    ended = told.kind in (SpanKind.STOP, SpanKind.EARLY_STOP)
    for asked in told.asked:
        kept = asked is told.asked[-1] and told.drafted
        accepted = min(told.accepted, asked.found) if kept else 0  # what was joined to it is not its own
        judged = min(accepted + (not ended), told.drafted, asked.found) if kept else 0
        seen = Seen(past.tokens, work, asked.k, asked.found, judged, accepted, asked.confidence)
        past.seen[asked.method].append(seen)


def notes(
    replay: Replay, recording: Recording, steps: Sequence[tuple[int, int, int, float]]
) -> Iterator[str]:
    """What a replay of this record cannot know."""
    if not replay.asked:
        yield "nothing drafted in the record: no replay can tell what drafts would have brought"
    able = dict.fromkeys(method for past in replay.past for method in past.limits)
    for method in able:
        if method not in replay.asked:
            yield f"{method} was never asked: what it would have brought is not known, and no replay asks it"
        elif len(replay.ks.get(method, ())) == 1:
            yield f"{method} was always asked for {min(replay.ks[method])}: what fewer or more would have cost is a guess"
        elif not replay.costs.calls(method):
            yield f"no proposal of {method} was timed: it is taken for free"
        elif not any(seen.judged for seen in replay.asked[method]):
            yield f"no draft of {method} was verified: none of them stands in a replay"
    varied = {(texts, drafts) for texts, _, drafts, _ in steps}
    if len(varied) == len({texts for texts, _ in varied}):
        yield "the number of drafts never varied by itself: what a draft costs is not known"
    if replay.misfit > MISFIT:
        yield f"the time of half of the steps is off by {replay.misfit:.0%} or more: something else ran beside them"
    if lost := sum(round_.lost for round_ in recording.rounds):
        yield f"{lost} rounds are not in the record: the disk was too slow"
    if recording.cut:
        yield "the last line is not whole"


# numbers


def acceptance_of(seen: list[Seen]) -> Acceptance:
    found = Acceptance(fade=1.0)
    for one in seen:
        found.observe(one.judged, one.accepted)
    return found


def around(seen: list[Seen], place: int) -> list[Seen]:
    """The few that lie nearest."""
    first = max(0, min(place - NEAR // 2, len(seen) - NEAR))
    return seen[first : first + NEAR]


def stretched(confidence: tuple[float, ...] | None, length: int) -> tuple[float, ...] | None:
    """Of a longer draft than the one recorded: it goes on as it ended."""
    return confidence and (confidence + confidence[-1:] * length)[:length]
