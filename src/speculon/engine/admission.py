"""A request is judged once, by its whole lifetime, and resolved into what the engine needs of it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Any

from speculon.core.config import (
    GIVEN_DRAFTS,
    MAX_DRAFTS,
    RequestSpeculation,
    SamplingParams,
    SpeculationConfig,
)
from speculon.core.errors import (
    EmptyPrompt,
    EngineError,
    InvalidParameter,
    NeverFits,
    SpeculonError,
    TooLong,
    UnknownMethod,
    UnknownModel,
    shorten,
)
from speculon.core.images import NO_IMAGES, ImageInput
from speculon.core.telemetry import RequestStats
from speculon.core.types import Draft, PromptShape, Reason, acceptance_rule
from speculon.decoding.sequence import Ending, Request, Rules, Sequence
from speculon.decoding.text.stop_strings import StopStrings
from speculon.decoding.text.thinking import AnswerStart
from speculon.decoding.text.tokenizer import NO_TOKENIZER, Tokenizer, output_context
from speculon.speculation.control.gates import classify_prompt
from speculon.speculation.proposers.registry import OFF

if TYPE_CHECKING:
    from speculon.decoding.text.grammar import Grammars, Matcher
    from speculon.runtimes.base import Facts, Runtime, Space
    from speculon.speculation.proposers.compose import Proposers

CONTEXT = "limits.max_context"  # in the capability table
OF_VOCABULARY = ("logprobs", "prompt_logprobs")  # numbers of tokens
NEED_TOKENIZER = ("stop", "bad_words", "structured", "thinking")
SHAPE_TOKENS = 512  # of a prompt's end that are read for its class


class Admission:
    """Admits requests to one engine, or refuses them by name."""

    from_request = ("grammar", "prediction")  # methods that draft from what comes with a request

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Proposers,
        grammars: Grammars,
        tokenizer: Tokenizer | None,
        runtime: Runtime,
    ):
        self._config, self._proposers = config, proposers
        self._grammars, self._tokenizer, self._runtime = grammars, tokenizer, runtime
        self._ids = itertools.count()

    def admit(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation | Mapping[str, Any] | None = None,
        written: Seq[int] = (),
        prefix_cache: bool = True,
        images: Seq[ImageInput] = (),
        adapter: str = "",
    ) -> list[Sequence]:
        """The n sequences of a request, checked but not queued; `written` is the output they begin with."""
        check_adapter(adapter, self._runtime.facts.adapters)
        max_len = self._check(prompt, params, written)
        speculation = as_speculation(speculation)
        config = speculation.defaults or self._config
        own = self._own_method(speculation, config)  # refused first: a grammar may take seconds to compile
        prediction = read_prediction(speculation.prediction, self._tokenizer, self._runtime.facts.vocab_size)
        grammar = self._grammars.matcher(params, written)
        sources = dict(zip(self.from_request, (grammar, prediction), strict=True))
        max_drafts, from_request, off = self._methods(speculation, own, sources)
        rules, ending = self._sampling(params, prompt)
        chained, depth = speculation.chained_drafts, speculation.draft_depth
        request = Request(
            id=request_id,
            prompt_len=len(prompt),
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(64),
            max_len=max_len,
            rules=rules,
            ending=ending,
            max_drafts=max_drafts,
            max_context=self._proposers.max_context(max_drafts),
            lookups=self._proposers.lookups(tuple(max_drafts)),
            from_request=from_request,
            off=off,
            policy=speculation.policy or config.policy,
            chained=config.chained_drafts if chained is None else chained,
            branching=self._proposers.branching(max_drafts),
            depth=config.draft_depth if depth is None else depth,
            acceptance=acceptance_rule(speculation.acceptance or config.acceptance, params),
            shape=self._shape(prompt, params, off),
            prediction=prediction,
            pool=speculation.pool,
            tenant=speculation.tenant,
            prefix_cache=prefix_cache,
            images=self._runtime.read_images(prompt, images) if images else NO_IMAGES,
            adapter=adapter,
        )
        return self._samples(request, [*prompt, *written], grammar)

    def _samples(self, request: Request, tokens: list[int], grammar: Matcher | None) -> list[Sequence]:
        ids = self._ids
        return [
            Sequence(next(ids), request, list(tokens), RequestStats(), n, grammar=grammar and grammar.fork())
            for n in range(request.params.n)
        ]

    def _check(self, prompt: list[int], params: SamplingParams, written: Seq[int]) -> int:
        """The most tokens of its sequences. Raises by name for what cannot be served."""
        max_len = check_request(prompt, params, self._runtime.facts, self._runtime.space, written)
        self._check_tokenizer(params)
        return max_len

    def _check_tokenizer(self, params: SamplingParams) -> None:
        for name in NEED_TOKENIZER if self._tokenizer is None else ():
            if value := getattr(params, name):
                raise InvalidParameter(name, value, NO_TOKENIZER).about(f"parameters.{name}")

    def _methods(
        self,
        speculation: RequestSpeculation,
        own: tuple[str | None, int, Reason | None],
        sources: Mapping[str, object],
    ) -> tuple[dict[str, int], tuple[str, ...], Reason | None]:
        """(method -> most drafts, those that draft from what came along, why its own method is off)."""
        name, k, off = own
        first: tuple[str, ...] = ()
        if off not in (Reason.OFF_REQUEST, Reason.OFF_CONFIG):
            first = tuple(m for m, value in sources.items() if value and not self._proposers.lacking(m))
        first_k = speculation.num_speculative_tokens or GIVEN_DRAFTS
        methods = self._proposers.methods_of(first, name)
        ks = {method: first_k if method in first else k for method in methods}
        return {m: self._proposers.max_drafts(m, k) for m, k in ks.items()}, first, off

    def _own_method(
        self, speculation: RequestSpeculation, config: SpeculationConfig
    ) -> tuple[str | None, int, Reason | None]:
        """(method, K, why none): what a request asks for, else what the engine is set to."""
        name = config.method if speculation.method is None else speculation.method
        k = speculation.num_speculative_tokens
        by_request = (speculation.method if name == OFF else k) is not None
        k = config.most(speculation.policy) if k is None else k
        if name != OFF and k:
            lacking = self._lacking(name)
            return (None, 0, lacking) if lacking else (name, k, None)
        return None, 0, Reason.OFF_REQUEST if by_request else Reason.OFF_CONFIG

    def _lacking(self, name: str) -> Reason | None:
        """Why nothing drafts under this name. Raises `EngineError` for a plug-in that cannot be made."""
        try:
            return self._proposers.lacking(name)
        except UnknownMethod:
            raise
        except SpeculonError as error:
            error.about(f"methods.{name}")
            raise
        except Exception as error:
            fault = EngineError(f"method {name} could not be started: its code raised {type(error).__name__}")
            raise fault.about(f"methods.{name}") from error

    def _sampling(self, params: SamplingParams, prompt: list[int]) -> tuple[Rules, Ending]:
        text = self._tokenizer
        facts = self._runtime.facts
        known = range(facts.vocab_size)  # checkpoint and tokenizer may have ids for which there is no logit
        bad_words = None
        if text is not None and params.bad_words:
            bad_words = text.bad_words(params.bad_words, params.skip_special_tokens)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else facts.eos_ids)}
        stop_ids = frozenset(token for token in stops if token in known)
        find_stop = answer_start = None
        if text is not None and params.stop:
            strings = StopStrings(params.stop, text, output_context(text, params, prompt))
            find_stop = partial(strings.find, skip_special_tokens=params.skip_special_tokens)
            answer_start = partial(AnswerStart, params.thinking, text) if params.thinking else None
        rules = Rules.of(params, bad_words, tuple(sorted(stop_ids)))
        return rules, Ending(stop_ids, params.min_tokens, find_stop, answer_start)

    def _shape(self, prompt: list[int], params: SamplingParams, off: Reason | None) -> PromptShape:
        text = "" if self._tokenizer is None or off else self._tokenizer.decode(prompt[-SHAPE_TOKENS:])
        return classify_prompt(params.greedy, text)


def as_speculation(given: RequestSpeculation | Mapping[str, Any] | None) -> RequestSpeculation:
    return given if isinstance(given, RequestSpeculation) else RequestSpeculation(**(given or {}))


def check_adapter(name: str, known: Collection[str]) -> None:
    """Raises `UnknownModel`, with the adapters that are known; the empty name is the target itself."""
    if name and name not in known:
        names = f"the adapters {', '.join(map(repr, known))}" if known else "no adapters"
        raise UnknownModel(f"adapter = {shorten(name)}: this model has {names}").about("adapters")


def read_ids(name: str, ids: Any) -> list[int]:
    """Token ids of one text from a list, or from a tensor or array of shape [n] or [1, n]."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if (
        isinstance(values, str)
        or not isinstance(values, Seq)
        or not all(isinstance(token, int) for token in values)
    ):
        raise InvalidParameter(name, ids, "must be the token ids of one text, as a list or a tensor")
    return list(values)


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raises by name what cannot be judged in one round."""
    k = len(draft.tokens)
    if k > MAX_DRAFTS:
        raise InvalidParameter("drafts", k, f"a round may have at most {MAX_DRAFTS}")
    if draft.parents is not None:
        raise InvalidParameter(
            "drafts.parents", draft.parents, "must be None: drafts that a caller gives are chains, not trees"
        )
    check_ids("drafts", draft.tokens, vocab_size)
    if draft.probs is not None and draft.probs.shape != (k, vocab_size):
        raise InvalidParameter(
            "drafts.probs", tuple(draft.probs.shape), f"must have shape ({k}, {vocab_size})"
        )


def check_room(seq: Sequence, k: int) -> None:
    """Raises where `k` drafts and the token after them do not fit."""
    if k > max(0, seq.tokens_left - 1):
        raise TooLong(
            f"{len(seq.tokens)} tokens + {k} drafts + 1 > {seq.request.max_len} tokens, the most of this text"
        )


def read_prediction(
    prediction: str | tuple[int, ...] | None, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """The token ids of what the client expects, without the special tokens of a prompt."""
    if not isinstance(prediction, str):
        check_ids("prediction", prediction or (), vocab_size)
        return prediction or ()
    if tokenizer is None:
        limit = "a string needs a tokenizer, and this model was loaded without one: give token ids"
        raise InvalidParameter("prediction", prediction, limit).about("parameters.prediction.text")
    ids = tokenizer.encode(prediction, add_special_tokens=False, name="prediction")
    # the target has no logit for others, so it never writes them
    return tuple(token for token in ids if token < vocab_size)


def max_length(prompt_len: int, max_tokens: int | None, max_context: int) -> int:
    """The most tokens of a sequence, prompt and output; raises `TooLong` beyond the context."""
    if prompt_len > max_context:
        raise TooLong(f"prompt {prompt_len} > context {max_context} tokens: shorten the prompt").about(
            CONTEXT
        )
    if max_tokens is None:
        return max_context
    if prompt_len + max_tokens > max_context:
        message = (
            f"prompt {prompt_len} + max_tokens {max_tokens} > context {max_context}: shorten the prompt, or "
            "lower max_tokens"
        )
        raise TooLong(message).about(CONTEXT)
    return prompt_len + max_tokens


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises for the first id for which there is no logit."""
    for token in ids:
        if not 0 <= token < vocab_size:
            limit = f"token ids must be from 0 to {vocab_size - 1}"
            raise InvalidParameter(name, token, limit).about("limits.vocab_size")


