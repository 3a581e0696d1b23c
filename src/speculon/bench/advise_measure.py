"""What an advice is made of: guesses at every position of plainly written texts, and the times of steps and proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from speculon.bench.advise_maths import Costs, Cycle, Guess, Guesses, levelled
from speculon.bench.cell import stuck
from speculon.bench.measure import Step, measure, recording
from speculon.bench.workloads import Case
from speculon.control.policy import Timing
from speculon.core import NO_DRAFT, Ask, Decision, Draft, Load, Proposal, Reason, Span, Verdict, ceil_div
from speculon.core import Sequence as Text
from speculon.errors import BenchError, NeverFits, TooLong

if TYPE_CHECKING:
    from speculon.engine.engine import Engine
    from speculon.kv.lease import Lease
    from speculon.llm import LLM
    from speculon.proposers.compose import Proposers

RUNS = 3  # per crowd, each over other prompts
CYCLES = 5  # of all K within a run
PLAIN = 2  # plain steps in each
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafts that are timed; what lies between is interpolated
PLANTED = "planted"

Advance = Callable[[int], None]


def grid(most: int) -> tuple[int, ...]:
    return (*(k for k in GRID if k < most), most)


# guesses


class Shadow:
    """A policy that has every method guess at each position, notes the guesses, and has none of them verified."""

    def __init__(self, methods: Sequence[str], k: int):
        self.methods, self.k = tuple(methods), k
        self.drafts: dict[int, dict[int, dict[str, tuple[int, ...]]]] = {}  # sequence id -> tokens written -> by method

    def decide(self, seqs: list[Text], load: Load) -> list[Decision]:
        for seq in seqs:
            self.drafts.setdefault(seq.id, {})[seq.num_output] = {}
        return [ask(seq, self.methods, self.k) for seq in seqs]

    def confirm(self, method: str, seqs: list[Text], ks: list[int]) -> list[int]:
        return ks

    def trim(self, seq: Text, method: str, draft: Draft) -> Draft:
        self.drafts[seq.id][seq.num_output][method] = draft.tokens
        return NO_DRAFT

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """It is there to look."""

    def forget(self, seq: Text) -> None:
        self.drafts.setdefault(seq.id, {})  # also of a text that ended before it was decided for


def ask(seq: Text, methods: tuple[str, ...], k: int) -> Decision:
    """Every one of `methods` for K tokens, as far as the text has room."""
    if seq.plain:  # it was not when it began
        raise BenchError(f"one of {', '.join(methods)} failed, so nothing can be said of it; the log says which")
    if seq.room <= 1 or not k or not methods:
        return Decision(None, 0, Reason.MAX_TOKENS)
    seq.methods = tuple(dict.fromkeys([*seq.methods, *methods]))  # so that each is told what became of the round
    return Decision.of(Ask(method, min(k, seq.room - 1)) for method in methods)


@dataclass(frozen=True, slots=True)
class Written:
    """A text written plainly, and what each method would have guessed."""

    case: Case
    guesses: Guesses
    tokens: int
    loops: bool  # ends repeating itself, and is not the one right answer: easy to guess, and flatters


def shadow(llm: LLM, cases: Sequence[Case], methods: Sequence[str], k: int, crowd: int, advance: Advance) -> list[Written]:
    """Writes each case plainly, `crowd` at once: a text depends as little on others as on drafts."""
    found: list[Written] = []
    for first in range(0, len(cases), crowd):
        some = list(cases[first : first + crowd])
        policy = Shadow(methods, k)
        with in_place(llm.engine, policy=policy):
            made = measure(llm, some, asking(methods[0], k))
        for i, (case, seq) in enumerate(zip(some, sorted(policy.drafts), strict=True)):
            text = made.token_ids[i]
            guesses = [
                {method: Guess(len(draft), agreeing(draft, text[at:])) for method, draft in here.items()}
                for at, here in policy.drafts[seq].items()
            ]
            found.append(Written(case, guesses, len(text), stuck(made, i, case)))
        advance(1)
    return found


def asking(method: str, k: int) -> dict[str, Any]:
    """Of a request: by matching, so that its text is the plain one."""
    return {"method": method, "num_speculative_tokens": k, "acceptance": "matching"}


def agreeing(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    return next((i for i, (d, t) in enumerate(zip(draft, text, strict=False)) if d != t), min(len(draft), len(text)))


@contextmanager
def in_place(engine: Engine, **parts: Any) -> Iterator[None]:
    """Other objects in the place of an engine's own, for as long as something is measured."""
    before = {name: vars(engine)[name] for name in parts}
    vars(engine).update(parts)
    try:
        yield
    finally:
        vars(engine).update(before)


