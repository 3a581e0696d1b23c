"""The nouns. No torch here: plans, drafts and verdicts are plain integers.

Shape letters used everywhere: B sequences, T tokens of a flat batch, R scored rows, K drafts,
V vocabulary, D hidden (or head) width, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from speculon.config import SamplingParams
    from speculon.grammar import Matcher
    from speculon.sampling import Rules
    from speculon.telemetry import RequestStats
    from speculon.verify import Ending


class Reason(StrEnum):
    """Why a round was not speculative. Metric label, log word, API value and tooltip alike."""

    OFF_CONFIG = "off_config"
    OFF_REQUEST = "off_request"
    NO_DRAFTER = "no_drafter"
    NOT_READY = "not_ready"
    NO_MATCH = "no_match"
    COLD = "cold"
    COOLDOWN = "cooldown"
    LOW_ACCEPTANCE = "low_acceptance"
    COST = "cost"
    LOAD = "load"
    SOLO = "solo"
    SHADOW = "shadow"
    NO_PAGES = "no_pages"
    MEMORY = "memory"
    CONTEXT_LIMIT = "context_limit"
    MAX_TOKENS = "max_tokens"
    ERROR = "error"


class Stop(StrEnum):
    """Why a proposal ended where it did. A proposal of as many drafts as asked for always says `limit`.

    limit: as many as asked for · no_match: nothing that continues the sequence was found · source_end: what
    was copied from ends there · window: fewer for some rounds after a deviation from the prediction ·
    min_hits: the continuation was found too few times · min_probability: its share of the matches is too
    small · factor: as many drafts as a match of this length permits · choice: the grammar forces no further
    token · confidence: the drafter's last token is below the minimum · grammar: the grammar allows no more ·
    not_ready: the drafter has nothing to read yet.
    """

    LIMIT = "limit"
    NO_MATCH = "no_match"
    SOURCE_END = "source_end"
    WINDOW = "window"
    MIN_HITS = "min_hits"
    MIN_PROBABILITY = "min_probability"
    FACTOR = "factor"
    CHOICE = "choice"
    CONFIDENCE = "confidence"
    GRAMMAR = "grammar"
    NOT_READY = "not_ready"


class SpanKind(StrEnum):
    """How a drafted span ended.

    full: every draft accepted · tail: only the last draft rejected · early: a mismatch before the last draft
    · stop: the text ended inside accepted drafts · early_stop: the text ended at a correction.
    """

    FULL = "full"
    TAIL = "tail"
    EARLY = "early"
    STOP = "stop"
    EARLY_STOP = "early_stop"


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens of one sequence for one round. A chain, for now.

    `match` and `stop` describe the proposal: they stay as they are where a draft is cut or joined, unless the
    cut says why.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()  # one per token: drafts may be joined
    probs: Tensor | None = None  # q [K, V]; None when the guess is one-hot
    confidence: tuple[float, ...] | None = None  # in (0, 1); 0 of a token whose drafter says nothing
    # tokens of context that a lookup matched; 0 for all other drafters
    match: int = field(default=0, compare=False)
    # why the proposal ends here; None where its drafter does not say
    stop: Stop | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert len(self.sources) == len(self.tokens), (self.tokens, self.sources)

    def cut(self, k: int, stop: Stop | None = None) -> Draft:
        """The first `k` drafts; `stop` where that changes why the proposal ends."""
        if k >= len(self.tokens):
            return self
        stop = stop or self.stop
        if not k:
            return no_draft(stop, self.match)
        probs = None if self.probs is None else self.probs[:k]
        return Draft(
            self.tokens[:k],
            self.sources[:k],
            probs,
            self.confidence and self.confidence[:k],
            self.match,
            stop,
        )

    def own(self, methods: tuple[str, ...]) -> int:
        """How many of its first tokens come from one proposal, where drafts of `methods` may have been
        joined.
        """
        first = self.sources[:1]
        return next(
            (i for i, s in enumerate(self.sources) if (s,) != first and s in methods), len(self.sources)
        )

    def join(self, tail: Draft) -> Draft:
        """Both, one behind the other. The tail is one-hot: where this draft has q, so has each of its tokens,
        all of it.

        Match and stop are those of this draft: what follows its end is another proposal.
        """
        assert tail.probs is None, "what is drawn behind a draft must know the draft's own luck"
        q, k, more = self.probs, len(self.tokens), len(tail.tokens)
        probs = q
        if q is not None and more:
            probs = q.new_zeros((k + more, q.shape[1]))
            probs[:k] = q
            probs[range(k, k + more), tail.tokens] = 1
        confidence = None
        if self.confidence or tail.confidence:  # 0: says nothing
            confidence = (self.confidence or (0.0,) * k) + (tail.confidence or (0.0,) * more)
        return Draft(
            self.tokens + tail.tokens, self.sources + tail.sources, probs, confidence, self.match, self.stop
        )


@lru_cache(256)
def no_draft(stop: Stop | None = None, match: int = 0) -> Draft:
    """An empty draft that says why; the same object each time."""
    return Draft(match=match, stop=stop)


NO_DRAFT = no_draft()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities of the target at one position."""

    token: int
    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...]  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a text ended; `matched` is the stop string or stop token id."""

    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round yields for one sequence: 1..K+1 tokens of the target, or none for a prompt chunk."""

    tokens: tuple[int, ...]
    accepted: int = 0
    kind: SpanKind | None = None  # None without a draft
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt tokens after this span's rows


