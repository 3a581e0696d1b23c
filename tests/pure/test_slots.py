"""Slots of recurrent states: two for each sequence, exchanged at a commit, all given back."""

from __future__ import annotations

import pytest

from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.slots import StateSlots
from tests.builders import make_sequence


def test_a_commit_exchanges_the_slots_of_a_sequence() -> None:
    slots, seq = StateSlots(2), make_sequence([1, 2, 3])
    slots.claim(seq)
    held = slots.of(seq)
    first = (held.committed, held.next)
    slots.claim(seq)
    assert (slots.of(seq).committed, slots.of(seq).next) == first, "a second claim changes nothing"
    slots.commit(seq, 3)
    seq.committed = 3
    assert (slots.of(seq).next, slots.of(seq).committed) == first
    slots.check_integrity([seq])


def test_slots_of_different_sequences_are_different() -> None:
    slots, seqs = StateSlots(3), [make_sequence([1]) for _ in range(3)]
    for seq in seqs:
        slots.claim(seq)
    taken = [slot for seq in seqs for slot in (slots.of(seq).committed, slots.of(seq).next)]
    assert sorted(taken) == list(range(6))
    slots.check_integrity(seqs)


def test_a_state_of_another_position_is_seen() -> None:
    slots, seq = StateSlots(1), make_sequence([1, 2, 3])
    slots.claim(seq)
    slots.commit(seq, 2)
    seq.committed = 3
    with pytest.raises(AssertionError):
        slots.of(seq)
    with pytest.raises(AssertionError, match="state at 2"):
        slots.check_integrity([seq])


def test_a_slot_of_an_ended_sequence_is_seen() -> None:
    slots, seq = StateSlots(1), make_sequence([1])
    slots.claim(seq)
    with pytest.raises(AssertionError, match="has ended and holds states"):
        slots.check_integrity([])
    slots.release(seq)
    slots.check_integrity([])


def test_the_pool_gives_slots_back_with_the_pages() -> None:
    pool, seq = BlockPool(4, 4, prefix_cache=False, slots=StateSlots(1)), make_sequence([1, 2, 3])
    pool.open(seq)
    pool.slots.claim(seq)
    pool.extend(seq, 3)
    pool.slots.commit(seq, 3)
    seq.committed = 3
    pool.cut_to_committed(seq)
    pool.check_integrity([seq])
    pool.close(seq)
    pool.check_integrity([])
    pool.slots.claim(make_sequence([1]))


def test_a_sequence_that_has_tokens_must_have_a_state() -> None:
    slots, seq = StateSlots(1), make_sequence([1, 2, 3])
    seq.committed = 2
    with pytest.raises(AssertionError, match="no state"):
        slots.claim(seq)
