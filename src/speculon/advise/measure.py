"""What predictions rest on: drafts at every position of plain texts, and times of steps and proposals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.advise.maths import DraftTrace, RecordedDraft, TimedRound
from speculon.bench.cell import stuck
from speculon.bench.measure import in_place, measure
from speculon.bench.workloads import Case
from speculon.control.cost import Costs
from speculon.control.policy import Policy
from speculon.core import NO_DRAFT, Ask, Decision, Draft, Load, Proposal, Reason, Timing, Verdict
from speculon.errors import BenchError, NeverFits, TooLong
from speculon.proposers.registry import OFF
from speculon.sequence import Sequence as Request
from speculon.sequence import Span

if TYPE_CHECKING:
    from speculon.kv.lease import Lease
    from speculon.llm import LLM
    from speculon.proposers.compose import Proposers

RUNS = 3  # per batch size, each over other prompts
CYCLES = 5  # of all K within a run
PLAIN, HALF = 2, 2  # steps in each cycle in which no sequence drafts, and every other one
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafts that are timed
PLACEHOLDER = "placeholders"
FIXED = "fixed"  # the policy of all settings with a K
NO_SPECULATION = {"method": OFF, "policy": FIXED}

Advance = Callable[[int], None]


def ks_to_time(most: int) -> tuple[int, ...]:
    return (*(k for k in GRID if k < most), most)


# drafts


class DraftRecorder(Policy):
    """Has every method draft at each position, records the drafts, and has none of them verified."""

    def __init__(self, methods: Sequence[str], k: int):
        self.methods, self.k, self.costs = tuple(methods), k, Costs()
        # sequence id -> tokens generated -> by method
        self.drafts: dict[int, dict[int, dict[str, tuple[int, ...]]]] = {}

    def decide(self, seqs: list[Request], load: Load) -> list[Decision]:
        for seq in seqs:
            self.drafts.setdefault(seq.id, {})[seq.num_output] = {}
        return [draft_decision(seq, self.methods, self.k) for seq in seqs]

    def trim(self, seq: Request, method: str, draft: Draft) -> Draft:
        self.drafts[seq.id][seq.num_output][method] = draft.tokens
        return NO_DRAFT

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """It learns nothing."""

    def forget(self, seq: Request) -> None:
        self.drafts.setdefault(seq.id, {})  # also of one that ended before it was decided for


def draft_decision(seq: Request, methods: tuple[str, ...], k: int) -> Decision:
    """Every one of `methods` for K drafts, as far as the sequence has room."""
    if seq.off:  # it was not when it began
        raise BenchError(f"one of {', '.join(methods)} failed; the log says which")
    if seq.room <= 1 or not k or not methods:
        return Decision.plain(Reason.MAX_TOKENS)
    return Decision.of(Ask(method, min(k, seq.room - 1)) for method in methods)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A case that was continued plainly, and what each method would have drafted."""

    case: Case
    trace: DraftTrace
    tokens: int
    loops: bool  # ends repeating itself, and is not the right answer: easy to draft


def record_drafts(
    llm: LLM, cases: Sequence[Case], methods: Sequence[str], k: int, batch: int, advance: Advance
) -> list[Continuation]:
    """Continues each case plainly, in batches."""
    found: list[Continuation] = []
    for first in range(0, len(cases), batch):
        some = list(cases[first : first + batch])
        policy = DraftRecorder(methods, k)
        with in_place(llm.engine, policy=policy):
            made = measure(llm, some, request_at(methods[0], k))
        for i, (case, seq) in enumerate(zip(some, sorted(policy.drafts), strict=True)):
            tokens = made.token_ids[i]
            drafts = [
                {
                    method: RecordedDraft(len(draft), agreeing(draft, tokens[at:]))
                    for method, draft in here.items()
                }
                for at, here in policy.drafts[seq].items()
            ]
            found.append(
                Continuation(case, DraftTrace(len(case.prompt), drafts), len(tokens), stuck(made, i, case))
            )
        advance(1)
    return found


def request_at(method: str, k: int, policy: str = FIXED) -> dict[str, Any]:
    """Options of a request: by matching, so that its text is the plain one."""
    return {"method": method, "num_speculative_tokens": k, "policy": policy, "acceptance": "matching"}


