"""A request's own logits processor: one call, and what it may return."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import Tensor

from speculon.core.config import LogitsProcessor
from speculon.core.errors import LogitsProcessorError, shorten


def call_processor(processor: LogitsProcessor | None, tokens: list[int], logits: Tensor) -> Tensor:
    """What a processor makes of the logits [V] after `tokens`; it gets copies of both, and may change them.

    Raises `LogitsProcessorError` where it raises an error, or returns anything but logits [V] of the same
    dtype with a finite number, and none that is NaN or +inf.
    """
    assert processor is not None
    try:
        returned: Tensor = processor(tokens, logits.clone())  # if it keeps to its type
        why = refusal(returned, logits)
    except Exception as error:
        text = f"the logits processor failed at token {len(tokens)}: {type(error).__name__}: {error}"
        raise LogitsProcessorError(text) from error
    if why:
        raise LogitsProcessorError(f"the logits processor returned {why}, at token {len(tokens)}")
    return returned


def refusal(returned: Any, logits: Tensor) -> str | None:
    """What is wrong with a returned row; None where nothing is."""
    needed = f"a {logits.dtype} tensor of shape {tuple(logits.shape)}"
    if not isinstance(returned, Tensor):
        return f"{shorten(returned)} instead of {needed}"
    if (returned.dtype, returned.shape) != (logits.dtype, logits.shape):
        return f"a {returned.dtype} tensor of shape {tuple(returned.shape)} instead of {needed}"
    largest = returned.amax().item()  # NaN where the row has one
    return None if isfinite(largest) else f"{largest} as largest number, which must be finite"
