"""A request, its sequences, and what the engine does with them in one round. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speculon.core.config import MAX_DRAFTS, SamplingParams
from speculon.core.errors import SpeculonError
from speculon.core.images import NO_IMAGES, PromptImages
from speculon.core.telemetry import RequestStats
from speculon.core.types import (
    NO_DRAFT,
    UNDECIDED,
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

if TYPE_CHECKING:
    from torch import Tensor, device

    from speculon.decoding.text.bad_words import BadWords
    from speculon.decoding.text.grammar import Matcher
    from speculon.decoding.text.thinking import AnswerStart
    from speculon.decoding.token_counts import Counts


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
        masks = bad_words or (p.min_tokens and stop_ids) or p.structured
        adjusts = bool(penalises or p.logit_bias or masks or p.logits_processor is not None)
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
    # methods in the order they are asked -> drafts of a round at most: as set, and as the drafter can make
    max_drafts: Mapping[str, int] = field(default_factory=dict)
    max_context: Mapping[str, int] = field(default_factory=dict)  # of the drafters that have a limit, tokens
    # of the methods, those without weights: their proposals cost next to nothing
    lookups: frozenset[str] = frozenset()
    from_request: tuple[str, ...] = ()  # of the methods, those that draft from what came with the request
    off: Reason | None = None  # why its method does not draft; None where it does
    policy: str = "fixed"
    branching: frozenset[str] = frozenset()  # of the methods, those that can draft trees
    depth: int | None = None  # most drafts in a row where it does; 0: chains; None: as its policy decides
    chained: bool | None = None  # whether lookups continue a draft at its end; None: as its policy decides
    acceptance: Rule = "matching"  # of drafts that carry q
    shape: PromptShape = PromptShape()
    prediction: tuple[int, ...] = ()  # what the client expects the output to be
    pool: str | None = None  # of earlier answers; None: the answers to this prompt, "": none
    tenant: str = ""  # that the pool belongs to
    # whether its pages are found by later prompts, and it finds those of earlier ones
    prefix_cache: bool = True
    images: PromptImages = NO_IMAGES
    adapter: str = ""  # of the target, by name; empty: the target itself

    @property
    def needs_q(self) -> bool:
        """Whether a drawn draft carries its q."""
        return self.acceptance != "matching"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. Between steps `table` has the K and V of `tokens[released:committed]`."""

    id: int
    request: Request
    tokens: list[int]  # prompt, then output
    stats: RequestStats
    sample: int = 0  # which of the request's n samples
    failed: bool = False  # whether a proposer raised an error for it: it goes on plainly
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
    # drafts before a row of this round -> why its logits processor left no logits there
    faults: dict[tuple[int, ...], SpeculonError] = field(default_factory=dict)
    # (stream, output position) -> [V], drawn ahead
    noise: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """All that may draft for it, in the order they are asked."""
        return () if self.failed else tuple(self.request.max_drafts)

    @property
    def branching(self) -> frozenset[str]:
        """Of its methods, those that may draft trees: these have no q, and a grammar is read along chains."""
        return frozenset() if self.grammar or self.request.needs_q else self.request.branching

    @property
    def off(self) -> Reason | None:
        """Why nothing drafts for it; None where something does."""
        if self.failed:
            return Reason.ERROR
        return None if self.request.max_drafts else self.request.off

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

    def contents(self, start: int, end: int) -> tuple[int, ...]:
        """Its tokens from `start` to `end`, with a number of its image in the place of each placeholder."""
        tokens, images = tuple(self.tokens[start:end]), self.request.images.contents
        return tuple(images.get(start + i, x) for i, x in enumerate(tokens)) if images else tokens

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
    """One sequence in one round: consecutive positions of one forward, and what is decided, drafted and
    verified for it. A prompt chunk, or the last token with the drafts d_1..d_K after it.
    """

    seq: Sequence
    start: int  # position of the first row in its sequence = tokens already in pages
    length: int  # rows without the drafts
    draft: Draft = NO_DRAFT  # what is verified
    decision: Decision = UNDECIDED
    reserved: int = MAX_DRAFTS  # drafts for which the lease has pages, and the memory estimate rows
    k: int = 0  # the most drafts of the proposal that is made
    depth: int = 0  # the most of them in a row where it may be a tree; 0: it is a chain
    # (method, k, its draft), in the order they were made, empty ones too
    proposals: list[tuple[str, int, Draft]] = field(default_factory=list)
    reason: Reason | None = None  # why nothing is verified; of no meaning with a draft
    estimate: Estimate | None = None  # of the draft, where its policy has one
    row: int = 0  # first row in the flat batch
    score: range = range(0)  # its rows among the R scored ones
    verdict: Verdict = Verdict(())
    # whether it reaches the sequence's last token, so that its last rows are sampled
    samples: bool = field(init=False)
    decodes: bool = False  # whether it may carry a draft: every last token alone

    def __post_init__(self) -> None:
        self.samples = self.start + self.length == len(self.seq.tokens)
        self.decodes |= self.samples and self.length == 1

    def max_drafts(self, method: str) -> int:
        """The bound of K: the most drafts of a method that this round has a place for.

        As many as are set and as its drafter can make (`Request.max_drafts`), as its drafter's context holds,
        as tokens may follow before the target's own last one, and as are reserved.
        """
        request = self.seq.request
        bound = min(request.max_drafts[method], self.seq.room - 1, self.reserved)
        if method in request.max_context:
            bound = min(bound, request.max_context[method] - self.start - self.length)
        return max(0, bound)

    @property
    def rows(self) -> int:
        return self.length + len(self.draft.tokens)

    @property
    def positions(self) -> Seq[int]:
        """Of its rows; drafts of a tree that exclude each other share one."""
        first = self.start + self.length
        if self.draft.parents is None:
            return range(self.start, self.end)
        return [*range(self.start, first), *(first + depth for depth in self.draft.depths)]

    @property
    def end(self) -> int:
        """The place after its last row in pages; of a chain that is its position, too."""
        return self.start + self.rows

    @property
    def scores_prompt(self) -> bool:
        """Whether every row is wanted, for prompt log-probabilities."""
        seq = self.seq
        return (
            seq.prompt_scored < min(self.start + self.length, seq.request.prompt_len - 1)
            and seq.wants_prompt_logprobs
        )

    @property
    def method(self) -> str:
        """Whose proposal its draft is."""
        return self.proposals[-1][0]

    @property
    def asked(self) -> bool:
        """Whether its methods are to draft; not where one has failed and there is no draft."""
        return self.reserved > 0 and bool(self.decision.asks) and self.why_plain is not Reason.ERROR

    @property
    def done(self) -> bool:
        """Whether no other method is to be asked."""
        return bool(self.draft.tokens) or self.seq.failed

    @property
    def why_plain(self) -> Reason | None:
        """Why nothing is verified; None with a draft."""
        return None if self.draft.tokens else self.reason


