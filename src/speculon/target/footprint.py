"""Memory of a forward besides the weights: intermediate results, CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from speculon.core.types import LayerSpec
from speculon.decoding.kv.store import gather_bytes

COPIES_OF_LOGITS = 6  # guess: logits, weights, noise and their intermediate results, all fp32
STATES_OF_ROW = 8  # guess: residual, norms, attention input and output that exist at once
# guess: rows of a captured step; 128 are 16 sequences with 7 drafts each
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
GRAPH = 128 << 10  # guess: bytes of a CUDA graph besides its results


def inner_size(config: Any) -> int:
    """The width inside an MLP; the largest where layers differ."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(inner) if isinstance(inner, list | tuple) else inner


def scratch_bytes(config: Any, dtype: torch.dtype, device: torch.device, rows: int, scored: int) -> int:
    """Memory of the intermediate results of one forward of `rows` rows with `scored` of them sampled."""
    states = rows * (STATES_OF_ROW * config.hidden_size + 3 * inner_size(config)) * dtype.itemsize
    logits = scored * config.vocab_size * 4 * COPIES_OF_LOGITS
    return states + logits + 2 * gather_bytes(device)  # the gather buffer may double


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Sizes of a network that is captured as CUDA graphs."""

    hidden: int  # D of all inputs and of the residual
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int = 0  # V of a target; a drafter's logits are not captured
    numbers: int = 2  # integers of a row

    @classmethod
    def of_target(cls, config: Any, layers: tuple[LayerSpec, ...]) -> CaptureSizes:
        heads, spec = config.num_attention_heads, layers[0]
        inner, vocab = inner_size(config), config.vocab_size
        return cls(config.hidden_size, inner, heads, spec.heads, spec.k_dim, len(layers), vocab, 3)

    @classmethod
    def of_drafter(cls, config: Any, layers: int, more: int = 0, numbers: int = 2) -> CaptureSizes:
        """`more` is the width of what buffers hold besides a state, in states; `numbers` are the integers."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden = (1 + more) * config.hidden_size
        return cls(hidden, config.intermediate_size, heads, kv_heads, config.head_dim, layers, 0, numbers)

    def static_bytes(self, dtype: torch.dtype) -> int:
        """Ids, positions and other integers, states, logits, rotary tables, heads, attention outputs."""
        row = self.hidden + self.vocab + 2 * (1 + self.heads + self.kv_heads) * self.head_dim
        return BUCKETS[-1] * (self.numbers * torch.long.itemsize + row * dtype.itemsize)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The buffers, the shared intermediate results of the largest piece, and the graphs."""
        shared = STATES_OF_ROW * self.hidden + 3 * self.inner
        if self.vocab:
            shared = max(shared, self.hidden + self.vocab)
        graphs = len(BUCKETS) * (self.layers + (2 if self.vocab else 1))
        return self.static_bytes(dtype) + BUCKETS[-1] * shared * dtype.itemsize + graphs * GRAPH
