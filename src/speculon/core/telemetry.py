"""What speculation did, per request and for the engine as a whole.

Counters only grow; readers take differences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from speculon.core.types import Draft, Estimate, Reason, Verdict

PLAIN = "plain"  # how a round goes without a draft
# why a method drafts in the place of another: it is asked before it, and had a draft again
EARLIER = "earlier"
PARTS = ("prepare", "decide", "propose", "forward", "verify", "commit", "settle")  # of a step's wall time


class Stopwatch:
    """Books all time since the last lap on one part of the step, so that the parts add up to the whole."""

    __slots__ = ("_began", "_last", "_ms")

    def __init__(self, ms: dict[str, float] | None = None):
        self._ms = dict.fromkeys(PARTS, 0.0) if ms is None else ms
        self._began = self._last = perf_counter()

    @property
    def ms(self) -> float:
        """From the start to the last lap."""
        return (self._last - self._began) * 1e3

    def lap(self, part: str) -> float:
        before, self._last = self._last, perf_counter()
        ms = (self._last - before) * 1e3
        self._ms[part] += ms
        return ms

    def split(self, part: str, within: str, ms: float) -> None:
        """A lap that took `ms` of one part; the rest of it is booked on another."""
        rest = self.lap(within) - ms
        self._ms[within] -= rest
        self._ms[part] += rest


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one request, or for all requests of an engine."""

    rounds: int  # target calls that verified a draft; without one, acceptance is 0.0
    drafted: int
    accepted: int
    rejected: int
    target_calls: int  # target calls that sampled, speculative or not
    draft_calls: int  # calls of methods, also those that proposed nothing; a round may have several
    verified_positions: int  # rows scored: the drafts, and one more per call
    emitted: int  # tokens that the caller gets
    stop_tokens: int  # generated, too, but they end a text and are not part of it
    acceptance_rate: float  # accepted / drafted
    tokens_per_target_call: float  # generated (emitted and stop tokens) / target_calls; plain decoding has 1
    mean_accepted_per_round: float
    per_position: list[float]  # share of the drafts at position i that were accepted
    by_source: dict[str, dict[str, int]]
    stops: dict[str, dict[str, int]]  # method -> why its proposals ended -> proposals
    span_outcomes: dict[str, int]
    draft_ms: float
    verify_ms: float  # this request's share of the target's time, by rows
    expected: float  # accepted drafts that the policy expected; 0.0 under policies without an estimate
    price: float  # tokens that plain decoding would have made in the time of the drafts' rows
    # ms of plain decoding for the same tokens at the same batch sizes, minus the time spent; None: not known
    saved_ms: float | None
    # method -> rounds, drafted, accepted, per_position: what it would have reached, measured under policy
    # `shadow` by drafts that were not used
    shadow: dict[str, dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class RequestStats:
    """Running counts of one sequence; also summed up over sequences."""

    rounds: int = 0
    accepted: int = 0
    target_calls: int = 0
    emitted: int = 0
    stop_tokens: int = 0
    verified_positions: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)  # position -> drafts
    accepted_at: Counter[int] = field(default_factory=Counter)
    drafted_from: Counter[str] = field(default_factory=Counter)  # source -> drafts
    accepted_from: Counter[str] = field(default_factory=Counter)
    rounds_from: Counter[str] = field(default_factory=Counter)  # source of the first draft -> rounds
    generated_from: Counter[str] = field(default_factory=Counter)  # the same -> tokens of these rounds
    # method -> drafts that were watched instead of verified
    watched: Counter[str] = field(default_factory=Counter)
    # method, position -> drafted tokens of them
    watched_at: Counter[tuple[str, int]] = field(default_factory=Counter)
    stood_at: Counter[tuple[str, int]] = field(default_factory=Counter)  # of these, as the text went on
    # method, stop, tokens matched -> proposals
    proposed: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    # adapter of the target -> drafts of its sequences; those of the base are in none
    drafted_under: Counter[str] = field(default_factory=Counter)
    accepted_under: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    # (from, to, reason): changes of mind
    changes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    saved_ms: float | None = None
    expected: float = 0.0  # accepted drafts, as the policy estimated before they were verified
    price: float = 0.0  # tokens that the time of the drafts' rows was worth to it
    # class, marker -> sequences that ended
    prompts: Counter[tuple[str, str]] = field(default_factory=Counter)
    # how the last round went, and why so: of one text
    last: tuple[str, str] | None = field(default=None, compare=False)

    @property
    def generated(self) -> int:
        return self.emitted + self.stop_tokens

    @property
    def tokens_per_target_call(self) -> float:
        return self.generated / max(1, self.target_calls)

    @property
    def draft_calls(self) -> int:
        """Calls of methods for it. Each is a proposal, empty or not, kept or not, with its continuation."""
        return self.proposed.total()

    @property
    def accepted_prediction_tokens(self) -> int:
        """Drafts from the client's prediction that are in the text."""
        return self.accepted_from["prediction"]

    @property
    def rejected_prediction_tokens(self) -> int:
        """Drafts from the client's prediction that are not in the text; each time drafted counts."""
        return self.drafted_from["prediction"] - self.accepted_from["prediction"]

    @property
    def stops(self) -> dict[str, dict[str, int]]:
        """Method -> why its proposals ended -> proposals; those of drafters that do not say are left out."""
        by_method: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for (method, stop, _), count in self.proposed.items():
            if stop:
                by_method[method][str(stop)] = by_method[method].get(stop, 0) + count
        return dict(by_method)

    @property
    def matches(self) -> dict[str, Counter[int]]:
        """Method -> tokens that its lookups matched -> proposals; those without a match are left out."""
        by_method: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for (method, _, match), count in self.proposed.items():
            if match:
                by_method[method][match] += count
        return dict(by_method)

    def propose(self, method: str, draft: Draft) -> None:
        """One proposal, empty or not, kept or not."""
        self.proposed[method, draft.stop or "", draft.match] += 1

    def record(
        self,
        draft: Draft,
        verdict: Verdict,
        asked: tuple[str, ...] | None = None,
        reason: Reason | None = None,
    ) -> None:
        """One target call that sampled this sequence.

        `asked` are the methods that were to draft, in order; None where a prompt chunk gave the first token.
        `reason` says why the draft is empty.
        """
        k = len(draft.tokens)
        self.target_calls += 1
        self.emitted += len(verdict.tokens)
        self.stop_tokens += verdict.generated - len(verdict.tokens)
        self.verified_positions += k + 1
        if asked is None:
            return
        self._change(draft, asked, reason)
        if reason is not None:
            self.reasons[reason.value] += 1
            return
        self.rounds += 1
        self.rounds_from[draft.sources[0]] += 1
        self.generated_from[draft.sources[0]] += verdict.generated
        self.accepted += verdict.accepted
        for i, (position, source) in enumerate(zip(draft.depths, draft.sources, strict=True)):
            self.drafted_at[position] += 1
            self.drafted_from[source] += 1
            if i < verdict.accepted:
                self.accepted_at[position] += 1
                self.accepted_from[source] += 1
        if verdict.outcome is not None:
            self.outcomes[verdict.outcome.value] += 1

    def count_under(self, adapter: str, drafted: int, accepted: int) -> None:
        """Drafts of a sequence whose target has this adapter."""
        self.drafted_under[adapter] += drafted
        self.accepted_under[adapter] += accepted

    def see(self, tokens: int, drafted: int, accepted: int) -> None:
        """One target call, as far as its event tells of it."""
        self.target_calls += 1
        self.emitted += tokens
        self.rounds += drafted > 0
        self.accepted += accepted
        self.drafted_at.update(range(drafted))

    def watch(self, method: str, drafted: int, accepted: int) -> None:
        """A draft that nobody verified, when it is known how many of its tokens would have stood."""
        self.watched[method] += 1
        self.watched_at.update((method, i) for i in range(drafted))
        self.stood_at.update((method, i) for i in range(accepted))

    def _change(self, draft: Draft, asked: tuple[str, ...], reason: Reason | None) -> None:
        """Counts it when a sequence goes from speculating to plain or back, or from one method to another.

        To plain for that round's reason, back when the reason of the round before has passed; from a method
        to one that is asked later with `no_match`, back to one that is asked earlier with `earlier`, and with
        `cost` when the policy no longer asked the former.
        """
        if reason is not None:
            now, why = PLAIN, reason.value
        else:
            source = draft.sources[0]
            now, why = source if source in asked else asked[-1], ""  # a plug-in may name other sources
        before, self.last = self.last, (now, why)
        if before is None or before[0] == now:
            return
        if not why:
            why = before[1] or why_another(asked, before[0], now)
        self.changes[before[0], now, why] += 1

    def change_list(self) -> list[dict[str, Any]]:
        """Changes of mind as plain data, the most frequent first."""
        return [
            {"from": a, "to": b, "reason": why, "count": n} for (a, b, why), n in self.changes.most_common()
        ]

    def expect(self, estimate: Estimate | None) -> None:
        if estimate is not None:
            self.expected += estimate.tokens
            self.price += estimate.price

    def prompt(self) -> dict[str, Any] | None:
        """Class and marker of the prompt; None at first."""
        return next(({"class": name, "marker": marker} for name, marker in self.prompts), None)

    def spend(self, draft_ms: float, verify_ms: float, plain_ms: float | None) -> None:
        """Its shares of a round's ms where any sequence drafted; `plain_ms`: of its tokens without drafts."""
        self.draft_ms += draft_ms
        self.verify_ms += verify_ms
        if plain_ms is not None:
            self.saved_ms = (self.saved_ms or 0.0) + plain_ms - draft_ms - verify_ms

    def add(self, other: RequestStats) -> None:
        add_fields(self, other, ("last",))  # which a sum of texts has not

    def speculation(self) -> SpeculationStats:
        """The account; rounds and drafts are 0 where no round ran."""
        drafted = self.drafted_at.total()
        return SpeculationStats(
            rounds=self.rounds,
            drafted=drafted,
            accepted=self.accepted,
            rejected=drafted - self.accepted,
            target_calls=self.target_calls,
            draft_calls=self.draft_calls,
            verified_positions=self.verified_positions,
            emitted=self.emitted,
            stop_tokens=self.stop_tokens,
            acceptance_rate=self.accepted / max(1, drafted),
            tokens_per_target_call=self.tokens_per_target_call,
            mean_accepted_per_round=self.accepted / max(1, self.rounds),
            per_position=[self.accepted_at[i] / n for i, n in sorted(self.drafted_at.items())],
            by_source={
                s: {"drafted": n, "accepted": self.accepted_from[s]} for s, n in self.drafted_from.items()
            },
            stops=self.stops,
            span_outcomes=dict(self.outcomes),
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            expected=self.expected,
            price=self.price,
            saved_ms=self.saved_ms,
            shadow={method: self._in_shadow(method, rounds) for method, rounds in self.watched.items()},
        )

    def _in_shadow(self, method: str, rounds: int) -> dict[str, Any]:
        drafted = [n for (name, _), n in sorted(self.watched_at.items()) if name == method]
        accepted = [self.stood_at[method, i] for i in range(len(drafted))]
        shares = [n / of for n, of in zip(accepted, drafted, strict=True)]
        return {"rounds": rounds, "drafted": sum(drafted), "accepted": sum(accepted), "per_position": shares}


