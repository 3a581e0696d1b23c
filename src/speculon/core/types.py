"""The nouns below requests: drafts, verdicts, decisions, costs. Plain data; no torch here.

Shape letters used everywhere: B sequences, T rows of a call, R scored rows, K drafts,
V vocabulary, D hidden (or head) width, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from speculon.core.config import AcceptanceSetting, SamplingParams
from speculon.core.errors import SpeculonError
from speculon.core.tree import ROOT, Parents, depths, descend, or_chain, path, preorder

if TYPE_CHECKING:
    from torch import Tensor

Rule = Literal["matching", "rejection", "block"]


def acceptance_rule(rule: AcceptanceSetting, params: SamplingParams) -> Rule:
    """The rule for drafts that carry q. Under `auto`, text with a seed must not depend on the drafts."""
    if rule == "auto":  # decisions/007: block verification accepts the most drafts
        rule = "block" if params.seed is None else "matching"
    return "matching" if params.greedy else rule


class Reason(StrEnum):
    """Why a round had no drafts: a code for programs, metrics and logs, and a sentence for people."""

    sentence: str

    def __new__(cls, code: str, sentence: str = "") -> Self:  # `Reason(code)` finds a member
        reason = str.__new__(cls, code)
        reason._value_, reason.sentence = code, sentence
        return reason

    OFF_CONFIG = "off_config", "speculation is off in the settings"
    OFF_REQUEST = "off_request", "the request turned speculation off"
    NO_DRAFTER = "no_drafter", "no drafter is loaded for this method"
    NOT_READY = "not_ready", "the drafter had no input yet"
    NO_MATCH = "no_match", "no earlier text matched"
    COLD = "cold", "costs were not measured yet"
    COOLDOWN = "cooldown", "recent drafts gained less than they cost, so drafting is paused for a while"
    LOW_ACCEPTANCE = "low_acceptance", "too few drafts were accepted to pay for drafting"
    COST = "cost", "drafts would have cost more time than they save"
    LOAD = "load", "the batch was full, or too full for drafts to pay"
    SOLO = "solo", "other requests were running or waiting"
    SHADOW = "shadow", "drafts were measured, not used"
    NO_PAGES = "no_pages", "no memory pages were free for drafts"
    MEMORY = "memory", "the drafter did not fit into the memory limit"
    CONTEXT_LIMIT = "context_limit", "the context was full"
    MAX_TOKENS = "max_tokens", "only one token was left of max_tokens"
    ERROR = "error", "the drafter failed; the log has its error"


def reasons_in_words(reasons: Mapping[str, int]) -> str:
    """Rounds without drafts by reason, the most frequent first: code, sentence and number of rounds."""
    frequent = sorted(reasons.items(), key=lambda item: -item[1])
    return "; ".join(f"{code}: {Reason(code).sentence} ({n} round{'s' * (n != 1)})" for code, n in frequent)


class Stop(StrEnum):
    """Why a proposal has no more drafts. A proposal with as many drafts as it was asked for has `limit`.

    limit: it has as many drafts as it was asked for · no_match: no earlier text continues the sequence ·
    source_end: the text that it copies from ends there · window: after the text deviated from the prediction,
    some rounds draft fewer tokens · min_hits: too few matches agree on the next token · min_probability: too
    small a share of the matches agrees · factor: a match of this length permits no more drafts · choice: the
    grammar does not determine the next token · confidence: the drafter's confidence fell below the minimum ·
    grammar: the grammar forbids the next draft · not_ready: the drafter has no input yet.
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


