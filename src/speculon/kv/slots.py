"""Who owns which slot of recurrent states. Integers only: the bytes live in `kv.states`.

A sequence holds two slots: one has the state after its committed tokens, the other takes the state after the
span of the step. A commit exchanges them, so a step that is not committed changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speculon.sequence import Sequence

PER_SEQUENCE = 2


@dataclass(slots=True)
class Held:
    """The slots of one sequence."""

    committed: int
    next: int
    position: int = 0  # tokens that the committed state has seen


class StateSlots:
    """Slots for `sequences` sequences at a time; with 0 no sequence holds any."""

    def __init__(self, sequences: int = 0):
        self.count = PER_SEQUENCE * sequences
        self._free = list(range(self.count))
        self._held: dict[int, Held] = {}

    def claim(self, seq: Sequence) -> None:
        """Gives a sequence its slots, if it has none. At most `max_num_seqs` run, so there are enough."""
        if self.count and seq.id not in self._held:
            assert seq.committed == 0, f"sequence {seq.id}: {seq.committed} tokens, and no state"
            self._held[seq.id] = Held(self._free.pop(), self._free.pop())

    def of(self, seq: Sequence) -> Held:
        """Its slots. The state must have seen exactly the committed tokens."""
        held = self._held[seq.id]
        assert held.position == seq.committed, (seq.id, held.position, seq.committed)
        return held

    def commit(self, seq: Sequence, position: int) -> None:
        """The state that this step has written, after `position` tokens, becomes the committed one."""
        held = self._held[seq.id]
        held.committed, held.next, held.position = held.next, held.committed, position

    def release(self, seq: Sequence) -> None:
        """Takes its slots from a sequence; one without is left alone."""
        if held := self._held.pop(seq.id, None):
            self._free += (held.committed, held.next)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every slot is free, or held once by a live sequence."""
        positions = {seq.id: seq.committed for seq in live}
        slots = [*self._free, *(slot for held in self._held.values() for slot in (held.committed, held.next))]
        assert sorted(slots) == list(range(self.count)), "a slot of states leaked"
        for number, held in self._held.items():
            assert number in positions, f"sequence {number} has ended and holds states"
            assert held.position == positions[number], f"sequence {number}: state at {held.position}"
