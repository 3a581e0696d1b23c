"""Slots of a recurrent draft model's states: between steps one for each sequence, that of its own tokens."""

from __future__ import annotations

import random

import pytest

from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_slots import PER_SEQUENCE, DraftSlots, spare_slots
from tests.builders import make_sequence

NAME = "small"


class Drafter:
    """Reads and drafts as a draft model does; `contents` are the tokens that each slot's state has seen."""

    def __init__(self, slots: DraftSlots):
        self.slots = slots
        self.contents: dict[int, list[int]] = {}
        self.drafted: dict[int, int] = {}  # tokens that it has read, by sequence id

    def read(self, seq: Sequence, start: int, ids: list[int]) -> None:
        read, write = self.slots.begin(seq, start, start + len(ids))
        before = self.contents[read] if start else []
        assert len(before) == start, "the state has seen other tokens than it should have"
        self.contents[write] = before + ids
        self.slots.done(seq, ids)
        self.drafted[seq.id] = start + len(ids)

    def draft(self, seq: Sequence, tokens: list[int], chunk: int = 1 << 30) -> None:
        """Catches up in pieces of `chunk` tokens, then reads the drafts but the last one by one."""
        start = self.drafted.get(seq.id, 0)
        while start < len(seq.tokens):
            self.read(seq, start, seq.tokens[start : start + chunk])
            start = self.drafted[seq.id]
        for i, token in enumerate(tokens[:-1]):
            self.read(seq, len(seq.tokens) + i, [token])

    def end_step(self, seq: Sequence, new: list[int]) -> None:
        """The target has written these tokens; with none the step has failed."""
        if new:
            seq.committed = len(seq.tokens) + len(new) - 1
            seq.tokens.extend(new)
        self.drafted[seq.id] = self.slots.roll_back(seq, seq.committed)
        self.slots.check_integrity(self.drafted)

    def seen(self, seq: Sequence) -> list[int]:
        """What the state of a sequence has seen."""
        chain = self.slots.chains.get(seq.id)
        return [] if chain is None else self.contents[chain.slots[chain.start]]


def begun(slots: DraftSlots, tokens: int = 6) -> tuple[Drafter, Sequence]:
    seq = make_sequence(list(range(tokens)))
    seq.committed = tokens - 1
    return Drafter(slots), seq


@pytest.mark.parametrize("accepted", range(5))
def test_with_spare_slots_no_accepted_token_is_read_again(accepted: int) -> None:
    drafter, seq = begun(DraftSlots(NAME, 1, spare=2))
    drafts = [10, 11, 12, 13]
    drafter.draft(seq, drafts)
    drafter.end_step(seq, [*drafts[:accepted], 99])
    assert drafter.drafted[seq.id] == 6 + min(accepted, 3)
    assert drafter.seen(seq) == seq.tokens[: drafter.drafted[seq.id]]


@pytest.mark.parametrize(("accepted", "kept"), [(0, 6), (1, 6), (2, 6), (3, 9), (4, 9)])
def test_without_them_the_state_goes_back_to_the_last_token_before_the_drafts(
    accepted: int, kept: int
) -> None:
    drafter, seq = begun(DraftSlots(NAME, 1), 4)
    drafts = [10, 11, 12, 13]
    drafter.draft(seq, drafts[:1])
    drafter.end_step(seq, [98, 99])
    drafter.draft(seq, drafts)
    drafter.end_step(seq, [*drafts[:accepted], 99])
    assert drafter.drafted[seq.id] == kept and drafter.seen(seq) == seq.tokens[:kept]


def test_a_step_that_fails_leaves_the_state_of_before() -> None:
    drafter, seq = begun(DraftSlots(NAME, 1, spare=1))
    drafter.draft(seq, [10, 11], chunk=2)
    drafter.end_step(seq, [10, 20])
    before, seen = drafter.drafted[seq.id], list(drafter.seen(seq))
    for _ in range(3):
        drafter.draft(seq, [30, 31, 32, 33], chunk=1)
        drafter.end_step(seq, [])
        assert (drafter.drafted[seq.id], drafter.seen(seq)) == (before, seen)
    begin = drafter.slots.begin(seq, before, len(seq.tokens))
    assert begin[0] != begin[1]
    drafter.end_step(seq, [])  # an error inside of the forward
    assert (drafter.drafted[seq.id], drafter.seen(seq)) == (before, seen)


def test_a_first_step_that_fails_leaves_nothing() -> None:
    drafter, seq = begun(DraftSlots(NAME, 1))
    drafter.draft(seq, [10, 11])
    seq.committed = 0
    drafter.end_step(seq, [])
    assert drafter.drafted[seq.id] == 0 and len(drafter.slots.free) == drafter.slots.count


