"""The door: a request is judged once, by its whole lifetime, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import isnan
from typing import TYPE_CHECKING, Any

from speculon.config import MAX_DRAFTS, SamplingParams
from speculon.core import Draft, ceil_div
from speculon.errors import EmptyPrompt, InvalidParameter, NeverFits, TooLong

if TYPE_CHECKING:
    from speculon.text import Tokenizer


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
        raise InvalidParameter(name, ids, "takes token ids of one text, as a list or a tensor")
    return list(values)


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raises by name what cannot be judged in one round."""
    k = len(draft.tokens)
    if k > MAX_DRAFTS:
        raise InvalidParameter("drafts", k, f"at most {MAX_DRAFTS} in one round")
    wrong = next((token for token in draft.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidParameter("drafts", wrong, f"token ids go from 0 to {vocab_size - 1}")
    if draft.probs is not None and draft.probs.shape != (k, vocab_size):
        raise InvalidParameter("drafts.probs", tuple(draft.probs.shape), f"needs shape ({k}, {vocab_size})")


def refuse_text(params: SamplingParams) -> None:
    """Raises by name what only a tokenizer can read."""
    for name in ("stop", "bad_words", "structured"):
        if asked := getattr(params, name):
            raise InvalidParameter(name, asked, "texts need a tokenizer")


def read_prediction(
    prediction: str | tuple[int, ...] | None, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """The token ids of what the client expects, as the model would write them: without the special tokens of
    a prompt.
    """
    if not isinstance(prediction, str):
        wrong = next((t for t in prediction or () if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise InvalidParameter("prediction", wrong, f"token ids go from 0 to {vocab_size - 1}")
        return prediction or ()
    if tokenizer is None:
        raise InvalidParameter(
            "prediction", prediction, "this is a string, which needs a tokenizer; token ids do not"
        )
    ids = tokenizer.encode(prediction, add_special_tokens=False, name="prediction")
    # the target has no logit for others, so it never writes them
    return tuple(token for token in ids if token < vocab_size)


def max_length(prompt_len: int, max_tokens: int | None, max_context: int) -> int:
    """The most tokens of a sequence, prompt and output; raises `TooLong` beyond the context."""
    if prompt_len > max_context:
        raise TooLong(f"prompt {prompt_len} > context {max_context} tokens")
    if max_tokens is None:
        return max_context
    if prompt_len + max_tokens > max_context:
        raise TooLong(f"prompt {prompt_len} + max_tokens {max_tokens} > context {max_context}")
    return prompt_len + max_tokens


def check_request(
    prompt: list[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_context: int,
    pages: int,
    block_size: int,
    written: Seq[int] = (),
) -> int:
    """Raises by name what cannot be served; returns the most tokens the sequence may hold.

    `written` is output so far.
    """
    if not prompt:
        raise EmptyPrompt("the prompt has no tokens")
    bad = next((t for t in (*prompt, *written) if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise InvalidParameter("prompt", bad, f"token ids go from 0 to {vocab_size - 1}")
    max_len = max_length(len(prompt), params.max_tokens, max_context)
    if len(prompt) + len(written) > max_len:
        raise TooLong(f"prompt {len(prompt)} + {len(written)} written > {max_len} tokens")
    if ceil_div(max_len, block_size) > pages:
        needed = ceil_div(max_len, block_size)
        raise NeverFits(f"{max_len} tokens need {needed} KV pages of {block_size}, the pool owns {pages}")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise InvalidParameter(name, wrong, f"token ids go from 0 to {vocab_size - 1}")
    for token, bias in params.logit_bias.items():
        if isnan(bias):
            raise InvalidParameter("logit_bias", {token: bias}, "must be a number")
    for name, top in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if top is not None and top > vocab_size:
            raise InvalidParameter(name, top, f"the vocabulary has {vocab_size} tokens")
    return max_len
