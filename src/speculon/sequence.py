"""A request, its sequences, and what the engine does with them in one round. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speculon.config import SamplingParams
from speculon.core import (
    NO_DRAFT,
    Decision,
    Draft,
    Estimate,
    Finish,
    Load,
    PromptShape,
    Proposal,
    Reason,
    Rule,
    Timing,
    TokenLogprobs,
    Verdict,
)
from speculon.telemetry import RequestStats

if TYPE_CHECKING:
    from torch import Tensor, device

    from speculon.bad_words import BadWords
    from speculon.grammar import Matcher
    from speculon.thinking import AnswerStart
    from speculon.token_counts import Counts


GONE = -1  # in a page table: a page that was given back


@dataclass(frozen=True, slots=True)
class Rules:
    """`SamplingParams` resolved once per request against the vocabulary."""

    params: SamplingParams
    greedy: bool
    plain: bool  # greedy on the logits as they are
    adjusts: bool  # whether any logit is changed before the temperature
    penalises: bool
    filters: bool
    bad_words: BadWords | None
    stop_ids: tuple[int, ...]  # forbidden below min_tokens
    # device -> token ids and values of the logit biases
    bias: dict[device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        bad_words: BadWords | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> Rules:
        p = params
        penalises = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        adjusts = bool(penalises or p.logit_bias or bad_words or (p.min_tokens and stop_ids) or p.structured)
        filters = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        return cls(p, p.greedy, p.greedy and not adjusts, adjusts, penalises, filters, bad_words, stop_ids)


@dataclass(frozen=True, slots=True)
class Ending:
    """When a sequence ends, besides max_tokens."""

    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    # (output so far, new tokens) -> (index of the new token that completes a stop string, that string)
    find_stop: Callable[[list[int], tuple[int, ...]], tuple[int, str] | None] | None = None
    answer_start: Callable[[], AnswerStart] | None = None  # where stop strings begin, in a text that thinks


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What was asked, resolved once at admission. Its n samples share it."""

    id: str
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt + max_tokens
    rules: Rules
    ending: Ending
    limits: Mapping[str, int] = field(
        default_factory=dict
    )  # methods in the order they are asked -> most drafts
    lookups: frozenset[str] = (
        frozenset()
    )  # of these, those without weights: their proposals cost next to nothing
    brought: tuple[str, ...] = ()  # of these, those that draft from what the request brought along
    off: Reason | None = None  # why its method does not draft; None where it does
    policy: str = "fixed"
    chained: bool | None = None  # whether lookups continue a draft at its end; None: as its policy decides
    acceptance: Rule = "matching"  # of drafts that carry q
    shape: PromptShape = PromptShape()
    prediction: tuple[int, ...] = ()  # what the client expects the output to be
    pool: str | None = None  # of earlier answers; None: the answers to this prompt, "": none
    tenant: str = ""  # that the pool belongs to
    prefix_cache: bool = (
        True  # whether its pages are found by later prompts, and it finds those of earlier ones
    )

    @property
    def needs_q(self) -> bool:
        """Whether a drawn draft carries its q."""
        return self.acceptance != "matching"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. Between steps: `tokens[released:committed]` have their K and V in `table`'s
    pages.
    """

    id: int
    request: Request
    tokens: list[int]  # prompt, then output
    stats: RequestStats
    sample: int = 0  # which of the request's n samples
    failed: bool = False  # whether a proposer raised an error for it: it goes on plainly
    cold_matches: int = (
        0  # continuations that must match before a lookup's drafts are verified, by its policy
    )
    grammar: Matcher | None = None  # has consumed the output so far, always
    answer: AnswerStart | None = None  # by its request's ending, once it was needed
    committed: int = 0
    # drafting method -> tokens whose K and V it has in the same pages
    drafted: dict[str, int] = field(default_factory=dict)
    prompt_scored: int = 0  # prompt positions whose log-probabilities have been given out
    table: list[int] = field(default_factory=list)  # page numbers, in order; GONE for those of `released`
    released: int = 0  # first tokens whose pages were given back: no layer reads them again
    skipped: set[str] = field(default_factory=set)  # drafting methods that had not read all of these
    counts: Counts | None = None  # of its tokens, where the request has penalties
    # (stream, output position) -> [V], drawn ahead
    noise: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """All that may draft for it, in the order they are asked."""
        return () if self.failed else tuple(self.request.limits)

    @property
    def off(self) -> Reason | None:
        """Why nothing drafts for it; None where something does."""
        if self.failed:
            return Reason.ERROR
        return None if self.request.limits else self.request.off

    @property
    def pending(self) -> int:
        """Tokens whose K and V are not in pages yet; 1 while decoding."""
        return len(self.tokens) - self.committed

    def begin(self, method: str, first: int = 0) -> int:
        """Where a drafting method reads next; positions below `first`, and those released, it cannot read."""
        return max(self.drafted.get(method, 0), self.released + first)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def room(self) -> int:
        """Tokens it may still generate."""
        return self.request.max_len - len(self.tokens)

    def continues(self, other: Sequence) -> bool:
        """Whether it has all tokens of the other as its beginning, with the same prompt and parameters."""
        mine, theirs = self.request, other.request
        same = (mine.prompt_len, mine.params) == (theirs.prompt_len, theirs.params)
        return same and self.tokens[: len(other.tokens)] == other.tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Of the samples of a request only the first has them."""
        return self.sample == 0 and self.request.params.prompt_logprobs is not None