def test_an_error_while_a_state_is_overwritten_loses_no_other() -> None:
    drafter, seq = begun(DraftSlots(NAME, 1))
    drafter.read(seq, 0, [0, 1])
    read, write = drafter.slots.begin(seq, 2, 4)
    assert read == write, "between pieces of the sequence's own tokens"
    drafter.contents[write] = [-1]
    seq.tokens.append(50)
    seq.committed = 6
    drafter.end_step(seq, [])
    assert drafter.drafted[seq.id] == 0 and drafter.seen(seq) == []


def test_drafts_of_another_method_are_no_tokens_of_this_one() -> None:
    """Where its own draft was not verified, a state that has seen it is of no use."""
    drafter, seq = begun(DraftSlots(NAME, 1, spare=4))
    drafter.draft(seq, [10, 11, 12, 13])
    drafter.end_step(seq, [10, 21, 22, 23, 24])
    assert drafter.drafted[seq.id] == 7 and drafter.seen(seq) == seq.tokens[:7]


def test_a_state_of_another_position_is_seen() -> None:
    drafter, seq = begun(DraftSlots(NAME, 1))
    drafter.draft(seq, [10, 11])
    with pytest.raises(AssertionError):
        drafter.slots.begin(seq, 5, 6)
    drafter.end_step(seq, [10, 20])
    drafter.drafted[seq.id] -= 1
    with pytest.raises(AssertionError, match=r"state at \[7\], not 6"):
        drafter.slots.check_integrity(drafter.drafted)
    with pytest.raises(AssertionError, match="has ended and holds states of small"):
        drafter.slots.check_integrity({})


def test_many_sequences_share_the_spare_slots() -> None:
    """Random rounds with aborts and failed steps: nobody is given the state of another, nothing leaks."""
    chance, slots = random.Random(3), DraftSlots(NAME, 4, spare=3)
    drafter, seqs = Drafter(slots), list[Sequence]()
    for number in range(400):
        while len(seqs) < 4:
            seqs.append(make_sequence([chance.randrange(9) for _ in range(chance.randrange(1, 9))]))
            seqs[-1].committed = len(seqs[-1].tokens) - 1
        drafting = [seq for seq in seqs if chance.random() < 0.7]
        drafts = {seq.id: [chance.randrange(9) for _ in range(chance.randrange(1, 7))] for seq in drafting}
        for seq in drafting:
            drafter.draft(seq, drafts[seq.id], chunk=chance.choice([1, 3, 99]))
        for seq in seqs:
            mine = drafts.get(seq.id, [])
            if chance.random() < 0.9:
                new = [*mine[: chance.randrange(len(mine) + 1)], chance.randrange(9)]
                seq.committed = len(seq.tokens) + len(new) - 1
                seq.tokens.extend(new)
            drafter.drafted[seq.id] = seen = slots.roll_back(seq, seq.committed)
            assert drafter.seen(seq) == seq.tokens[:seen]
        slots.check_integrity(drafter.drafted)
        for seq in seqs[: number % 5 == 0]:
            slots.release(seq)
            del drafter.drafted[seq.id]
            seqs.remove(seq)
    for seq in seqs:
        slots.release(seq)
    assert sorted(slots.free) == list(range(slots.count)) and slots.spare == 3


def test_the_pool_takes_the_state_with_the_pages_and_does_not_promise_it_to_a_prefix() -> None:
    pool = BlockPool(8, 4)
    slots = pool.draft_slots[NAME] = DraftSlots(NAME, 2)
    seq = make_sequence(list(range(10)))
    pool.open(seq)
    pool.extend(seq, 12)
    Drafter(slots).draft(seq, [1, 2])
    pool.of(seq).drafted = {NAME: 11, "attention": 9}
    seq.advance(11, [1, 3], 0)
    pool.cut_to_committed(seq)
    assert pool.of(seq).drafted == {NAME: 11, "attention": 9}
    pool.check_integrity([seq])
    pool.close(seq)
    assert len(slots.free) == slots.count
    again = make_sequence(list(range(10)))
    assert pool.open(again) == 8 and pool.of(again).drafted == {"attention": 8}


def test_spare_slots_are_bounded() -> None:
    assert spare_slots(4, 5, 100, 10**6) == 4 * (5 + 1 - PER_SEQUENCE)
    assert spare_slots(4, 5, 100, 750) == 7
    assert spare_slots(4, 0, 100, 10**6) == spare_slots(4, 2, 100, 10**6) == 0