def share_rows(spans: list[Span], rows: int) -> None:
    """Reserves what is decided, at most `rows` drafts in all: the longest shrink; none: reason `load`."""
    limit = MAX_DRAFTS
    while limit and sum(min(span.decision.k, limit) for span in spans) > rows:
        limit -= 1
    for span in spans:
        span.reserved = min(span.decision.k, limit)
        span.reason = span.decision.reason or (None if limit else Reason.LOAD)


@dataclass(slots=True)
class Round:
    """One committed round of the engine, as its accounts and its record see it."""

    load: Load  # before it
    spans: list[Span]
    calls: Mapping[str, Proposal]  # by method
    draft_ms: float
    step_ms: float | None  # without the proposals; None: the target was not called
    repair_ms: float = 0.0  # of the step, to restore recurrent states after rejected drafts

    @property
    def decoding(self) -> list[Span]:
        return [span for span in self.spans if span.decodes]

    @property
    def timing(self) -> Timing:
        """What a cost model may learn from it."""
        decoding_only = all(span.length == 1 for span in self.spans)
        return Timing(self.step_ms if decoding_only else None, self.calls)

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)


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
    full: bool = False  # whether a path of a tree was accepted whole

    @property
    def fates(self) -> list[Fate]:
        """What became of the draft at each token."""
        accepted = len(self.sources)
        whole = self.full or accepted == self.drafted
        own: Fate = "plain" if not self.drafted else "bonus" if whole else "correction"
        return ["accepted" if i < accepted else own for i in range(len(self.tokens))]

    def __reduce__(self) -> tuple[type[Event], tuple[Any, ...]]:
        """As its arguments, in a third of the time: the events of 32 streams cross a pipe each step."""
        first = (self.request_id, self.sample, self.tokens)
        ends = (self.logprobs, self.finish, self.prompt_logprobs, self.stats)
        drafts = (self.sources, self.drafted, self.full)
        plain = ends == (None, None, None, None) and drafts == ((), 0, False)
        return Event, first if plain else (*first, *ends, *drafts)
