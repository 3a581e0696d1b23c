"""Who holds which stream. A sequence has one while it runs; what it computed stays until another needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from speculon.decoding.sequence import Sequence
from speculon.runtimes.llama.model import LlamaModel


@dataclass(slots=True, eq=False)
class Stream:
    """The memory of one sequence in llama.cpp."""

    id: int
    owner: int | None = None  # the id of a sequence
    tokens: list[int] = field(default_factory=list)  # whose keys and values it has
    adapter: str = ""  # under which they were computed
    used: int = 0  # when it was given back, counted


class Beginning(NamedTuple):
    """Where a waiting sequence would find how many of its tokens."""

    stream: Stream
    length: int
    copied: bool  # into another stream, since this one is in use or holds much more


class Streams:
    """As `runtimes.base.Space` says, where a sequence takes a whole stream at once.

    A new sequence gets the free stream whose tokens begin like its own; the rest of these are dropped. Where
    a stream in use has more in common with it, that is copied, if copying takes less time than computing.
    """

    def __init__(self, model: LlamaModel, count: int, prefix_cache: bool):
        self._model, self._prefix_cache = model, prefix_cache
        self.block_size = model.length
        self.streams = [Stream(number) for number in range(count)]
        self.copied_from = model.length  # tokens from which on a copy is faster; measured at load
        self._of: dict[int, Stream] = {}  # by the id of its sequence
        self._clock = itertools.count(1)

    def of(self, seq: Sequence) -> Stream:
        return self._of[seq.id]

    @property
    def free(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.owner is None]

    @property
    def room(self) -> int:
        return len(self.free) * self.block_size

    def most(self, length: int) -> int:
        return self.block_size

    def needed(self, seq: Sequence, end: int | None = None) -> int:
        return 0 if seq.id in self._of else self.block_size

    def cached(self, seq: Sequence) -> int:
        return self._beginning(seq).length if self.free else 0

    def shares(self, seq: Sequence, other: Sequence) -> bool:
        """Whether a copy of what the other is about to compute would be worth the wait."""
        if not self._finds(seq) or seq.request.adapter != other.request.adapter or self._model.recurrent:
            return False
        return common(seq.tokens, other.tokens) >= self.copied_from

    def open(self, seq: Sequence) -> int:
        if not self.free:
            return 0  # it waits on: a stream is needed
        source, length, copied = self._beginning(seq)
        stream = self._oldest() if copied else source
        if copied:
            self._model.copy(source.id, stream.id)
        if not self._model.cut(stream.id, length):
            length = 0
            self._model.cut(stream.id, 0)
        stream.tokens, stream.adapter, stream.owner = seq.tokens[:length], seq.request.adapter, seq.id
        self._of[seq.id] = stream
        return length

    def chunk(self, seq: Sequence, rows: int) -> int:
        most = self._model.max_outputs if seq.wants_prompt_logprobs else rows
        return min(rows, most, seq.pending)

    def close(self, seq: Sequence) -> None:
        if (stream := self._of.pop(seq.id, None)) is None:
            return
        stream.owner, stream.used = None, next(self._clock)
        if not (self._prefix_cache and seq.request.prefix_cache):
            self.cut(stream, 0)

    def cut(self, stream: Stream, length: int) -> None:
        self._model.cut(stream.id, length)
        del stream.tokens[length:]

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        held = {seq.id: seq.tokens[: seq.committed] for seq in running}
        assert {owner: stream.tokens for owner, stream in self._of.items()} == held
        assert {stream.owner for stream in self.streams} - {None} == held.keys()
        for stream in self.streams:
            computed = self._model.lib.llama_memory_seq_pos_max(self._model.memory, stream.id) + 1
            assert computed == len(stream.tokens), (stream.id, computed, len(stream.tokens))

    def _finds(self, seq: Sequence) -> bool:
        return self._prefix_cache and seq.request.prefix_cache and not seq.wants_prompt_logprobs

    def _beginning(self, seq: Sequence) -> Beginning:
        """The longest beginning of a waiting sequence that is worth using, with a free stream for it."""
        oldest = self._oldest()
        best = Beginning(oldest, 0, copied=False)
        if not self._finds(seq):
            return best
        last = len(seq.tokens) - 1
        for stream in self.streams:
            if stream.adapter != seq.request.adapter or len(stream.tokens) <= best.length:
                continue
            length = min(common(stream.tokens, seq.tokens), last)
            length = length if self._can_cut(stream, length) else 0
            # a free stream is taken where that drops little; one of other use is left as it is
            in_place = stream.owner is None and (stream is oldest or 2 * length >= len(stream.tokens))
            can_copy = length >= self.copied_from and not self._model.recurrent and oldest is not stream
            if length > best.length and (in_place or can_copy):
                best = Beginning(stream, length, copied=not in_place)
        return best

    def _can_cut(self, stream: Stream, length: int) -> bool:
        """Whether a stream can go back to its first `length` tokens; a recurrent state cannot go far."""
        return not self._model.recurrent or len(stream.tokens) == length

    def _oldest(self) -> Stream:
        """The free stream to use where nothing is found: an empty one, else the one unused for longest."""
        return min(self.free, key=lambda stream: (bool(stream.tokens), stream.used, stream.id))


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common at their beginning. Slices are compared: both may be long."""
    if a[:16] != b[:16]:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
