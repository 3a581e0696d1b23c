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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
    """Draft tokens of one sequence for one round: one after the other, or a tree (`core.tree`).

    `match` and `stop` describe the proposal: cutting and chaining keep them, unless the cut gives a new stop.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()  # the method of each token: drafts may be chained
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
        """Drafts before each one, in a row."""
        return range(len(self.tokens)) if self.parents is None else depths(self.parents)

    @property
    def branches(self) -> int:
        """Paths of a tree beside the first: each reads the context again."""
        return 0 if self.parents is None else len(self.tokens) - len({*self.parents} - {ROOT}) - 1

    @property
    def depth(self) -> int:
        """The most drafts in a row."""
        return 1 + max(self.depths, default=-1)

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The drafts before each of the K + 1 rows that judge them: the last token's, then each draft's."""
        if self.parents is None:
            return [self.tokens[:i] for i in range(len(self.tokens) + 1)]
        paths = (path(self.parents, node) for node in range(len(self.tokens)))
        return [(), *(tuple(self.tokens[node] for node in nodes) for nodes in paths)]

    def accepted(self, samples: Seq[int]) -> Seq[int]:
        """The drafts that equal the target's own sample after what is before them; `samples[i + 1]` is that
        after draft i.
        """
        if self.parents is not None:
            return descend(self.parents, self.tokens, samples)
        return range(shared_length(self.tokens, samples))

    def outcome(self, accepted: int) -> SpanOutcome | None:
        """How a round of it ends; of a tree, as if the longest path were the draft. None without a draft."""
        if not self.tokens:
            return None
        left = self.depth - accepted
        return SpanOutcome.EARLY if left > 1 else SpanOutcome.TAIL if left else SpanOutcome.FULL

    def in_order(self, nodes: Seq[int]) -> Draft:
        """A tree with its nodes in this order: parents first."""
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
        """As it is laid out in a forward; a chain stays as it is."""
        return self if self.parents is None else self.in_order(preorder(self.parents))

    def truncated(self, k: int, stop: Stop | None = None) -> Draft:
        """The first `k` drafts, of a tree too; `stop` where that changes why the proposal ends."""
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
        """How many of its first tokens come from one proposal, where drafts of `methods` may be chained."""
        first, sources = self.sources[:1], self.sources
        return next((i for i, s in enumerate(sources) if (s,) != first and s in methods), len(sources))

    def chain(self, tail: Draft) -> Draft:
        """This draft, then another one without q, which gets a one-hot q where this draft has q.

        Match and stop are those of this draft: the tail is another proposal.
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
    """What one round yields for one sequence: 1..K+1 tokens of the target, or none for a prompt chunk."""

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
