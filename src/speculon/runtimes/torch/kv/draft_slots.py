"""Who owns which slot of a recurrent draft model's states. Integers only: `kv.states` has the bytes.

Between steps a sequence holds one slot, whose state has seen as many of its tokens as `Pages.drafted` says.
Within a step the draft model reads on from there. The states after its calls are kept while there are slots,
and at the end of the step the sequence goes on from the last one that has seen committed tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculon.decoding.sequence import Sequence

# The state from before the step, that after all tokens of the sequence, and that after the last draft.
PER_SEQUENCE = 3


def spare_slots(sequences: int, drafts: int, slot_bytes: int, most_bytes: int) -> int:
    """Slots beyond those, for states after each of `drafts` drafts but the last, of at most `most_bytes`."""
    return min(sequences * max(0, drafts + 1 - PER_SEQUENCE), most_bytes // max(1, slot_bytes))


@dataclass(slots=True)
class Chain:
    """The states of one sequence, each of which has seen some of the tokens of the last one."""

    start: int = 0  # tokens that the state from before the step has seen
    ids: list[int] = field(default_factory=list)  # that were read since
    slots: dict[int, int] = field(default_factory=dict)  # tokens seen -> slot, in rising order
    written: int | None = None  # the slot that a call writes now

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def held(self) -> list[int]:
        return [*self.slots.values(), *(() if self.written is None else (self.written,))]


class DraftSlots:
    """Slots for the states of one method, for `sequences` sequences and `spare` states more within a step."""

    def __init__(self, method: str, sequences: int, spare: int = 0):
        self.method, self.count = method, PER_SEQUENCE * sequences + spare
        self.free, self.spare = list(range(self.count)), spare
        self.chains: dict[int, Chain] = {}  # by sequence id

    def begin(self, seq: Sequence, start: int, end: int) -> tuple[int, int]:
        """The slots that a call over positions from `start` to `end` reads and writes; one may be both.

        The last state must have seen exactly `start` tokens. Without any there is nothing to read.
        """
        chain = self.chains.setdefault(seq.id, Chain())
        assert chain.written is None and start == chain.end, (seq.id, start, chain)
        assert start in chain.slots or not start, (seq.id, start, chain)
        read = chain.slots.get(start)
        if self._overwrites(chain, end, len(seq.tokens)):
            chain.written = chain.slots.pop(start)
        else:
            self.spare -= len(chain.slots) >= PER_SEQUENCE
            chain.written = self.free.pop()
        return chain.written if read is None else read, chain.written

    def _overwrites(self, chain: Chain, end: int, tokens: int) -> bool:
        """Whether a call writes over the state that it reads: no step ends between its pieces of `tokens`,
        and among drafts the slots may be too few.
        """
        if chain.end == chain.start:
            return False
        few = len(chain.slots) >= PER_SEQUENCE and not self.spare
        return end <= tokens or (few and chain.end > tokens)

    def done(self, seq: Sequence, ids: list[int]) -> None:
        """The call that has begun last has read these tokens."""
        chain = self.chains[seq.id]
        assert chain.written is not None
        chain.ids += ids
        chain.slots[chain.end], chain.written = chain.written, None

    def roll_back(self, seq: Sequence, committed: int) -> int:
        """At the end of a step: keeps the state after the most committed tokens; returns how many these are.

        A state that has seen another token than the sequence has, whoever drafted that, is not kept.
        """
        chain = self.chains.get(seq.id)
        if chain is None:
            return 0
        if chain.written is None and not chain.ids:
            return chain.start
        pairs = zip(chain.ids, seq.tokens[chain.start : committed], strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), committed - chain.start)
        seen = max((tokens for tokens in chain.slots if tokens <= chain.start + same), default=0)
        slot = chain.slots.pop(seen, None)
        self._give_back(chain, holds_one=slot is not None)
        if slot is None:
            del self.chains[seq.id]
        else:
            self.chains[seq.id] = Chain(seen, slots={seen: slot})
        return seen

    def release(self, seq: Sequence) -> None:
        """Takes its slots from a sequence; one without is left alone."""
        if chain := self.chains.pop(seq.id, None):
            self._give_back(chain)

    def _give_back(self, chain: Chain, holds_one: bool = False) -> None:
        self.spare += max(0, len(chain.held) + holds_one - PER_SEQUENCE)
        self.free += chain.held

    def check_integrity(self, drafted: Mapping[int, int]) -> None:
        """Raises AssertionError unless every slot is free, or the one of a live sequence between steps:
        `drafted` has how many tokens of each the method has read.
        """
        held = [slot for chain in self.chains.values() for slot in chain.held]
        assert sorted([*self.free, *held]) == list(range(self.count)), "a slot of a draft's states leaked"
        assert len(self.free) == self.count - len(self.chains), "a sequence holds more than one state"
        for number, chain in self.chains.items():
            assert number in drafted, f"sequence {number} has ended and holds states of {self.method}"
            seen = drafted[number]
            assert list(chain.slots) == [seen], f"sequence {number}: state at {list(chain.slots)}, not {seen}"
