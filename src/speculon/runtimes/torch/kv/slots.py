"""Who owns which slot of recurrent states. Integers only: the bytes live in `runtimes.torch.kv.states`.

A sequence holds two slots: one has the state after its committed tokens, the other takes the state after the
span of the step. A commit exchanges them, so a step that is not committed changes nothing.

A snapshot is a slot with the state at the end of an indexed page, from which a later sequence goes on. It is
no copy: sequences and snapshots may hold the same slot, which is then read and never written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from speculon.decoding.sequence import Sequence

PER_SEQUENCE = 2
FEWEST = 4  # guess: pages for whose states a span is cut; fewer save less than the cut costs
ALONE = 8  # measured, 3 to 8.4 (031): a row on its own takes as long as so many rows of a long chunk


@dataclass(slots=True)
class Held:
    """The slots of one sequence."""

    committed: int
    next: int
    position: int = 0  # tokens that the committed state has seen
    expected: tuple[int, ...] = ()  # positions from which others are expected to go on, in rising order
    cut: tuple[int, int] | None = None  # (position, slot) of the state that this step keeps inside its span
    latest: tuple[int, int] | None = None  # (position, page) of its latest snapshot at another position


class StateSlots:
    """Slots for `sequences` sequences at a time, and for `snapshots`; with 0 sequences none holds any.

    The model takes up to `chunk` first rows of a sequence in one call, and up to `by_row` later ones in one
    call each.
    """

    def __init__(self, sequences: int = 0, snapshots: int = 0, chunk: int = 0, by_row: int = 0):
        self.count, self.snapshots = PER_SEQUENCE * sequences + snapshots, snapshots
        self._chunk, self._by_row = chunk, by_row
        self.free = list(range(self.count))
        self.holders = [0] * self.count  # sequences and snapshots that hold a slot
        self.held: dict[int, Held] = {}
        self.snapshot_slots: OrderedDict[int, int] = OrderedDict()  # by page, oldest use first

    @property
    def pages(self) -> set[int]:
        """The pages that have a snapshot."""
        return set(self.snapshot_slots)

    def claim(self, seq: Sequence) -> None:
        """Gives a sequence its slots, if it has none. At most `max_num_seqs` run, so there are enough."""
        if self.count and seq.id not in self.held:
            assert seq.committed == 0, f"sequence {seq.id}: {seq.committed} tokens, and no state"
            self.held[seq.id] = Held(self._take(), self._take())

    def begin(self, seq: Sequence, pages: list[int], size: int) -> int:
        """Gives a sequence its slots, whose first tokens are in these pages of `size` tokens.

        Returns how many of the pages precede the state that it goes on from. Without slots, all.
        """
        if not self.count:
            return len(pages)
        usable = [
            n for n, page in enumerate(pages, 1) if page in self.snapshot_slots and self.pays(seq, n * size)
        ]
        num_pages = max(usable, default=0)
        if not num_pages:
            self.claim(seq)
        else:
            page = pages[num_pages - 1]
            self.snapshot_slots.move_to_end(page)
            self.held[seq.id] = Held(self.share(self.snapshot_slots[page]), self._take(), num_pages * size)
        self.held[seq.id].expected = self._expected(seq, num_pages * size, len(pages) * size, size)
        return num_pages

    def pays(self, seq: Sequence, position: int) -> bool:
        """Whether the rows after `position` take less time than all rows from the beginning."""
        tokens = len(seq.tokens)
        first = min(tokens, self._chunk)
        return tokens - position > self._by_row or ALONE * (first - position) <= first

    def _expected(self, seq: Sequence, start: int, shared: int, size: int) -> tuple[int, ...]:
        """Up to where another sequence has had the same tokens, and, if there are several samples, the last
        page boundary that these can go on from.
        """
        expected = {shared}
        if seq.request.params.n > 1:
            expected.add((seq.request.prompt_len - 1) // size * size)
        least = max(start + size, FEWEST * size)
        return tuple(sorted(at for at in expected if at >= least and self.pays(seq, at)))

    def of(self, seq: Sequence) -> Held:
        """Its slots. The state must have seen exactly the committed tokens."""
        held = self.held[seq.id]
        assert held.position == seq.committed, (seq.id, held.position, seq.committed)
        return held

    def split_point(self, seq: Sequence, end: int) -> tuple[int, int] | None:
        """(position, slot) of a state to keep inside the span that goes on to `end`; None: there is none.

        The slot is a snapshot's, whose least recently used one is dropped where there are too many.
        """
        held = self.of(seq)
        position = next((at for at in held.expected if held.position < at < end), None)
        if position is not None and seq.request.prefix_cache and self.make_room():
            held.cut = position, self._take()
        return held.cut

    def commit(self, seq: Sequence, position: int) -> None:
        """The state that this step has written, after `position` tokens, becomes the committed one."""
        held = self.held[seq.id]
        written = held.next
        if self.holders[held.committed] == 1:
            held.next = held.committed
        else:  # a snapshot has it, too
            self._drop(held.committed)
            held.next = self._take()
        held.committed, held.position = written, position

    def keep(self, seq: Sequence, position: int, page: int) -> None:
        """Makes the sequence's state after `position` tokens, if it has it, the snapshot of this page.

        Where nobody is expected to go on from there, it replaces the sequence's former one: one in the
        prompt, one in the output.
        """
        held = self.held.get(seq.id)
        if held is None or page in self.snapshot_slots:
            return
        if held.cut is not None and held.cut[0] == position:
            self.snapshot_slots[page] = held.cut[1]
            held.cut = None
        elif held.position == position:
            if position not in held.expected:
                self._replace(held, position, page, seq.request.prompt_len)
            if self.make_room():
                self.snapshot_slots[page] = self.share(held.committed)

    def _replace(self, held: Held, position: int, page: int, prompt: int) -> None:
        if held.latest is not None and (held.latest[0] < prompt) == (position < prompt):
            self.forget(held.latest[1])
        held.latest = position, page

    def forget(self, page: int) -> None:
        """Drops the snapshot of a page; one without is left alone."""
        if (slot := self.snapshot_slots.pop(page, None)) is not None:
            self._drop(slot)

    def trim(self, seq: Sequence, committed: int) -> None:
        """Gives back what the step has not kept; the slots, too, of a sequence without committed tokens."""
        if (held := self.held.get(seq.id)) is not None and held.cut is not None:
            self._drop(held.cut[1])
            held.cut = None
        if not committed:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Takes its slots from a sequence; one without is left alone."""
        if held := self.held.pop(seq.id, None):
            self._drop(held.committed)
            self._drop(held.next)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every slot is free, or held by live sequences and by snapshots."""
        positions = {seq.id: seq.committed for seq in live}
        holders = Counter(self.snapshot_slots.values())
        for number, held in self.held.items():
            assert number in positions, f"sequence {number} has ended and holds states"
            assert held.position == positions[number], f"sequence {number}: state at {held.position}"
            assert held.cut is None, f"sequence {number}: a state inside a span that has ended"
            assert self.holders[held.next] == 1, f"sequence {number} writes a state that others read"
            holders += Counter((held.committed, held.next))
        assert holders == Counter(dict(enumerate(self.holders))), "holders differ from their counts"
        assert sorted([*self.free, *holders]) == list(range(self.count)), "a slot of states leaked"
        assert len(self.snapshot_slots) <= self.snapshots, "more snapshots than there is room for"

    # slots, one by one

    def make_room(self) -> bool:
        """Whether a snapshot can be added, once the least recently used one is dropped where it must be."""
        added = len(self.snapshot_slots) + sum(held.cut is not None for held in self.held.values())
        if added == self.snapshots and self.snapshot_slots:
            self.forget(next(iter(self.snapshot_slots)))
            return True
        return added < self.snapshots

    def _take(self) -> int:
        return self.share(self.free.pop())

    def share(self, slot: int) -> int:
        self.holders[slot] += 1
        return slot

    def _drop(self, slot: int) -> None:
        self.holders[slot] -= 1
        if not self.holders[slot]:
            self.free.append(slot)