class Proposal(NamedTuple):
    """What one call of a method was, for all texts that asked it."""

    texts: int
    k: int  # the most drafts of one text
    ms: float
    # tokens of them that it had not seen, beyond the last of each: it reads them before it drafts
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """What a round took, in ms."""

    target_ms: float | None = None  # of the step without its proposals; None where it also computed prompts
    proposals: Mapping[str, Proposal] = field(default_factory=dict)  # by method


@dataclass(frozen=True, slots=True)
class Ask:
    """A method, and the most tokens it may draft."""

    method: str
    k: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Method and number of drafts for one sequence; k = 0 is plain decoding, and `reason` says why.

    `asks` are the methods in the order they are asked, until one has a draft; look-ups may go on at its end,
    up to `reach`.
    """

    method: str | None
    k: int
    reason: Reason | None = None
    asks: tuple[Ask, ...] = field(default=(), compare=False)
    # why there is no draft where `trim` keeps nothing of any
    unused: Reason = field(default=Reason.COST, compare=False)
    reach: int = field(default=0, compare=False)  # drafts in all, where drafts are joined; 0: they are not

    @classmethod
    def of(cls, asks: Iterable[Ask], unused: Reason = Reason.COST, reach: int = 0) -> Decision:
        """Drafts by the first of these that has any; there is at least one, and K is at least 1."""
        asked = tuple(asks)
        return cls(asked[0].method, max(reach, *(ask.k for ask in asked)), None, asked, unused, reach)

    def __post_init__(self) -> None:
        assert (self.k > 0) == (self.reason is None), self
        if self.k and self.method and not self.asks:
            object.__setattr__(self, "asks", (Ask(self.method, self.k),))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's claim on the page pool: keys and values, or the taps of each position as one key."""

    kind: Literal["attention", "taps"]
    heads: int  # key-value heads
    k_dim: int
    v_dim: int
    dtype: dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the engine: hidden-state taps, layers of its own in the pages, its limits."""

    # target layers (-1: the embeddings) whose states lie in the first of its own layers
    taps: tuple[int, ...] = ()
    layers: tuple[LayerSpec, ...] = ()
    max_context: int | None = None
    bytes_fixed: int = 0  # weights
    bytes_scratch: int = 0  # intermediate results of its largest forward


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a prompt tells of its answer before anything is drafted: its class, and the marker that makes it
    favourable.
    """

    name: str = ""  # sequences of one class are believed to fare alike until they show otherwise
    marker: str = "no_signal"
    favourable: bool = False  # whether the answer is likely to repeat the prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """One text being written. Between steps: `tokens[:committed]` have their K and V in `table`'s pages."""

    id: int
    request_id: str
    tokens: list[int]  # prompt, then output
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt + max_tokens
    rules: Rules
    ending: Ending
    stats: RequestStats
    sample: int = 0  # which of the request's n samples
    method: str | None = None  # the drafting method; None where there is none, and `off` says why
    k: int = 0
    off: Reason | None = None
    given: tuple[str, ...] = ()  # methods that draft from what came with the request; asked before `method`
    given_k: int = 0  # their most drafts in a round
    # all that may draft for it, in order: `given`, then what `method` stands for
    methods: tuple[str, ...] = ()
    # of these, those without weights: a proposal of theirs costs next to nothing
    lookups: frozenset[str] = frozenset()
    policy: str = "fixed"  # how far it is drafted for
    join: bool | None = None  # whether drafts of several methods are joined; None: as its policy likes
    shape: PromptShape = PromptShape()
    # continuations that had to match before a lookup's drafts are verified, as its policy chose
    cold_matches: int = 0
    prediction: tuple[int, ...] = ()  # what the client expects the text to be
    # whose earlier answers it may be drafted from; None: those to its prompt, empty: nobody's
    pool: str | None = None
    tenant: str = ""  # among whose pools that one is
    grammar: Matcher | None = None  # where the text stands in its grammar: at `tokens`, always
    rejection: bool = False  # whether drafts that carry q are judged by rejection instead of matching
    committed: int = 0
    # drafting method -> tokens whose K and V it has in the same pages
    drafted: dict[str, int] = field(default_factory=dict)
    prompt_scored: int = 0  # prompt positions whose log-probabilities have been given out
    table: list[int] = field(default_factory=list)  # page numbers, in order
    noise: dict[int, Tensor] = field(default_factory=dict)  # output position -> [V], drawn ahead

    def most(self, method: str) -> int:
        """The most drafts of a method in one round."""
        return self.given_k if method in self.given else self.k

    @property
    def plain(self) -> bool:
        """Whether nothing drafts for it; `off` says why."""
        return self.off is not None and not self.given

    @property
    def pending(self) -> int:
        """Tokens whose K and V are not in pages yet; 1 while decoding."""
        return len(self.tokens) - self.committed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def room(self) -> int:
        """Tokens it may still write."""
        return self.max_len - len(self.tokens)