class SpanOutcome(StrEnum):
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
    """What a proposer drafts for one sequence in one round: K tokens, as a chain or as a tree (`core.tree`).

    >>> Draft((5, 6, 7), ("my_method",) * 3)

    `match` and `stop` describe the proposal. They stay when the draft is truncated or chained with another
    one, unless the truncation gives a reason of its own.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()  # the method of each token, as chained drafts have several
    probs: Tensor | None = None  # q [K, V]; None where q is one-hot
    confidence: tuple[float, ...] | None = None  # in (0, 1); 0 where the drafter gives none
    # tokens of context that a lookup matched; 0 for all other drafters
    match: int = field(default=0, compare=False)
    # why the proposal ends here; None where its drafter does not say
    stop: Stop | None = field(default=None, compare=False)
    parents: Parents | None = None  # of a tree, which has no q; None: a chain

    def __post_init__(self) -> None:
        assert len(self.sources) == len(self.tokens), (self.tokens, self.sources)
        assert self.parents is None or (len(self.parents) == len(self.tokens) and self.probs is None)

    @property
    def depths(self) -> Seq[int]:
        """For each draft, the number of drafts before it on its path."""
        return range(len(self.tokens)) if self.parents is None else depths(self.parents)

    @property
    def branches(self) -> int:
        """The paths of a tree after the first one, each of which reads the context once more."""
        return 0 if self.parents is None else len(self.tokens) - len({*self.parents} - {ROOT}) - 1

    @property
    def depth(self) -> int:
        """The number of drafts on the longest path; of a chain, all."""
        return 1 + max(self.depths, default=-1)

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """For each of the K + 1 rows that judge the drafts, the drafts before it: first the row of the last
        token, then the row of each draft.
        """
        if self.parents is None:
            return [self.tokens[:i] for i in range(len(self.tokens) + 1)]
        paths = (path(self.parents, node) for node in range(len(self.tokens)))
        return [(), *(tuple(self.tokens[node] for node in nodes) for nodes in paths)]

    def accepted(self, samples: Seq[int]) -> Seq[int]:
        """The indices of the drafts that are accepted by matching: each equals the target's own sample at its
        place. `samples[0]` is the sample after the last token, `samples[i + 1]` that after draft i.
        """
        if self.parents is not None:
            return descend(self.parents, self.tokens, samples)
        return range(shared_length(self.tokens, samples))

    def outcome(self, accepted: int) -> SpanOutcome | None:
        """How a round with this many accepted drafts ended; a tree counts as its longest path. None without a
        draft.
        """
        if not self.tokens:
            return None
        left = self.depth - accepted
        return SpanOutcome.EARLY if left > 1 else SpanOutcome.TAIL if left else SpanOutcome.FULL

    def in_order(self, nodes: Seq[int]) -> Draft:
        """The same tree with its nodes in this order, in which parents come before their children."""
        assert self.parents is not None
        at = {node: place for place, node in enumerate(nodes)} | {ROOT: ROOT}
        return replace(
            self,
            tokens=tuple(self.tokens[node] for node in nodes),
            sources=tuple(self.sources[node] for node in nodes),
            confidence=self.confidence and tuple(self.confidence[node] for node in nodes),
            parents=tuple(at[self.parents[node]] for node in nodes),
        )

    def in_preorder(self) -> Draft:
        """The tree in the order in which a forward has its rows; a chain stays unchanged."""
        return self if self.parents is None else self.in_order(preorder(self.parents))

    def truncated(self, k: int, stop: Stop | None = None) -> Draft:
        """The first `k` drafts, also of a tree. `stop` replaces the reason for which the proposal ends."""
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
            self.parents and or_chain(self.parents[:k]),
        )

    def unchained(self, methods: tuple[str, ...]) -> int:
        """How many tokens come from the first proposal, if drafts of `methods` may be chained to it."""
        first, sources = self.sources[:1], self.sources
        return next((i for i, s in enumerate(sources) if (s,) != first and s in methods), len(sources))

    def chain(self, tail: Draft) -> Draft:
        """This draft followed by another one without q, whose tokens get a one-hot q if this draft has q.

        `match` and `stop` stay those of this draft, because the tail is another proposal.
        """
        assert tail.probs is None, "a drawn tail would need the noise of this draft"
        q, k, added = self.probs, len(self.tokens), len(tail.tokens)
        if q is not None and added:
            longer = q.new_zeros((k + added, q.shape[1]))
            longer[:k] = q
            longer[range(k, k + added), tail.tokens] = 1
            q = longer
        confidence = None
        if self.confidence or tail.confidence:  # 0: the drafter gives none
            confidence = (self.confidence or (0.0,) * k) + (tail.confidence or (0.0,) * added)
        tokens, sources = self.tokens + tail.tokens, self.sources + tail.sources
        return Draft(tokens, sources, q, confidence, self.match, self.stop)


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
    """Why a text ended; `matched` is the stop string or stop token id, `error` the fault that ended it."""

    reason: FinishReason
    matched: str | int | None = None
    error: SpeculonError | None = None  # None also where a grammar left no token

    @property
    def by_token(self) -> bool:
        """Whether a stop token ended it, which is no part of the text."""
        return isinstance(self.matched, int)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decides about one sequence in one round: its 1 to K + 1 new tokens (none for a chunk of
    the prompt), and how many drafts it accepted.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    outcome: SpanOutcome | None = None  # None without a draft
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt tokens after this span's rows
    # of a tree, until it is committed: its accepted drafts; None: the first ones
    path: tuple[int, ...] | None = None

    @property
    def generated(self) -> int:
        """Its tokens, and the stop token, which is not among them."""
        return len(self.tokens) + (self.finish is not None and self.finish.by_token)


class CallCost(NamedTuple):
    """One call of a method, for all sequences that it drafts for."""

    sequences: int
    k: int  # the most drafts of one sequence, of a tree those in a row
    ms: float
    unread: int = 0  # tokens that it computes before it drafts, beyond the last one of each sequence


@dataclass(frozen=True, slots=True)
class Timing:
    """What a round took, in ms."""

    target_ms: float | None = None  # of the step without its proposals; None where it also computed prompts
    calls: Mapping[str, CallCost] = field(default_factory=dict)  # by method


@dataclass(frozen=True, slots=True)
class Ask:
    """A method, and K: the most tokens it is to draft, as a tree at most `depth` deep (0: as a chain)."""

    method: str
    k: int
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The methods to ask for one sequence, in turn until one has a draft; none: `reason` says why."""

    asks: tuple[Ask, ...] = ()
    reason: Reason | None = None  # why none drafts
    unused: Reason = Reason.COST  # why there is no draft where `trim` keeps nothing of any
    chained: int = 0  # drafts in all where lookups continue a draft at its end; 0: they do not

    @classmethod
    def plain(cls, reason: Reason) -> Decision:
        return cls(reason=reason)

    @classmethod
    def of(cls, asks: Iterable[Ask], unused: Reason = Reason.COST, chained: int = 0) -> Decision:
        return cls(tuple(asks), None, unused, chained)

    def __post_init__(self) -> None:
        assert bool(self.asks) == (self.reason is None), self

    @property
    def k(self) -> int:
        """The most drafts of this round; 0 is plain decoding."""
        return max((self.chained, *(ask.k for ask in self.asks)), default=0)