# times


@dataclass(frozen=True, slots=True)
class Turn:
    """What one round times: proposals of `methods` for K tokens, then a step with K drafts."""

    methods: tuple[str, ...]
    k: int


Timed = tuple[Turn, Step, dict[str, Proposal]]  # and its proposals, by method


class Sweep:
    """A policy that goes through turns, one per round that decodes a whole crowd; afterwards it decodes plainly."""

    def __init__(self, turns: Sequence[Turn], crowd: int):
        self._turns, self._crowd = iter(turns), crowd
        self.log: list[Turn | None] = []  # per round

    def decide(self, seqs: list[Text], load: Load) -> list[Decision]:
        all_write = len(seqs) == self._crowd and all(seq.num_output for seq in seqs)
        turn = next(self._turns, None) if all_write else None
        self.log.append(turn)
        return [ask(seq, turn.methods, turn.k) if turn else Decision(None, 0, Reason.COST) for seq in seqs]

    def confirm(self, method: str, seqs: list[Text], ks: list[int]) -> list[int]:
        return ks

    def trim(self, seq: Text, method: str, draft: Draft) -> Draft:
        return NO_DRAFT

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """It is told what to do."""

    def forget(self, seq: Text) -> None:
        """It knows none."""


class Planted:
    """In the place of an engine's proposers: they guess, and are timed; drafts of no meaning are verified instead.

    So every text has exactly K drafts and goes on by one token: a row costs the same whatever it holds.
    """

    def __init__(self, inner: Proposers, vocab_size: int):
        self._inner, self._vocab_size = inner, vocab_size
        self.log: list[dict[str, Proposal]] = []  # per round, by method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(
        self, spans: list[Span], decisions: list[Decision], lease: Lease, trim: Any, confirm: Any
    ) -> tuple[list[Draft], list[Decision]]:
        self._inner.propose(spans, decisions, lease, trim, confirm)
        self.log.append(self._inner.timings)
        return [self._draft(span, decision.k) for span, decision in zip(spans, decisions, strict=True)], decisions

    def _draft(self, span: Span, k: int) -> Draft:
        last = span.seq.tokens[-1]
        return Draft(tuple((last + 1 + i) % self._vocab_size for i in range(k)), (PLANTED,) * k)


def time_costs(
    llm: LLM, cases: Sequence[Case], methods: Sequence[str], ks: Sequence[int], crowds: Sequence[int], advance: Advance
) -> Costs:
    """Steps by rows, and proposals by method and K, for each crowd; all of them alternated, so that no drift favours any."""
    costs, rng = Costs(), Random(0)
    size, firsts = len(ks) + PLAIN, len(methods)
    most = firsts + CYCLES * size + max(ks) + 2
    for crowd in crowds:
        cycles: list[Cycle] = []
        for run in (-1, *range(RUNS)):  # the first is for warming up
            some = [endless(cases[(max(run, 0) * crowd + i) % len(cases)], most, llm.engine.max_context) for i in range(crowd)]
            check_room(llm, some)
            turns = [Turn((method,), ks[0]) for method in methods]  # their first proposals, each by itself
            turns += [turn for _ in range(CYCLES) for turn in cycle_of(methods, ks, rng)]
            timed = time_once(llm, some, turns, asking(methods[0], max(ks)))
            if run >= 0:
                for method, (_, step, _) in zip(methods, timed, strict=False):
                    costs.start.setdefault(method, []).append(step.draft_ms / crowd)
                rest = timed[firsts:]
                cycles += [cycle_from(rest[i : i + size], crowd) for i in range(0, len(rest), size)]
            advance(1)
        book(costs, crowd, levelled(cycles))
    check_complete(costs, methods, ks, crowds)
    return costs


