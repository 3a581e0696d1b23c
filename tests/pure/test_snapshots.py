"""Snapshots of states, with states that are the tokens they have seen: a wrong one is told by its content."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from speculon.core.config import SamplingParams
from speculon.core.types import Finish, Verdict
from speculon.decoding.rounds import Drafted, Judged, Span
from speculon.decoding.sequence import Sequence
from speculon.engine.scheduler import Scheduler
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.slots import StateSlots
from tests.builders import make_sequence

SIZE, SEQUENCES = 4, 3


class World:
    """An engine whose recurrent states are the tokens they have seen, in slots."""

    def __init__(self, snapshots: int, pages: int = 40, chunk: int = 1000, by_row: int = 0):
        slots = StateSlots(SEQUENCES, snapshots, chunk, by_row)
        self.pool = BlockPool(pages, SIZE, snapshots > 0, slots)
        self.scheduler = Scheduler(self.pool, SEQUENCES, 24)
        self.contents: list[tuple[int, ...]] = [()] * slots.count
        self.returned: dict[int, int] = {}  # sequence id -> preemptions after which it went on from a state
        self.cached = self.resumed = self.cuts = 0

    def step(self, chance: random.Random | None = None) -> None:
        """One step of all that run; with `chance` it has drafts, and may fail before its commit."""
        spans = self.scheduler.plan()
        fails = chance is not None and chance.random() < 0.1
        judged = []
        for span in spans:
            self.pool.slots.claim(span.seq)
            drafts = chance.randrange(4) if chance and span.samples else 0
            needed = sum(self.pool.missing(s.seq, s.end) for s in spans)
            drafts = min(drafts, max(0, self.pool.available - needed) * SIZE)
            self.pool.extend(span.seq, span.end + drafts)
            judged.append(Judged(Drafted(span), self.forward(span, drafts, chance)))
        if not fails:
            for one in judged:
                self.pool.slots.commit(one.seq, one.end)
                one.seq.advance(one.end, one.verdict.tokens, 0)
        for span in spans:
            self.pool.cut_to_committed(span.seq)
        if not fails:
            self.scheduler.free_ended(judged)
        self.scheduler.check_integrity()

    def forward(self, span: Span, drafts: int, chance: random.Random | None) -> Verdict:
        slots, seq = self.pool.slots, span.seq
        held, end = slots.of(seq), span.end
        if not seq.stats.preemptions and span.start == seq.stats.cached_tokens:
            self.cached += span.start
        if span.start and seq.stats.preemptions > self.returned.get(seq.id, 0):
            self.returned[seq.id] = seq.stats.preemptions
            self.resumed += span.start
        assert not span.start or self.contents[held.committed] == tuple(seq.tokens[: span.start])
        if not drafts and (cut := slots.split_point(seq, end)) is not None:
            assert span.start < cut[0] < end
            self.cuts += 1
            self.contents[cut[1]] = tuple(seq.tokens[: cut[0]])
        accepted = chance.randrange(drafts + 1) if chance else drafts
        new = []
        while span.samples and len(new) <= accepted:
            new.append(sum(seq.tokens[-3:] + new) % 5)
        new = new[: seq.tokens_left]
        self.contents[held.next] = (*seq.tokens[:end], *new[:accepted])
        finish = Finish("length") if len(new) == seq.tokens_left else None
        return Verdict(tuple(new), min(accepted, len(new)), finish=finish)

    def run(self, *seqs: Sequence) -> None:
        """These to their end."""
        for seq in seqs:
            self.scheduler.add([seq])
        while self.scheduler.has_work:
            self.step()


def text(length: int, kind: int = 0) -> list[int]:
    return [(kind + i * i) % 7 for i in range(length)]


def live(world: World, chance: random.Random) -> None:
    """Sixty requests that begin alike, of which some are aborted."""
    bases = [text(30, kind) for kind in range(3)]
    for i in range(60):
        base = chance.choice(bases)
        prompt = base[: chance.randrange(1, 31)] + text(chance.randrange(1, 12), chance.randrange(7))
        params = SamplingParams(temperature=0, max_tokens=12, n=chance.choice((1, 1, 2)))
        samples = [make_sequence(prompt, 12, params=params, sample=n) for n in range(params.n)]
        world.scheduler.add(samples)
        for _ in range(chance.randrange(6)):
            world.step(chance)
        if i % 9 == 0:
            world.scheduler.abort(samples[0].request.id)
            world.scheduler.check_integrity()
    while world.scheduler.has_work:
        world.step(chance)


@pytest.mark.parametrize("seed", range(4, 10))
def test_every_state_that_is_read_has_seen_the_tokens_before_it(seed: int) -> None:
    """In chunks, with drafts, failures, aborts, preemption, and less room for snapshots than they need."""
    chance = random.Random(seed)
    world = World(snapshots=(1, 3, 30)[seed % 3], pages=(22, 40)[seed % 2])
    live(world, chance)
    assert world.cached > 20 and world.cuts > 3
    assert world.pool.available == world.pool.num_blocks
    assert len(world.pool.slots.pages) <= world.pool.slots.snapshots


def test_a_preempted_sequence_goes_on_from_its_snapshot() -> None:
    world = World(snapshots=4, pages=16)
    world.run(*(make_sequence(text(14 + i, i), 30) for i in range(3)))
    assert world.resumed > 0


# planted errors


pages: dict[tuple[int, int], int] = {}  # by sequence id and the position after them


def misplaced(states: StateSlots, seq: Sequence, position: int, page: int) -> None:
    """A snapshot of the page before."""
    held, pages[seq.id, position] = states.held[seq.id], page
    before = pages.get((seq.id, position - SIZE))
    if held.position == position and before is not None and states.make_room():
        states.snapshot_slots.setdefault(before, held.committed)
        states.holders[held.committed] = 1 + list(states.snapshot_slots.values()).count(held.committed)


def of_another(states: StateSlots, seq: Sequence, position: int, page: int) -> None:
    """The state of another sequence."""
    others = [held.committed for held in states.held.values() if held is not states.held[seq.id]]
    if others and page not in states.snapshot_slots and states.make_room():
        states.snapshot_slots[page] = states.share(others[0])


def overwritten(states: StateSlots, seq: Sequence, position: int) -> None:
    """A commit that does not spare the slot of a snapshot."""
    held = states.held[seq.id]
    held.committed, held.next, held.position = held.next, held.committed, position


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("keep", misplaced),
        ("keep", of_another),
        ("commit", overwritten),
        ("forget", lambda states, page: None),
        ("trim", lambda states, seq, committed: None if committed else states.release(seq)),
    ],
    ids=["wrong boundary", "another sequence", "written again", "outlives its page", "cut not given back"],
)
def test_planted_errors_show(
    method: str, error: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateSlots, method, error)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(4):
            live(World(snapshots=6, pages=22), random.Random(seed))


# where snapshots are made, and which are used


def found_by(world: World, prompt: list[int]) -> int:
    seq = make_sequence(prompt, 1)
    world.run(seq)
    return seq.stats.cached_tokens


def test_an_unrepeated_prompt_is_not_cut_and_a_shared_beginning_is() -> None:
    world, common = World(snapshots=8), text(18)
    assert [found_by(world, [*common, 20 + i, 30]) for i in range(3)] == [0, 0, 16]
    assert world.cuts == 1
    assert found_by(world, [*text(10), 9, 9]) == 0, "two pages are too few for a cut"


def test_the_first_of_several_samples_keeps_the_state_of_their_prompt() -> None:
    world, params = World(snapshots=8), SamplingParams(temperature=0, max_tokens=2, n=3)
    samples = [make_sequence(text(23), 2, params=params, sample=n, request_id="r") for n in range(3)]
    world.scheduler.add(samples)
    while world.scheduler.has_work:
        world.step()
    assert [seq.stats.cached_tokens for seq in samples] == [0, 20, 20]


def test_chunks_end_at_page_boundaries_and_output_replaces_its_own_snapshot() -> None:
    """One remains of the prompt's chunks of 24 tokens, and one of the output."""
    world = World(snapshots=8)
    seq = make_sequence(text(53), 20)
    world.run(seq)
    assert len(world.pool.slots.pages) == 2
    assert found_by(world, text(53)) == 48 and found_by(world, seq.tokens) == 72


def test_the_least_recently_used_snapshot_goes_first() -> None:
    world = World(snapshots=2)
    texts = [text(25, kind) for kind in range(3)]
    for prompt in texts[:2]:
        found_by(world, prompt)  # each leaves the one at 24
    assert found_by(world, texts[0]) == 24
    found_by(world, texts[2])
    assert [found_by(world, texts[i]) for i in (0, 1)] == [24, 0]


@pytest.mark.parametrize(
    ("tokens", "position", "chunk", "by_row", "pays"),
    [
        (400, 64, 512, 0, True),  # the rest is one call
        (400, 64, 512, 60, True),
        (400, 64, 512, 1000, False),  # the rest goes row by row, and takes longer than all in one call
        (400, 352, 512, 1000, True),
        (2000, 448, 512, 4000, True),  # beyond the first chunk, rows are single ones in any case
        (2000, 300, 512, 4000, False),
    ],
)
def test_a_prefix_is_used_where_the_rest_takes_less_time(
    tokens: int, position: int, chunk: int, by_row: int, pays: bool
) -> None:
    slots = StateSlots(1, 4, chunk, by_row)
    assert slots.pays(make_sequence(text(tokens)), position) is pays
