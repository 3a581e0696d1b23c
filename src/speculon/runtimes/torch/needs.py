"""What a model and its drafters need in memory: layers in pages, recurrent states, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import dtype


class Padding(NamedTuple):
    """Of a layer's calls of the attention kernel, so that it adds in one order (`loading/invariant.py`)."""

    keys: int  # the number of keys is a multiple of this
    rows: int  # of queries, folded: at least so many, and in the last of the kernel's blocks
    piece: int = 32  # rows of a span in one call, at most
    uneven: tuple[int, ...] = ()  # numbers of keys in the kernel's last block with an order of their own
    start: int = 1  # a multiple of `keys` or 1: the first key's position is a multiple of it, too

    @property
    def alignment(self) -> int:
        """Of the first key's position."""
        return max(self.keys, self.start)

    def with_all_of(self, other: Padding) -> Padding:
        """What both need; the larger of two tuples would be that with the larger `keys` alone."""
        return Padding(
            max(self.keys, other.keys),
            max(self.rows, other.rows),
            min(self.piece, other.piece),
            tuple(sorted({*self.uneven, *other.uneven})),
            max(self.start, other.start),
        )


NO_PADDING = Padding(1, 1)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor that a recurrent mixer keeps of each sequence."""

    shape: tuple[int, ...]
    dtype: dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's claim on the page pool: keys and values, or the taps of each position as one key.

    A layer of kind `other` keeps nothing in pages: it is recurrent, or reads its own rows alone.
    """

    kind: Literal["attention", "taps", "other"]
    heads: int  # key-value heads
    k_dim: int
    v_dim: int
    dtype: dtype
    window: int | None = None
    padding: Padding = NO_PADDING
    chunk: int | None = None  # positions in blocks of so many, each of which sees its own block alone

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize

    @property
    def reach(self) -> int | None:
        """Positions before a row that it may read, or one more; None: all."""
        match self:
            case LayerSpec("other"):
                return 0
            case LayerSpec("taps"):
                return 1  # a drafter pairs the states of a position with the token after it
        if self.chunk is not None:
            return self.chunk
        return None if self.window is None else self.window + self.padding.alignment - 1


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs from the engine: taps of the target's states, layers in the pages, and memory."""

    # the target's layers (-1: the embeddings) whose states are stored in the first of the drafter's layers
    taps: tuple[int, ...] = ()
    layers: tuple[LayerSpec, ...] = ()
    max_context: int | None = None  # tokens; None: no limit
    max_drafts: int | None = None  # per round and sequence; None: no limit
    bytes_fixed: int = 0  # bytes of the weights
    bytes_states: int = 0  # bytes of the recurrent states of all sequences
    states: tuple[tuple[StateSpec, ...], ...] = ()  # the states of each recurrent mixer
    # of a draft model: slots per sequence beyond `runtimes.torch.kv.draft_slots.PER_SEQUENCE`
    spare_states: int = 0
    bytes_snapshot: int = 0  # bytes of one snapshot of these states
    bytes_scratch: int = 0  # bytes of the intermediate results of its largest forward
