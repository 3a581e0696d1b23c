"""A simulation of recorded requests: other policies, the same batches, the recorded costs and acceptance.

The clock counts tokens, not rounds. A sequence begins when as many tokens have been written as when it began
in the record, and ends after as many of its own. So every policy does the same work; what differs is how long
it takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from speculon.bench.simulate import ACCEPTED, REJECTED, UNKNOWN, SimulatedSequence
from speculon.control.acceptance import POSITIONS, Acceptance
from speculon.control.cost import Costs
from speculon.core import NO_DRAFT, Draft, Reason, SpanOutcome
from speculon.errors import RecordError
from speculon.events import Recording, Round, SequenceRound

NEAR = 4  # guess: recorded proposals around a position, one of which is drawn
FAILED = (Reason.ERROR, Reason.CONTEXT_LIMIT, Reason.NO_PAGES)  # proposals of such rounds are left out
MISFIT = 0.2  # guess: median error of a step's time that deserves a note
SIGMA = 1.48  # standard deviation of normal errors / their median
# whose proposal is replayed: the sequence's, another's, or one longer than what was judged
OWN, OTHERS, BEYOND = "own", "others'", "beyond"

LOOKUP_SHARE = 0.05  # guess: of a plain step; a method whose proposal costs less is a lookup
PASSES = 8  # over the record: the cost model forgets, and begins without data


@dataclass(frozen=True, slots=True)
class RecordedProposal:
    """One proposal of the record, and its outcome."""

    at: int  # tokens of its sequence so far
    work: int  # tokens of all sequences so far
    k: int  # requested
    found: int
    judged: int  # from the first on
    accepted: int
    confidence: tuple[float, ...] | None


@dataclass(slots=True)
class RecordedSequence:
    """One sequence of the record."""

    begins: int  # tokens of all sequences until then
    prompt: int = 1  # rows of its last chunk: the record has no more
    tokens: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    off: Reason | None = None
    proposals: dict[str, list[RecordedProposal]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by method


@dataclass(slots=True)
class RecordedTotals:
    """Of the rounds of the record that computed no prompt."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ms: float = 0.0  # with proposals
    fitted_ms: float = 0.0  # by the cost model, as in a replay: without outliers


class Replay:
    """The environment of one record, with at most `k` drafts per round; None: as many as in the record.

    Raises `RecordError` where the record has no step of decoding.
    """

    def __init__(self, recording: Recording, k: int | None = None):
        rounds, self._k = recording.rounds, k
        self.sequences = sequences_of(rounds)
        self.proposals: dict[str, list[RecordedProposal]] = defaultdict(list)  # by method, in order of time
        for method, some in (item for past in self.sequences for item in past.proposals.items()):
            self.proposals[method] += some
        for every in self.proposals.values():
            every.sort(key=lambda one: one.work)
        self._acceptance = {method: acceptance_of(some) for method, some in self.proposals.items()}
        steps = [(*batch_of(r), r.target_ms) for r in rounds if decoding(r)]
        if not steps:
            raise RecordError("the record has no round of decoding alone, so the cost of a step is unknown")
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
            method for method in self.proposals if self.costs.proposal(method, 1, 1) < cheap
        )
        self.notes = list(notes(self, recording, steps))
        self.totals = self._sum(rounds)
        self.sources: Counter[str] = Counter()  # of the proposals that were replayed: OWN, OTHERS, BEYOND

    def batches(self) -> Iterator[list[SimulatedSequence]]:
        waiting = deque(enumerate(self.sequences))
        running: list[SimulatedSequence] = []
        ended = 0
        while True:
            ended += sum(seq.written for seq in running if not seq.room)
            running = [seq for seq in running if seq.room]
            work = ended + sum(seq.written for seq in running)
            while waiting and (not running or waiting[0][1].begins <= work):
                running.append(self.sequence(waiting.popleft()[0]))
            if not running:
                return
            yield running

    def step_ms(self, sequences: int, drafting: int, drafts: int, /) -> float:
        return self.costs.step(sequences, drafting, drafts)

    def proposal_ms(self, method: str, sequences: int, k: int, unread: int = 0) -> float:
        return self.costs.proposal(method, sequences, k, unread)

    def draft(self, number: int, seq: SimulatedSequence, method: str, k: int, random: Random) -> Draft:
        """A proposal recorded near this position; if the sequence has none, of any one at that time."""
        past = self.sequences[seq.id]
        own = past.proposals.get(method)
        if own:
            place = bisect_left(own, seq.written, key=lambda one: one.at)
        else:
            place = bisect_left(self.proposals[method], past.begins + seq.written, key=lambda one: one.work)
        one = random.choice(around(own or self.proposals[method], place))
        # a proposal that ended at its limit could have been longer
        length = k if one.found >= one.k else min(k, one.found)
        beyond = length > one.judged == one.accepted
        self.sources[BEYOND if beyond else OWN if own else OTHERS] += 1
        if not length:
            return NO_DRAFT
        tokens = (
            ACCEPTED if i < one.accepted else REJECTED if i < one.judged else UNKNOWN for i in range(length)
        )
        return Draft(tuple(tokens), (method,) * length, confidence=extended(one.confidence, length))

    def chain(self, number: int, seq: SimulatedSequence, draft: Draft, k: int, random: Random) -> Draft:
        return draft  # no record has what a lookup would have added

    def chance(self, number: int, seq: SimulatedSequence, draft: Draft, position: int) -> float:
        if (token := draft.tokens[position]) != UNKNOWN:
            return float(token)
        acceptance = self._acceptance[draft.sources[position]]
        return acceptance.rate(min(position, POSITIONS - 1)) or acceptance.rate() or 0.0

    def _sum(self, rounds: list[Round]) -> RecordedTotals:
        total = RecordedTotals()
        for round_ in filter(decoding, rounds):
            total.rounds += 1
            total.tokens += sum(one.tokens for one in round_.texts)
            total.drafted += sum(one.drafted for one in round_.texts)
            total.accepted += sum(one.accepted for one in round_.texts)
            total.ms += round_.target_ms + round_.ms.get("propose", 0.0)
            total.fitted_ms += self.step_ms(*batch_of(round_))
            total.fitted_ms += sum(
                self.proposal_ms(m, call.sequences, call.k, call.unread)
                for m, call in round_.proposals.items()
            )
        return total

    def sequence(self, number: int) -> SimulatedSequence:
        """A sequence of the record, from its beginning."""
        past = self.sequences[number]
        methods = tuple(method for method in past.limits if method in self.proposals)
        off = Reason.OFF_REQUEST if self._k == 0 else None if methods else past.off or Reason.NO_DRAFTER
        limits = {m: past.limits[m] if self._k is None else self._k for m in methods}
        prompt = [ACCEPTED] * past.prompt
        return SimulatedSequence(number, limits, past.tokens, off, tokens=prompt, lookups=self._lookups)


