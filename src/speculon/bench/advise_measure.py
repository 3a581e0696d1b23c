"""What an advice is made of: drafts at every position of plainly generated texts, and the times of steps and
proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.bench.advise_maths import Recorded, Text, Timed
from speculon.bench.cell import stuck
from speculon.bench.measure import in_place, measure
from speculon.bench.workloads import Case
from speculon.control.cost import Costs
from speculon.control.policy import Policy
from speculon.core import NO_DRAFT, Ask, Decision, Draft, Load, Proposal, Reason, Timing, Verdict, ceil_div
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
PLANTED = "planted"
FIXED = "fixed"  # the policy of all settings with a K
NO_SPECULATION = {"method": OFF, "policy": FIXED}

Advance = Callable[[int], None]


def grid(most: int) -> tuple[int, ...]:
    return (*(k for k in GRID if k < most), most)


# drafts


class Shadow(Policy):
    """Has every method draft at each position, notes the drafts, and has none of them verified."""

    def __init__(self, methods: Sequence[str], k: int):
        self.methods, self.k, self.costs = tuple(methods), k, Costs()
        # sequence id -> tokens generated -> by method
        self.drafts: dict[int, dict[int, dict[str, tuple[int, ...]]]] = {}

    def decide(self, seqs: list[Request], load: Load) -> list[Decision]:
        for seq in seqs:
            self.drafts.setdefault(seq.id, {})[seq.num_output] = {}
        return [ask(seq, self.methods, self.k) for seq in seqs]

    def trim(self, seq: Request, method: str, draft: Draft) -> Draft:
        self.drafts[seq.id][seq.num_output][method] = draft.tokens
        return NO_DRAFT

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """It learns nothing."""

    def forget(self, seq: Request) -> None:
        self.drafts.setdefault(seq.id, {})  # also of one that ended before it was decided for


def ask(seq: Request, methods: tuple[str, ...], k: int) -> Decision:
    """Every one of `methods` for K drafts, as far as the sequence has room."""
    if seq.off:  # it was not when it began
        raise BenchError(
            f"one of {', '.join(methods)} failed, so nothing can be said of it; the log says which"
        )
    if seq.room <= 1 or not k or not methods:
        return Decision.plain(Reason.MAX_TOKENS)
    return Decision.of(Ask(method, min(k, seq.room - 1)) for method in methods)


@dataclass(frozen=True, slots=True)
class Written:
    """A case generated plainly, and what each method would have drafted."""

    case: Case
    text: Text
    tokens: int
    loops: bool  # ends repeating itself, and is not the one right answer: easy to draft


def shadow(
    llm: LLM, cases: Sequence[Case], methods: Sequence[str], k: int, batch: int, advance: Advance
) -> list[Written]:
    """Generates each case plainly, `batch` at once: a text depends as little on others as on drafts."""
    found: list[Written] = []
    for first in range(0, len(cases), batch):
        some = list(cases[first : first + batch])
        policy = Shadow(methods, k)
        with in_place(llm.engine, policy=policy):
            made = measure(llm, some, asking(methods[0], k))
        for i, (case, seq) in enumerate(zip(some, sorted(policy.drafts), strict=True)):
            tokens = made.token_ids[i]
            drafts = [
                {method: Recorded(len(draft), agreeing(draft, tokens[at:])) for method, draft in here.items()}
                for at, here in policy.drafts[seq].items()
            ]
            found.append(Written(case, Text(len(case.prompt), drafts), len(tokens), stuck(made, i, case)))
        advance(1)
    return found


def asking(method: str, k: int, policy: str = FIXED) -> dict[str, Any]:
    """Of a request: drafts are judged by matching, so that its text is the plain one."""
    return {"method": method, "num_speculative_tokens": k, "policy": policy, "acceptance": "matching"}


def agreeing(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    return next(
        (i for i, (d, t) in enumerate(zip(draft, text, strict=False)) if d != t), min(len(draft), len(text))
    )


# times


class Turn(NamedTuple):
    """What one round times: proposals of `methods` for K drafts, then a step with K drafts of every
    `stride`-th sequence.
    """

    methods: tuple[str, ...]
    k: int
    stride: int = 1


class Sweep(Policy):
    """Goes through turns, one per round that decodes a whole batch; afterwards it decodes plainly."""

    def __init__(self, turns: Sequence[Turn], batch: int):
        self.turns, self._batch, self.costs = list(turns), batch, Costs()
        self.timed: list[Timed] = []
        self._planned = False

    def decide(self, seqs: list[Request], load: Load) -> list[Decision]:
        self._planned = bool(self.turns) and len(seqs) == self._batch and all(seq.num_output for seq in seqs)
        if not self._planned:
            return [Decision.plain(Reason.COST) for _ in seqs]
        turn = self.turns.pop(0)
        methods = (*turn.methods, PLANTED) if turn.methods else ()
        return [ask(seq, methods, turn.k if i % turn.stride == 0 else 0) for i, seq in enumerate(seqs)]

    def trim(self, seq: Request, method: str, draft: Draft) -> Draft:
        return draft if method == PLANTED else NO_DRAFT

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """A method that keeps nothing of a sequence reads nothing before it drafts."""
        if not self._planned or timing.target_ms is None:
            return
        drafts = [len(span.draft.tokens) for span in spans]
        keeping = {method for span in spans for method in span.seq.drafted}
        calls = {
            name: call if name in keeping else call._replace(unread=0)
            for name, call in timing.proposals.items()
        }
        self.timed.append(Timed(len(spans), sum(map(bool, drafts)), sum(drafts), timing.target_ms, calls))

    def forget(self, seq: Request) -> None:
        """It knows none."""


class Planted:
    """In the place of an engine's proposers: they draft, and are timed; drafts of no meaning are verified
    instead.

    So every sequence has exactly K drafts and goes on by one token: a row costs the same whatever it holds.
    """

    def __init__(self, inner: Proposers, vocab_size: int):
        self._inner, self._vocab_size = inner, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ask(
        self, method: str, limits: Mapping[int, int], spans: list[Span], lease: Lease
    ) -> tuple[dict[int, Draft], Proposal | None]:
        if method == PLANTED:
            return {i: self._draft(spans[i], k) for i, k in limits.items()}, None
        return self._inner.ask(method, limits, spans, lease)

    def _draft(self, span: Span, k: int) -> Draft:
        last = span.seq.tokens[-1]
        return Draft(tuple((last + 1 + i) % self._vocab_size for i in range(k)), (PLANTED,) * k)


def time_rounds(
    llm: LLM,
    cases: Sequence[Case],
    methods: Sequence[str],
    ks: Sequence[int],
    batches: Sequence[int],
    advance: Advance,
) -> list[Timed]:
    """Steps by drafts, and proposals by method and K, for each batch size; all alternated, so that no drift
    favours any.
    """
    timed, rng = list[Timed](), Random(0)
    for batch in batches:
        for run in (-1, *range(RUNS)):  # the first is for warming up
            turns = [Turn((method,), ks[0]) for method in methods]  # their first proposals, each by itself
            turns += [turn for _ in range(CYCLES) for turn in cycle_of(methods, ks, batch, rng)]
            most = len(turns) + max(ks) + 2
            some = [
                endless(cases[(max(run, 0) * batch + i) % len(cases)], most, llm.engine.max_context)
                for i in range(batch)
            ]
            check_room(llm, some)
            timed += time_once(llm, some, turns, asking(methods[0], max(ks)))[: len(turns) * (run >= 0)]
            advance(1)
    return timed


def cycle_of(methods: Sequence[str], ks: Sequence[int], batch: int, rng: Random) -> list[Turn]:
    """Each K once, some plain steps, and some in which half of a batch drafts, in random order."""
    turns = [Turn(tuple(methods), k) for k in ks] + [Turn((), 0)] * PLAIN
    turns += [Turn(tuple(methods), rng.choice(ks), 2) for _ in range(HALF) if batch > 1]
    rng.shuffle(turns)
    return turns


def time_once(llm: LLM, cases: list[Case], turns: list[Turn], speculation: dict[str, Any]) -> list[Timed]:
    """Each turn with its step and what its proposals took. Raises where one never ran."""
    policy, planted = Sweep(turns, len(cases)), Planted(llm.engine.proposers, llm.engine.target.vocab_size)
    with in_place(llm.engine, policy=policy, proposers=planted):
        llm.generate(
            [case.prompt for case in cases],
            [case.params for case in cases],
            speculation={**speculation, "pool": ""},
        )
    if policy.turns:
        raise BenchError(
            f"{len(policy.turns)} of {len(turns)} rounds never ran with {len(cases)} sequences at once"
        )
    return policy.timed


def endless(case: Case, tokens: int, context: int) -> Case:
    """The same sampling for a text of exactly so many tokens, after the end of the same prompt that leaves
    room for them.
    """
    if tokens >= context:
        raise TooLong(
            f"to time drafts of all lengths a text of {tokens} tokens is written, the context is {context}: lower K"
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
    pages = sum(ceil_div(len(case.prompt) + (case.params.max_tokens or 0), pool.block_size) for case in cases)
    if pages > pool.num_blocks:
        raise NeverFits(
            f"{len(cases)} sequences at once need {pages} KV pages, the pool has {pool.num_blocks}"
        )
