"""Small things that many tests build. No torch."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from speculon.config import SamplingParams
from speculon.core import Sequence
from speculon.telemetry import RequestStats

_ids = count()


def make_sequence(
    tokens: list[int], max_tokens: int = 100, output: list[int] | None = None, **fields: Any
) -> Sequence:
    """A sequence with prompt `tokens` that has already written `output`."""
    params = fields.pop("params", None) or SamplingParams(temperature=0, max_tokens=max_tokens)
    number = next(_ids)
    defaults: dict[str, Any] = {
        "id": number,
        "request_id": f"t-{number}",
        "seed": 0,
        "rules": cast(Any, None),
        "ending": cast(Any, SimpleNamespace(stop_ids=frozenset(), min_tokens=0, find_stop=None)),
        "stats": RequestStats(),
        "method": "ngram",
        "k": 4,
    }
    merged = defaults | fields
    merged.setdefault("methods", tuple(name for name in (*merged.get("given", ()), merged["method"]) if name))
    return Sequence(
        tokens=[*tokens, *(output or ())],
        prompt_len=len(tokens),
        params=params,
        max_len=len(tokens) + max_tokens,
        **merged,
    )