def cycle_of(methods: Sequence[str], ks: Sequence[int], rng: Random) -> list[Turn]:
    """Each K once and some plain steps, in an order of chance."""
    turns = [Turn(tuple(methods), k) for k in ks] + [Turn((), 0)] * PLAIN
    rng.shuffle(turns)
    return turns


def time_once(llm: LLM, cases: list[Case], turns: list[Turn], speculation: dict[str, Any]) -> list[Timed]:
    """Each turn with its step and what its proposals took."""
    policy, planted = Sweep(turns, len(cases)), Planted(llm.engine.proposers, llm.engine.target.vocab_size)
    with recording(llm.engine) as steps, in_place(llm.engine, policy=policy, proposers=planted):
        llm.generate([case.prompt for case in cases], [case.params for case in cases], speculation={**speculation, "pool": ""})
    rounds = zip(policy.log, steps, planted.log, strict=True)
    return [(turn, step, timings) for turn, step, timings in rounds if turn and step.decoding]


def cycle_from(timed: list[Timed], crowd: int) -> Cycle:
    """What one cycle took, by what it was; a step that other limits cut is left out."""
    cycle: Cycle = {}
    for turn, step, proposals in timed:
        if step.rows == crowd * (turn.k + 1):
            cycle.setdefault((None, turn.k), []).append(step.step_ms - step.draft_ms)
        for method, call in proposals.items():
            if (call.texts, call.k) == (crowd, turn.k):
                cycle.setdefault((method, call.k), []).append(call.ms)
    return cycle


def book(costs: Costs, crowd: int, cycles: list[Cycle]) -> None:
    for cycle in cycles:
        for (method, k), ms in cycle.items():
            samples = costs.verify if method is None else costs.draft.setdefault(method, {})
            samples.setdefault((crowd, k), []).extend(ms)


def check_complete(costs: Costs, methods: Sequence[str], ks: Sequence[int], crowds: Sequence[int]) -> None:
    """Raises where something was never timed."""
    wanted = {(crowd, k) for crowd in crowds for k in ks}
    for method in methods:
        if missing := sorted(wanted - costs.draft.get(method, {}).keys()):
            raise BenchError(f"{method} was never timed for {missing[0][0]} texts at once with {missing[0][1]} drafts each")
    if missing := sorted({*wanted, *((crowd, 0) for crowd in crowds)} - costs.verify.keys()):
        raise BenchError(f"never ran: {missing[0][0]} texts at once with {missing[0][1]} drafts each")


def endless(case: Case, tokens: int, context: int) -> Case:
    """The same sampling for a text of exactly so many tokens, after the end of the same prompt that leaves room for them."""
    if tokens >= context:
        raise TooLong(f"to time drafts of all lengths a text of {tokens} tokens is written, the context is {context}: lower K")
    free = {"max_tokens": tokens, "min_tokens": 0, "ignore_eos": True, "stop": (), "stop_token_ids": (), "structured": None}
    return Case(case.name, case.prompt[tokens - context :], case.params.model_copy(update=free))


def check_room(llm: LLM, cases: list[Case]) -> None:
    """Raises where a crowd could not be written at once."""
    pool = llm.engine.pool
    pages = sum(ceil_div(len(case.prompt) + (case.params.max_tokens or 0), pool.block_size) for case in cases)
    if pages > pool.num_blocks:
        raise NeverFits(f"{len(cases)} texts at once need {pages} KV pages, the pool has {pool.num_blocks}")