def check_request(
    prompt: list[int], params: SamplingParams, facts: Facts, space: Space, written: Seq[int] = ()
) -> int:
    """Raises by name what cannot be served; returns the most tokens the sequence may hold.

    `written` is output so far.
    """
    if not prompt:
        raise EmptyPrompt("the prompt has no tokens")
    vocab_size, size = facts.vocab_size, space.block_size
    check_ids("prompt", (*prompt, *written), vocab_size)
    max_len = max_length(len(prompt), params.max_tokens, facts.max_context)
    if len(prompt) + len(written) > max_len:
        raise TooLong(f"prompt {len(prompt)} + {len(written)} written > {max_len} tokens").about(CONTEXT)
    if (needed := space.most(max_len)) > facts.capacity:
        pages = f"{needed // size} KV pages of {size} tokens, but the pool has {facts.capacity // size}"
        raise NeverFits(f"{max_len} tokens need {pages}: lower max_tokens, or raise num_blocks").about(
            "limits.pool"
        )
    check_ids("logit_bias", params.logit_bias, vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for token, bias in params.logit_bias.items():
        if isnan(bias):
            raise InvalidParameter("logit_bias", {token: bias}, "must be a number")
    for name in OF_VOCABULARY:
        top = getattr(params, name)
        if top is not None and top > vocab_size:
            limit = f"the vocabulary has {vocab_size} tokens"
            raise InvalidParameter(name, top, limit).about(f"parameters.{name}")
    return max_len