# reading the record


def decoding(round_: Round) -> bool:
    """Whether it computed no prompt, so that its time is that of its sequences and drafts."""
    return bool(round_.texts) and not round_.prompt_rows


def batch_of(round_: Round) -> tuple[int, int, int]:
    """(sequences, those with drafts, drafts)."""
    drafts = [one.drafted for one in round_.texts]
    return len(drafts), sum(map(bool, drafts)), sum(drafts)


def sequences_of(rounds: list[Round]) -> list[RecordedSequence]:
    """Those that decode, in the order in which they begin; the token of a prompt is no round's work."""
    found: list[RecordedSequence] = []
    open_: dict[tuple[str, int], RecordedSequence] = {}
    limits: dict[tuple[str, int], Mapping[str, int]] = {}
    prompts: dict[tuple[str, int], int] = {}
    work = 0
    for round_ in rounds:
        for one in round_.texts:
            if one.methods is not None:
                limits[one.key] = one.methods
            if one.prompt:
                prompts[one.key] = one.prompt
            else:
                if one.key not in open_:
                    found.append(RecordedSequence(work, prompts.get(one.key, 1)))
                    open_[one.key] = found[-1]
                past = open_[one.key]
                past.limits = limits.get(one.key, past.limits)
                past.off = past.off or one.reason
                record_proposals(past, one, work)
                past.tokens += one.tokens
            if one.finish:  # another may have the same id afterwards
                open_.pop(one.key, None)
        work += sum(one.tokens for one in round_.texts if not one.prompt)
    return found


def record_proposals(past: RecordedSequence, one: SequenceRound, work: int) -> None:
    """The outcome of a round's proposals; unknown where the round failed."""
    if one.reason in FAILED:
        return
    ended = one.outcome in (SpanOutcome.STOP, SpanOutcome.EARLY_STOP)
    for proposal in one.proposals:
        kept = proposal is one.proposals[-1] and one.drafted
        accepted = min(one.accepted, proposal.found) if kept else 0  # without what a lookup added
        judged = min(accepted + (not ended), one.drafted, proposal.found) if kept else 0
        past.proposals[proposal.method].append(
            RecordedProposal(
                past.tokens, work, proposal.k, proposal.found, judged, accepted, proposal.confidence
            )
        )


def notes(
    replay: Replay, recording: Recording, steps: Sequence[tuple[int, int, int, float]]
) -> Iterator[str]:
    """What a replay of this record cannot know."""
    if not replay.proposals:
        yield "nothing drafted in the record: what drafts would have gained is unknown"
    for method in dict.fromkeys(method for past in replay.sequences for method in past.limits):
        if line := method_note(replay, method):
            yield line
    varied = {(sequences, drafts) for sequences, _, drafts, _ in steps}
    if len(varied) == len({sequences for sequences, _ in varied}):
        yield "the number of drafts never varied by itself: what a draft costs is unknown"
    if replay.misfit > MISFIT:
        yield f"half of the steps are off by {replay.misfit:.0%} or more: the machine was not quiet"
    if lost := sum(round_.lost for round_ in recording.rounds):
        yield f"{lost} rounds are not in the record: the disk was too slow"
    if recording.cut:
        yield "the last line is not complete, and was skipped"


def method_note(replay: Replay, method: str) -> str | None:
    if method not in replay.proposals:
        return f"{method} was never asked: its acceptance is unknown, and no replay asks it"
    if len(replay.ks.get(method, ())) == 1:
        return (
            f"{method} was always asked for {min(replay.ks[method])}: the cost of another K is extrapolated"
        )
    if not replay.costs.calls(method):
        return f"no proposal of {method} was timed: its cost is taken as 0"
    if not any(one.judged for one in replay.proposals[method]):
        return f"no draft of {method} was verified: a replay accepts none"
    return None


# numbers


def acceptance_of(proposals: list[RecordedProposal]) -> Acceptance:
    found = Acceptance(fade=1.0)
    for one in proposals:
        found.observe(one.judged, one.accepted)
    return found


def around(proposals: list[RecordedProposal], place: int) -> list[RecordedProposal]:
    """The nearest few."""
    first = max(0, min(place - NEAR // 2, len(proposals) - NEAR))
    return proposals[first : first + NEAR]


def extended(confidence: tuple[float, ...] | None, length: int) -> tuple[float, ...] | None:
    """Of a draft longer than the recorded one: the last value repeats."""
    return confidence and (confidence + confidence[-1:] * length)[:length]
