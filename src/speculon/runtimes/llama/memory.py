"""How many sequences of which length fit: decided before the context is made, from the file's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speculon.checkpoints.gguf.header import GgufHeader
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError
from speculon.core.memory import SHARE_OF_FREE

BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a number in the KV cache
# where max_num_seqs is not set, as llama.cpp's own server has it: each takes its memory at the start
USUAL_STREAMS = 4
MOST_STREAMS = 256  # of llama.cpp
LENGTHS = 256  # llama.cpp rounds the length of a stream up to a multiple of it


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    streams: int
    length: int  # tokens of each
    bytes_per_token: int
    bytes_per_state: int  # of a stream: recurrent states, with those of the latest rows
    weights: int  # bytes
    limit: int  # bytes that the process may take
    why_streams: str
    why_length: str
    measured: int | None = None  # bytes that the process held once everything was loaded

    @property
    def kv(self) -> int:
        return self.streams * padded(self.length) * self.bytes_per_token

    @property
    def states(self) -> int:
        return self.streams * self.bytes_per_state

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.states

    snapshots = 0

    def parts(self) -> dict[str, int]:
        return {"held": self.weights, "pages": self.kv, "states": self.states}

    def to_dict(self) -> dict[str, Any]:
        estimate = {
            "estimate": self.total,
            "limit": self.limit,
            "fits": self.total <= self.limit,
            "action": "use",
        }
        return {**self.parts(), **estimate, "measured": self.measured}


def plan_memory(header: GgufHeader, config: EngineConfig, free: int, rollback: int = 0) -> MemoryPlan:
    """As many streams as fit, with states that can go back by so many rows.

    Raises `ConfigError` where one sequence of the asked length does not fit.
    """
    each, state = bytes_per_token(header, config.kv_cache_type), (1 + rollback) * state_bytes(header)
    weights = sum(tensor.num_bytes for tensor in header.tensors)
    own = header.number("context_length") or LENGTHS
    given = config.kv_memory_gb
    budget = int(max(0, free - weights) * SHARE_OF_FREE) if given is None else int(given * 2**30)
    length, why_length = config.max_context or own, "the model's"
    is_set = "max_num_seqs" in config.model_fields_set
    most = config.max_num_seqs if is_set else min(USUAL_STREAMS, config.max_num_seqs)
    at_once = min(USUAL_STREAMS, most)  # contexts are shortened so far that so many sequences run
    if config.max_context is None and at_once * (padded(length) * each + state) > budget:
        room = max(0, budget // at_once - state) // each
        length = min(own, max(LENGTHS, room // LENGTHS * LENGTHS))
        why_length = (
            f"of the model's {own} tokens, what {at_once} sequences have room for (max_context sets it)"
        )
    one = padded(length) * each + state
    streams = min(most, MOST_STREAMS, budget // one)
    if streams < 1:
        name, value = ("max_context", length) if given is None else ("kv_memory_gb", given)
        needed = f"a sequence of {length} tokens takes {one} bytes, {budget} are for them"
        raise ConfigError(f"{name} = {value}: {needed}")
    why = "set by max_num_seqs" if is_set else "the usual number, which max_num_seqs changes"
    why = why if streams == most else "what llama.cpp and the memory have room for"
    return MemoryPlan(streams, length, each, state, weights, free, why, why_length)


def state_bytes(header: GgufHeader) -> int:
    """Recurrent states of one sequence, as if every layer had them: at least what it takes."""

    def number(name: str) -> int:
        return header.number(name) or 0

    inner, width = number("ssm.inner_size"), number("embedding_length")
    mixed = inner + 2 * number("ssm.group_count") * number("ssm.state_size")
    numbers = number("ssm.state_size") * inner + max(0, number("ssm.conv_kernel") - 1) * mixed
    numbers += max(0, number("shortconv.l_cache") - 1) * width + number("wkv.head_size") * width
    return 4 * number("block_count") * numbers


def padded(length: int) -> int:
    return -(-length // LENGTHS) * LENGTHS


def bytes_per_token(header: GgufHeader, kv_type: str) -> int:
    """Keys and values of one token in all layers; at least 1, for models that have only states."""
    layers = header.number("block_count") or 1
    heads = per_layer(header.of_architecture("attention.head_count"), layers)
    kv_heads = per_layer(header.of_architecture("attention.head_count_kv"), layers) or heads
    width = (header.number("embedding_length") or 0) // max(1, max(heads, default=1))
    k, v = header.number("attention.key_length") or width, header.number("attention.value_length") or width
    if rank := header.number("attention.kv_lora_rank"):  # of latent attention, which keeps one vector
        numbers = layers * (rank + (header.number("rope.dimension_count") or 0))
    else:
        numbers = sum(kv_heads) * (k + v)
    return max(1, int(numbers * BYTES[kv_type]))


def per_layer(value: Any, layers: int) -> list[int]:
    if isinstance(value, int):
        return [value] * layers
    return list(value) if isinstance(value, list) else []