@dataclass(slots=True, eq=False)
class Span:
    """Consecutive positions of one sequence in one forward: a prompt chunk, or [last token, d_1..d_K]."""

    seq: Sequence
    start: int  # position of the first row in its sequence = tokens already in pages
    length: int  # rows without the drafts
    draft: Draft = NO_DRAFT
    row: int = 0  # first row in the flat batch
    score: range = range(0)  # its rows among the R scored ones
    # whether it reaches the sequence's last token, so that its last rows are sampled
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.start + self.length == len(self.seq.tokens)

    @property
    def rows(self) -> int:
        return self.length + len(self.draft.tokens)

    @property
    def end(self) -> int:
        """Positions occupied once this span has run."""
        return self.start + self.rows

    @property
    def scores_prompt(self) -> bool:
        """Whether every row is wanted, for prompt log-probabilities."""
        seq = self.seq
        return (
            seq.prompt_scored < min(self.start + self.length, seq.request.prompt_len - 1)
            and seq.wants_prompt_logprobs
        )


@dataclass(slots=True)
class Plan:
    """Who runs in this step; `decoding` are the spans that may carry a draft."""

    spans: list[Span]
    decoding: list[Span] = field(init=False)

    def __post_init__(self) -> None:
        self.decoding = [span for span in self.spans if span.length == 1 and span.samples]

    @classmethod
    def alone(cls, span: Span) -> Plan:
        """One span, whose drafts may follow the rest of its prompt."""
        plan = cls([span])
        plan.decoding = [span]
        return plan


@dataclass(slots=True)
class Attempt:
    """What one round was for one decoding sequence, from the decision of its policy to the draft verified."""

    span: Span  # its draft is the one that is verified
    decision: Decision
    granted: int  # drafts for which pages and memory were reserved: at most the decision's k
    reason: Reason | None  # why nothing is verified; of no meaning with a draft
    # (method, the most drafts, its draft), in the order they were made, empty ones too
    proposals: list[tuple[str, int, Draft]] = field(default_factory=list)
    estimate: Estimate | None = None  # of the draft, where its policy has one

    @property
    def asked(self) -> bool:
        """Whether its methods are to draft; not where one has failed and there is no draft."""
        return self.granted > 0 and self.why_plain is not Reason.ERROR

    @property
    def done(self) -> bool:
        """Whether no other method is to be asked."""
        return bool(self.span.draft.tokens) or self.span.seq.failed

    @property
    def why_plain(self) -> Reason | None:
        """Why nothing is verified; None with a draft."""
        return None if self.span.draft.tokens else self.reason


@dataclass(slots=True)
class Round:
    """One committed round of the engine, as its accounts and its record see it."""

    load: Load  # before it
    spans: list[Span]
    verdicts: list[Verdict]  # of each span
    attempts: list[Attempt]  # of the spans that decode
    calls: Mapping[str, Proposal]  # by method
    draft_ms: float
    step_ms: float  # without the proposals
    decoding_only: bool  # whether no prompt was computed beside
    repair_ms: float = 0.0  # of the step, to restore recurrent states after rejected drafts

    @property
    def timing(self) -> Timing:
        """What a cost model may learn from it."""
        return Timing(self.step_ms if self.decoding_only else None, self.calls)

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)

    def attempted(self) -> dict[int, Attempt]:
        """By sequence id."""
        return {attempt.span.seq.id: attempt for attempt in self.attempts}

    def generated(self) -> dict[int, int]:
        """Tokens by sequence id, stop tokens among them."""
        pairs = zip(self.spans, self.verdicts, strict=True)
        return {span.seq.id: verdict.generated for span, verdict in pairs}


# of an output token: an accepted draft; the target's, after a rejected draft, after an accepted one, without
Fate = Literal["accepted", "correction", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one sequence, and how it ended if it did. Plain data."""

    request_id: str
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: RequestStats | None = None  # with the finish
    sources: tuple[str, ...] = ()  # of the first tokens, which were drafts: the method of each
    drafted: int = 0  # tokens that were verified in its round

    @property
    def fates(self) -> list[Fate]:
        """What became of the draft at each token."""
        accepted = len(self.sources)
        own: Fate = "plain" if not self.drafted else "bonus" if accepted == self.drafted else "correction"
        return ["accepted" if i < accepted else own for i in range(len(self.tokens))]

    def __reduce__(self) -> tuple[type[Event], tuple[Any, ...]]:
        """As its arguments, in a third of the time: the events of 32 streams cross a pipe each step."""
        first = (self.request_id, self.sample, self.tokens)
        more = (self.logprobs, self.finish, self.prompt_logprobs, self.stats, self.sources, self.drafted)
        return Event, first if more == (None, None, None, None, (), 0) else (*first, *more)