# of one call of a method, before anything is joined to a draft or trimmed
Proposed = tuple[str, list[Sequence], list[Draft]]


class Estimate(NamedTuple):
    """What a policy expects of a draft that it lets through, in tokens."""

    tokens: float  # of the drafts, those accepted
    price: float  # what the time of their rows brings otherwise


@dataclass(slots=True, eq=False)
class Span:
    """Consecutive positions of one sequence inside one flat forward: a prompt chunk, or [last token,
    d_1..d_K].
    """

    seq: Sequence
    start: int  # position of the first row in its sequence = tokens already in pages
    length: int  # rows without the drafts
    draft: Draft = NO_DRAFT
    estimate: Estimate | None = None  # of the draft, where its policy has one
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
            seq.prompt_scored < min(self.start + self.length, seq.prompt_len - 1)
            and seq.params.prompt_logprobs is not None
        )


@dataclass(slots=True)
class Plan:
    """Who runs in this step; `decoding` are the spans that may carry a draft."""

    spans: list[Span]
    decoding: list[Span] = field(init=False)

    def __post_init__(self) -> None:
        self.decoding = [span for span in self.spans if span.length == 1 and span.samples]


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy may know of the engine's state."""

    running: int
    waiting: int
    free_pages: int


@dataclass(frozen=True, slots=True)
class Event:
    """News of one sequence: new tokens, and how it ended if it did. Plain data."""

    request_id: str
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: RequestStats | None = None  # with the finish
    sources: tuple[str, ...] = ()  # of the first tokens, which were drafts: what guessed each

    def __reduce__(self) -> tuple[type[Event], tuple[Any, ...]]:
        """Pickled as what it was made of, in a third of the time: each step's news of 32 streams crosses a
        pipe.
        """
        said = (self.request_id, self.sample, self.tokens)
        more = (self.logprobs, self.finish, self.prompt_logprobs, self.stats, self.sources)
        return Event, said if more == (None, None, None, None, ()) else (*said, *more)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