def agreeing(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = enumerate(zip(draft, text, strict=False))
    return next((i for i, (d, t) in pairs if d != t), min(len(draft), len(text)))


# times


class SweepRound(NamedTuple):
    """To be timed: proposals for K drafts, then a step in which every `stride`-th sequence has K."""

    methods: tuple[str, ...]
    k: int
    stride: int = 1


class TimingSweep(Policy):
    """Goes through its rounds, one per step that decodes a whole batch; then it decodes plainly."""

    def __init__(self, rounds: Sequence[SweepRound], batch: int):
        self.rounds, self._batch, self.costs = list(rounds), batch, Costs()
        self.timed: list[TimedRound] = []
        self._planned = False

    def decide(self, seqs: list[Request], load: Load) -> list[Decision]:
        self._planned = bool(self.rounds) and len(seqs) == self._batch and all(seq.num_output for seq in seqs)
        if not self._planned:
            return [Decision.plain(Reason.COST) for _ in seqs]
        one = self.rounds.pop(0)
        methods = (*one.methods, PLACEHOLDER) if one.methods else ()
        return [
            draft_decision(seq, methods, one.k if i % one.stride == 0 else 0) for i, seq in enumerate(seqs)
        ]

    def trim(self, seq: Request, method: str, draft: Draft) -> Draft:
        return draft if method == PLACEHOLDER else NO_DRAFT

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """A method that keeps nothing of a sequence has nothing to read before it drafts."""
        if not self._planned or timing.target_ms is None:
            return
        drafts = [len(span.draft.tokens) for span in spans]
        keeping = {method for span in spans for method in span.seq.drafted}
        calls = {
            name: call if name in keeping else call._replace(unread=0)
            for name, call in timing.proposals.items()
        }
        self.timed.append(
            TimedRound(len(spans), sum(map(bool, drafts)), sum(drafts), timing.target_ms, calls)
        )

    def forget(self, seq: Request) -> None:
        """It keeps none."""


class PlaceholderProposers:
    """In the place of an engine's proposers: they draft and are timed, placeholders are verified.

    So every sequence has exactly K drafts; a row costs the same whatever token it holds.
    """

    def __init__(self, inner: Proposers, vocab_size: int):
        self._inner, self._vocab_size = inner, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ask(
        self, method: str, limits: Mapping[int, int], spans: list[Span], lease: Lease
    ) -> tuple[dict[int, Draft], Proposal | None]:
        if method == PLACEHOLDER:
            return {i: self._draft(spans[i], k) for i, k in limits.items()}, None
        return self._inner.ask(method, limits, spans, lease)

    def _draft(self, span: Span, k: int) -> Draft:
        last = span.seq.tokens[-1]
        return Draft(tuple((last + 1 + i) % self._vocab_size for i in range(k)), (PLACEHOLDER,) * k)


def time_rounds(
    llm: LLM,
    cases: Sequence[Case],
    methods: Sequence[str],
    ks: Sequence[int],
    batches: Sequence[int],
    advance: Advance,
) -> list[TimedRound]:
    """Steps by drafts, and proposals by method and K, for each batch size.

    All are alternated: a drift of the machine affects them alike.
    """
    timed, rng = list[TimedRound](), Random(0)
    for batch in batches:
        for run in (-1, *range(RUNS)):  # the first is a warm-up
            rounds = [
                SweepRound((method,), ks[0]) for method in methods
            ]  # their first proposals, each by itself
            rounds += [one for _ in range(CYCLES) for one in cycle_of(methods, ks, batch, rng)]
            most = len(rounds) + max(ks) + 2
            some = [
                endless(cases[(max(run, 0) * batch + i) % len(cases)], most, llm.engine.max_context)
                for i in range(batch)
            ]
            check_room(llm, some)
            timed += time_once(llm, some, rounds, request_at(methods[0], max(ks)))[: len(rounds) * (run >= 0)]
            advance(1)
    return timed


def cycle_of(methods: Sequence[str], ks: Sequence[int], batch: int, rng: Random) -> list[SweepRound]:
    """Each K once, some plain steps, and some in which half of a batch has drafts, in random order."""
    rounds = [SweepRound(tuple(methods), k) for k in ks] + [SweepRound((), 0)] * PLAIN
    rounds += [SweepRound(tuple(methods), rng.choice(ks), 2) for _ in range(HALF) if batch > 1]
    rng.shuffle(rounds)
    return rounds


def time_once(
    llm: LLM, cases: list[Case], rounds: list[SweepRound], speculation: dict[str, Any]
) -> list[TimedRound]:
    """The times of each round. Raises `BenchError` where one never ran."""
    policy, placeholders = (
        TimingSweep(rounds, len(cases)),
        PlaceholderProposers(llm.engine.proposers, llm.engine.target.vocab_size),
    )
    with in_place(llm.engine, policy=policy, proposers=placeholders):
        llm.generate(
            [case.prompt for case in cases],
            [case.params for case in cases],
            speculation={**speculation, "pool": ""},
        )
    if policy.rounds:
        missing = f"{len(policy.rounds)} of {len(rounds)} rounds"
        raise BenchError(f"{missing} never ran at concurrency {len(cases)}")
    return policy.timed


def endless(case: Case, tokens: int, context: int) -> Case:
    """The same sampling for exactly so many tokens, after as much of the prompt as leaves room."""
    if tokens >= context:
        raise TooLong(
            f"timing drafts of all lengths takes a text of {tokens} tokens, the context is {context}: lower K"
        )
    free = {
        "max_tokens": tokens,
        "min_tokens": 0,
        "ignore_eos": True,
        "stop": (),
        "stop_token_ids": (),
        "structured": None,
    }
    return Case(case.name, case.prompt[tokens - context :], case.params.model_copy(update=free))


def check_room(llm: LLM, cases: list[Case]) -> None:
    """Raises where a batch does not fit into the page pool."""
    pool = llm.engine.pool
    rows = llm.config.max_batch_tokens
    pages = sum(pool.most(len(case.prompt) + (case.params.max_tokens or 0), rows) for case in cases)
    if pages > pool.num_blocks:
        raise NeverFits(f"{len(cases)} sequences need {pages} KV pages, the pool has {pool.num_blocks}")