@dataclass(slots=True)
class EngineCounters:
    """Cumulative, over the engine's life. Times in ms."""

    requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # finish reason -> sequences
    steps: int = 0
    # part of a step -> ms
    profile: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    rows: int = 0
    repair_ms: float = 0.0  # to restore recurrent states after rejected drafts
    prompt_tokens: int = 0
    checks: int = 0  # times at rest that every page was found accounted for
    proposals: Counter[str] = field(default_factory=Counter)  # method -> texts it was asked about
    # what these took
    proposal_ms: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    pools: int = 0  # of earlier answers, as of the last text that ended
    pool_tokens: int = 0  # in them
    # what came from an earlier process: pools, policies
    restored: Counter[str] = field(default_factory=Counter)
    totals: RequestStats = field(default_factory=RequestStats)

    @property
    def step_ms(self) -> float:
        return sum(self.profile.values())

    def add(self, other: EngineCounters) -> None:
        add_fields(self, other)


def add_fields(counts: Any, other: Any, excluded: tuple[str, ...] = ()) -> None:
    """Adds to each field of some counts the same field of other ones."""
    for name in counts.__slots__:
        before, added = getattr(counts, name), getattr(other, name)
        if name in excluded or added is None:
            continue
        if isinstance(before, dict):
            for key, value in added.items():
                before[key] = before.get(key, 0) + value
        elif isinstance(before, RequestStats):
            before.add(added)
        else:
            setattr(counts, name, (before or 0) + added)