UNDECIDED = Decision.plain(Reason.OFF_CONFIG)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a proposer can do at most; None: as much as it is asked for."""

    max_context: int | None = None  # tokens
    max_drafts: int | None = None  # of one round and sequence
    reads_states: bool = False  # whether it drafts from the target's states of the tokens before
    branches: bool = True  # whether it may draft trees, if it can; not where a branch would change its state


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a prompt tells of its answer before anything is drafted: its class, and the marker found in it."""

    name: str = ""  # sequences of one class are believed to fare alike until they show otherwise
    marker: str = "no_signal"


class Estimate(NamedTuple):
    """What a policy expects of a draft that it lets through, in tokens."""

    tokens: float  # of the drafts, those accepted
    price: float  # what the time of their rows brings otherwise


@dataclass(frozen=True, slots=True)
class Load:
    """What the policy may know of the engine's state."""

    running: int
    waiting: int
    free_pages: int


# on: as asked. changed: served, and speculation works otherwise. off: served without it.
# refused: an error whose `feature` is the row's key
Status = Literal["on", "changed", "off", "refused"]


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the capability table, by feature: its status, the reason, and its limits by name."""

    status: Status
    reason: str
    limits: Mapping[str, int] = field(default_factory=dict)


Capabilities = Mapping[str, Capability]  # by feature
CapabilityRows = Iterator[tuple[str, Capability]]  # of the table


def row(status: Status, reason: str, **limits: int) -> Capability:
    return Capability(status, reason, limits)


def on_or_off(on: object, reason: str, otherwise: str) -> Capability:
    return row("on", reason) if on else row("off", otherwise)


def capabilities_json(table: Capabilities) -> dict[str, dict[str, Any]]:
    return {feature: asdict(row) for feature, row in table.items()}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def shared_length(a: Seq[int], b: Seq[int]) -> int:
    """How many tokens the two have in common at their beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
