"""A request, its sequences, and the events that tell of them. No torch here."""

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
    """One sample of a request. Between steps its runtime has computed `tokens[:committed]`."""

    id: int
    request: Request
    tokens: list[int]  # prompt, then output
    stats: RequestStats
    sample: int = 0  # which of the request's n samples
    failed: bool = False  # whether a proposer raised an error for it: it goes on plainly
    grammar: Matcher | None = None  # has consumed the output so far, always
    answer: AnswerStart | None = None  # by its request's ending, once it was needed
    committed: int = 0
    prompt_scored: int = 0  # prompt positions whose log-probabilities have been given out
    counts: TokenCounts | None = None  # of its tokens, where the request has penalties
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
        """Tokens that are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.committed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    @property
    def tokens_left(self) -> int:
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

    def advance(self, end: int, tokens: Seq[int], scored: int) -> None:
        """A round is committed: the runtime has computed `end` tokens, `tokens` are new, and the
        log-probabilities of the first `scored` positions of the prompt are out.
        """
        self.committed = end
        self.tokens.extend(tokens)
        self.prompt_scored = max(self.prompt_scored, min(scored, self.request.prompt_len - 1))
        if self.grammar is not None:
            self.grammar.consume(tuple(tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Of the samples of a request only the first has them."""
        return self.sample == 0 and self.request.params.prompt_logprobs is not None


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
