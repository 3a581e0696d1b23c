"""Rotary positions as a GGUF file describes them, as the `rope_parameters` of a transformers config."""

from __future__ import annotations

import math
from typing import Any

from speculon.checkpoints.gguf.header import FACTORS, LONG_FACTORS, SHORT_FACTORS
from speculon.checkpoints.gguf.metadata import Metadata, refusal
from speculon.core.errors import CorruptWeights

BASE = 10000.0
# Llama 3.1 to 3.3; a file has the resulting factors, but not these numbers
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TOLERANCE = 1e-3  # relative, of a factor


def rotary(values: Metadata, *scalings: str) -> dict[str, Any]:
    """Positions of all dimensions of a head, scaled in one of these ways or not at all."""
    base, kind = values.real("rope.freq_base", BASE), values.text("rope.scaling.type", "linear")
    factor = values.real("rope.scaling.factor", values.real("rope.scale_linear", 0.0, zero=True), zero=True)
    values.only("rope.scaling.attn_factor", 1.0)
    values.ignore("rope.scaling.finetuned", "rope.scaling.original_context_length")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return parameters
    if kind not in scalings or not factor:
        what = f"{kind!r} RoPE scaling (factor {factor:g})"
        raise refusal(values.header, f"{what} is not supported for {values.header.architecture}")
    return parameters | {"rope_type": kind, "factor": factor} | (yarn(values) if kind == "yarn" else {})


def yarn(values: Metadata) -> dict[str, Any]:
    """What YaRN has more. Its attention factor is the whole one, as in the config that was converted."""
    values.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    own = values.real("rope.scaling.yarn_attn_factor", 0.0, zero=True)
    return {
        "original_max_position_embeddings": values.whole(
            "rope.scaling.original_context_length", values.whole("context_length")
        ),
        "beta_fast": values.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": values.real("rope.scaling.yarn_beta_slow", 1.0),
        **({"attention_factor": own} if own else {}),
    }


def llama3(values: Metadata, parameters: dict[str, Any], dims: int) -> dict[str, Any]:
    """The scaling of Llama 3, whose factors are a tensor. Raises `UnsupportedModel` for other factors."""
    factors = factors_of(values, FACTORS, dims)
    if all(abs(factor - 1) < TOLERANCE for factor in factors):
        return parameters
    largest = max(factors)
    expected = llama3_factors(dims // 2, parameters["rope_theta"], largest)
    if any(abs(read - other) > TOLERANCE * other for read, other in zip(factors, expected, strict=True)):
        raise refusal(values.header, "the factors of its rotary positions are not those of Llama 3")
    if parameters["rope_type"] != "default":
        raise refusal(values.header, f"it scales its rotary positions twice ({FACTORS})")
    return parameters | {"rope_type": "llama3", "factor": largest, **LLAMA3}


def llama3_factors(number: int, base: float, factor: float) -> list[float]:
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = [
        LLAMA3["original_max_position_embeddings"] / (2 * math.pi * base ** (i / number))
        for i in range(number)
    ]
    smooth = [min(1.0, max(0.0, (turn - low) / (high - low))) for turn in turns]
    return [1 / ((1 - turn) / factor + turn) for turn in smooth]


def rotated_share(values: Metadata, head_dim: int) -> float:
    """The share of a head's dimensions that is rotated: the first ones."""
    dims = values.whole("rope.dimension_count", head_dim)
    share = dims / head_dim
    if dims > head_dim or dims % 2 or int(share * head_dim) != dims:
        raise refusal(values.header, f"{dims} rotary dimensions of {head_dim} are not supported")
    return share


def longrope(values: Metadata, head_dim: int) -> dict[str, Any]:
    """Positions of the first dimensions of a head, with factors for long contexts where the file has them."""
    share = rotated_share(values, head_dim)
    dims = int(share * head_dim)
    long, short = (factors_of(values, name, dims) for name in (LONG_FACTORS, SHORT_FACTORS))
    if not long and not short:
        return rotary(values) | {"partial_rotary_factor": share}
    if not (long and short):
        raise refusal(values.header, f"it has {LONG_FACTORS} or {SHORT_FACTORS} without the other")
    values.only("rope.scaling.type", "longrope")
    values.only("rope.scaling.factor", 1.0)
    values.ignore("rope.scaling.finetuned")
    return {
        "rope_type": "longrope",
        "rope_theta": values.real("rope.freq_base", BASE),
        "partial_rotary_factor": share,
        "long_factor": long,
        "short_factor": short,
        "attention_factor": values.real("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": values.whole(
            "rope.scaling.original_context_length", values.whole("context_length")
        ),
    }


def factors_of(values: Metadata, name: str, dims: int) -> list[float]:
    """Factors of the wavelengths of so many dimensions, or none."""
    factors = values.header.factors(name)
    if factors and len(factors) != dims // 2:
        where = f"{values.header.path}: {name}"
        raise CorruptWeights(f"{where}: {len(factors)} factors for {dims} rotary dimensions")
    return factors
