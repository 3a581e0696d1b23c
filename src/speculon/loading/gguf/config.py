"""Where transformers' reading of a GGUF file is incomplete: scaled rotary positions, and end tokens."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import gguf
import transformers.modeling_gguf_pytorch_utils as reader
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from speculon.core.errors import UnsupportedModel
from speculon.decoding.text.tokenizer import ends_of_turn
from speculon.loading.gguf.header import FACTORS, GgufHeader, read_gguf
from speculon.loading.headers import Checkpoint

TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
TEMPLATE = "tokenizer.chat_template"
CONTROL = 3  # the type of tokens that no text has
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3.1 to 3.3; a file has the resulting factors, but not these numbers
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TOLERANCE = 1e-3  # relative, of a factor

reader.tqdm = lambda *args, **kwargs: args[0]  # transformers' switch of progress bars does not reach this one
# transformers asks for the same map at each module of a model: 3 s for 30 layers
gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)


def parsed(value: Any, types: Any, parse: Callable[[Any, Any], Any] = reader._gguf_parse_value) -> Any:
    """A value of a header. Transformers takes a second for 100,000 of an array, of which it has a million."""
    if isinstance(value, memoryview):
        return str(value, "utf-8")
    return value.item() if len(types) > 1 else parse(value, types)


reader._gguf_parse_value = parsed


def refuse_unread(checkpoint: Checkpoint) -> None:
    """Raises `UnsupportedModel` for an architecture that transformers' GGUF reader lacks."""
    header = read_gguf(checkpoint.path)
    known = {spelt(name) for name in (*reader.GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS)}
    if spelt(header.architecture) not in known:
        lacks = f"transformers' GGUF reader lacks the architecture {header.architecture!r}"
        raise UnsupportedModel(f"{checkpoint.path}: {lacks}; take its safetensors files")


def spelt(architecture: str) -> str:
    return architecture.replace("-", "").replace("_", "")


def complete_config(checkpoint: Checkpoint, config: PreTrainedConfig) -> None:
    """Sets the scaling of rotary positions. Raises `UnsupportedModel` where it is not known here."""
    header = read_gguf(checkpoint.path)
    if header.architecture in GGUF_CONFIG_ARCHS:
        return
    if names := [tensor.name for tensor in header.tensors if tensor.name in LONG_FACTORS]:
        raise UnsupportedModel(f"{checkpoint.path}: scaled rotary positions ({names[0]}) are not supported")
    if scaling := named_scaling(header) or llama3_scaling(header):
        parameters: Any = getattr(config, "rope_parameters", None)
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            what = f"{scaling['rope_type']} RoPE of {header.architecture}"
            raise UnsupportedModel(f"{checkpoint.path}: {what} is not supported in GGUF files")
        config.rope_parameters = {**parameters, **scaling}


def named_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """The scaling that the metadata names. Raises `UnsupportedModel` for one that is not known here."""
    named = header.of_architecture("rope.scaling.type")
    if named in (None, "none"):
        return None
    scaling = {"rope_type": named, "factor": header.of_architecture("rope.scaling.factor")}
    if named == "yarn":
        original = header.of_architecture("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    if named not in ("linear", "yarn") or None in scaling.values():
        raise UnsupportedModel(f"{header.path}: {named!r} RoPE scaling is not supported in GGUF files")
    return scaling


def llama3_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """The scaling of Llama 3, whose factors are a tensor. Raises `UnsupportedModel` for other factors."""
    factors = rotary_factors(header)
    if all(abs(factor - 1) < TOLERANCE for factor in factors):
        return None
    base = header.of_architecture("rope.freq_base") or 10000.0
    largest = max(factors)
    expected = llama3_factors(len(factors), base, largest)
    if any(abs(read - other) > TOLERANCE * other for read, other in zip(factors, expected, strict=True)):
        raise UnsupportedModel(f"{header.path}: the factors of its rotary positions are not those of Llama 3")
    return {"rope_type": "llama3", "factor": largest, **LLAMA3}


def rotary_factors(header: GgufHeader) -> Sequence[float]:
    """Factors of the wavelengths; none where the file has no such tensor."""
    factors = next((tensor for tensor in header.tensors if tensor.name == FACTORS), None)
    if factors is None:
        return ()
    if factors.type != "F32":
        raise UnsupportedModel(f"{header.path}: {FACTORS} of type {factors.type} is not supported")
    with header.path.open("rb") as file:
        file.seek(header.begin + factors.begin)
        return struct.unpack(f"<{factors.size}f", file.read(factors.num_bytes))


def llama3_factors(number: int, base: float, factor: float) -> list[float]:
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = [
        LLAMA3["original_max_position_embeddings"] / (2 * math.pi * base ** (i / number))
        for i in range(number)
    ]
    smooth = [min(1.0, max(0.0, (turn - low) / (high - low))) for turn in turns]
    return [1 / ((1 - turn) / factor + turn) for turn in smooth]


def complete_model(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Sets the tokens that end a sequence: those of the metadata, and those that end a turn of the template.

    Many files name only the token that ends a document.
    """
    header = read_gguf(checkpoint.path, lists=frozenset({TOKENS}))
    tokens, types = header.metadata.get(TOKENS), header.metadata.get(TOKEN_TYPES)
    ids = set(header.end_ids)
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        controls = {token: i for i, (token, of) in pairs if of == CONTROL}
        ids |= ends_of_turn(controls.get, str(header.metadata.get(TEMPLATE, "")))
    generation: Any = model.generation_config
    if ids and generation is not None:
        generation.eos_token_id = sorted(ids)