def why_another(methods: tuple[str, ...], before: str, now: str) -> str:
    """Why a text goes from one method to another, by the order in which this round asked."""
    if before not in methods:
        return Reason.COST.value
    return Reason.NO_MATCH.value if methods.index(before) < methods.index(now) else EARLIER


def log_line(request_id: str, stats: RequestStats, seconds: float, finish: str) -> str:
    """`r-81 512 tok 6.1 s 83.9 tok/s stop | 71 % of 640 drafts 3.27/call saved 3.1 s | no_match 12`"""
    rate = stats.emitted / seconds if seconds else 0.0
    line = f"{request_id} {stats.emitted} tok {seconds:.2f} s {rate:.1f} tok/s {finish}"
    done = stats.speculation()
    if done.rounds:
        sources = "+".join(done.by_source) + " " if done.by_source else ""  # known at the end alone
        saved = "" if done.saved_ms is None else f" saved {done.saved_ms / 1e3:.2f} s"
        line += f" | {sources}{done.acceptance_rate:.0%} of {done.drafted} drafts"
        line += f" {done.tokens_per_target_call:.2f}/call{saved}"
    for method, seen in done.shadow.items():
        line += f" | {method} in shadow {seen['accepted'] / seen['drafted']:.0%} of {seen['drafted']} drafts"
    if stats.reasons:
        line += " | " + " ".join(f"{reason} {n}" for reason, n in stats.reasons.most_common())
    return line
