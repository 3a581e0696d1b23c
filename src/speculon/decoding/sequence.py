"""A request, its sequences, and the events that report their progress. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speculon.core.config import SamplingParams
from speculon.core.errors import SpeculonError
from speculon.core.images import NO_IMAGES, PromptImages
from speculon.core.telemetry import RequestStats
from speculon.core.types import Finish, PromptShape, Reason, Rule, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor, device

    from speculon.decoding.text.bad_words import BadWords
    from speculon.decoding.text.grammar import Matcher
    from speculon.decoding.text.thinking import AnswerStart
    from speculon.decoding.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class Rules:
    """`SamplingParams` with everything that is worked out once per request, for the target's vocabulary."""

    params: SamplingParams
    greedy: bool
    plain: bool  # greedy, on unchanged logits
    adjusts: bool  # whether any logit is changed before the temperature
    penalises: bool
    filters: bool
    bad_words: BadWords | None
    stop_ids: tuple[int, ...]  # forbidden until min_tokens are written
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
    # finds where the answer begins in a text with thinking, because stop strings count only from there
    answer_start: Callable[[], AnswerStart] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request, with everything that admission worked out once. Its n samples share it."""

    id: str
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt + max_tokens
    rules: Rules
    ending: Ending
    # method -> most drafts of a round (setting and drafter), in the order in which the methods are asked
    max_drafts: Mapping[str, int] = field(default_factory=dict)
    max_context: Mapping[str, int] = field(
        default_factory=dict
    )  # drafter with a limit -> its context, tokens
    # the methods without weights, whose proposals cost almost nothing
    lookups: frozenset[str] = frozenset()
    from_request: tuple[str, ...] = ()  # the methods that draft from the request itself: grammar, prediction
    off: Reason | None = None  # why its method does not draft; None: it does
    policy: str = "fixed"
    branching: frozenset[str] = frozenset()  # the methods that can draft trees
    depth: int | None = None  # largest depth of a tree; 0: chains only; None: the policy decides
    chained: bool | None = None  # whether lookups continue another method's draft; None: the policy decides
    acceptance: Rule = "matching"  # the rule for drafts with q
    shape: PromptShape = PromptShape()
    prediction: tuple[int, ...] = ()  # the output that the client expects
    pool: str | None = None  # pool of earlier answers; None: that of this prompt, "": none
    tenant: str = ""  # owner of the pool
    # whether it uses cached pages of earlier prompts, and leaves its own to later ones
    prefix_cache: bool = True
    images: PromptImages = NO_IMAGES
    adapter: str = ""  # name of the target's adapter; empty: the target itself

    @property
    def needs_q(self) -> bool:
        """Whether sampled drafts must come with their q."""
        return self.acceptance != "matching"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request. Between steps the runtime has computed exactly `tokens[:committed]`."""

    id: int
    request: Request
    tokens: list[int]  # prompt, then output
    stats: RequestStats
    sample: int = 0  # which of the request's n samples
    failed: bool = False  # a proposer raised an error for it, so it continues without drafts
    grammar: Matcher | None = None  # has always consumed the whole output so far
    answer: AnswerStart | None = None  # made by the request's `Ending` when first needed
    committed: int = 0
    prompt_scored: int = 0  # prompt positions whose log-probabilities have been reported
    counts: TokenCounts | None = None  # counts of its tokens, if the request has penalties
    # drafts before a row of this round -> the error of the logits processor at that row
    faults: dict[tuple[int, ...], SpeculonError] = field(default_factory=dict)
    # (stream, output position) -> noise [V], drawn ahead
    noise: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that may draft for it, in the order in which they are asked."""
        return () if self.failed else tuple(self.request.max_drafts)

    @property
    def branching(self) -> frozenset[str]:
        """The methods that may draft trees for it: none with a grammar, which is read along chains, or if
        drafts need a q, which trees do not have.
        """
        return frozenset() if self.grammar or self.request.needs_q else self.request.branching

    @property
    def off(self) -> Reason | None:
        """Why no method drafts for it; None: one does."""
        if self.failed:
            return Reason.ERROR
        return None if self.request.max_drafts else self.request.off

    @property
    def pending(self) -> int:
        """The number of tokens that are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.committed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def tokens_left(self) -> int:
        """The number of tokens that it may still generate."""
        return self.request.max_len - len(self.tokens)

    def contents(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens from `start` to `end`, with a number that stands for the image instead of each
        placeholder.
        """
        tokens, images = tuple(self.tokens[start:end]), self.request.images.contents
        return tuple(images.get(start + i, x) for i, x in enumerate(tokens)) if images else tokens

    def continues(self, other: Sequence) -> bool:
        """Whether it begins with all tokens of `other`, and has the same prompt and parameters."""
        mine, theirs = self.request, other.request
        same = (mine.prompt_len, mine.params) == (theirs.prompt_len, theirs.params)
        return same and self.tokens[: len(other.tokens)] == other.tokens

    def advance(self, end: int, tokens: Seq[int], scored: int) -> None:
        """Commits a round: the runtime has computed `end` tokens, `tokens` are new, and the log-probabilities
        of the first `scored` positions of the prompt have been reported.
        """
        self.committed = end
        self.tokens.extend(tokens)
        self.prompt_scored = max(self.prompt_scored, min(scored, self.request.prompt_len - 1))
        if self.grammar is not None:
            self.grammar.consume(tuple(tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether it reports log-probabilities of the prompt: only the first sample of a request does."""
        return self.sample == 0 and self.request.params.prompt_logprobs is not None


# what became of the draft at an output token: it was accepted, or the token is the target's own: after a
# rejected draft, after all drafts were accepted, or in a round without drafts
Fate = Literal["accepted", "correction", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class Event:
    """The new tokens of one sequence, and its end if it has ended. Plain data."""

    request_id: str
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: RequestStats | None = None  # set together with `finish`
    sources: tuple[str, ...] = ()  # for the first tokens, which are accepted drafts: the method of each
    drafted: int = 0  # drafts that were verified in this round
    full: bool = False  # whether a whole path of a tree was accepted

    @property
    def fates(self) -> list[Fate]:
        """For each token, what became of the draft there."""
        accepted = len(self.sources)
        whole = self.full or accepted == self.drafted
        own: Fate = "plain" if not self.drafted else "bonus" if whole else "correction"
        return ["accepted" if i < accepted else own for i in range(len(self.tokens))]

    def __reduce__(self) -> tuple[type[Event], tuple[Any, ...]]:
        """Pickles the arguments, which takes a third of the usual time: the events of 32 streams cross a pipe
        in every step.
        """
        first = (self.request_id, self.sample, self.tokens)
        ends = (self.logprobs, self.finish, self.prompt_logprobs, self.stats)
        drafts = (self.sources, self.drafted, self.full)
        plain = ends == (None, None, None, None) and drafts == ((), 0, False)
        return Event, first if plain else (*first, *ends, *drafts)
