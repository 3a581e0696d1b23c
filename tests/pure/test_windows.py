"""A sequence keeps the pages that some layer may still read, and no others."""

from __future__ import annotations

import random
from typing import Any

import pytest

from speculon.decoding.sequence import Sequence
from speculon.engine.scheduler import Scheduler
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from speculon.runtimes.torch.kv.pages import GONE
from tests.builders import make_sequence
from tests.pure.pages import fill, opened
from tests.pure.test_scheduler import run

SIZE, REACH, ROWS = 4, 6, 8


def readable(pool: BlockPool, seq: Sequence, reach: int, rows: int) -> bool:
    """Whether the pages of all positions are there that `rows` rows after the committed ones see."""
    seen = range(max(0, seq.committed - reach), seq.committed + rows)
    return all(pool.of(seq).table[position // SIZE] != GONE for position in seen)


def pool_of(pages: int, prefix_cache: bool = True, reach: int | None = REACH) -> BlockPool:
    return BlockPool(pages, SIZE, prefix_cache, reach=reach, rows=ROWS)


def grow(pool: BlockPool, seq: Sequence, rows: int, drafts: int = 0) -> None:
    """One step of an engine: `rows` rows are kept, and as many as `drafts` rejected."""
    pool.extend(seq, seq.committed + rows + drafts)
    assert readable(pool, seq, REACH, rows + drafts), "a page was released too early"
    seq.tokens += [7] * (seq.committed + rows + 1 - len(seq.tokens))
    seq.committed += rows
    pool.cut_to_committed(seq)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_sequence_holds_what_it_may_read_and_the_most_that_is_counted(seed: int, prefix_cache: bool):
    chance = random.Random(seed)
    pool = pool_of(200, prefix_cache)
    seq, held = make_sequence([1], max_tokens=700), []
    pool.open(seq)
    while seq.committed < 600:
        rows = chance.randrange(1, ROWS + 1)
        pool.extend(seq, seq.committed + rows)
        held.append(pool.held(seq))
        grow(pool, seq, rows)
        pool.check_integrity([seq])
        kept = [i for i, page in enumerate(pool.of(seq).table) if page != GONE]
        assert kept[0] == max(0, seq.committed - REACH) // SIZE, "a page that nobody reads"
    assert max(held) * SIZE == pool.most(700) == 20
    assert pool.most(7) == 8, "a short one has fewer"
    pool.close(seq)
    pool.check_integrity([])
    assert pool.available == 200 and not pool.of(seq).table and not pool.of(seq).released


def test_a_page_released_too_early_and_one_never_released_are_found():
    pool = pool_of(40, reach=REACH - 1)
    early = make_sequence([1])
    pool.open(early)
    with pytest.raises(AssertionError, match="released too early"):
        for _ in range(20):
            grow(pool, early, 1)
    never = pool_of(40, reach=None)
    seq = make_sequence([1])
    never.open(seq)
    for _ in range(20):
        grow(never, seq, 1)
    never.check_integrity([seq])
    never.reach = REACH
    with pytest.raises(AssertionError, match="0 tokens released"):
        never.check_integrity([seq])
    never.of(seq).released = 12  # noted, and kept
    with pytest.raises(AssertionError, match="a page that no layer reads"):
        never.check_integrity([seq])


def test_rejected_drafts_never_need_a_released_page():
    pool, chance = pool_of(9), random.Random(2)
    seq = make_sequence([1], max_tokens=500)
    pool.open(seq)
    while seq.committed < 300:
        grow(pool, seq, chance.randrange(1, 4), chance.randrange(ROWS))
        pool.check_integrity([seq])


def test_without_a_window_all_pages_stay():
    pool = pool_of(40, reach=None)
    seq = make_sequence([1] * 90)
    pool.open(seq)
    fill(pool, seq)
    assert pool.held(seq) * SIZE == pool.most(90) == 92 and GONE not in pool.of(seq).table
    pool.check_integrity([seq])


def test_released_pages_are_found_again_until_they_are_evicted():
    pool = pool_of(10)
    first = make_sequence(list(range(30)))
    pool.open(first)
    while first.committed < 30:
        pool.extend(first, first.committed + 5)
        first.committed += 5
        pool.cut_to_committed(first)
    assert pool.held(first) == 2 and pool.available == 8
    again = make_sequence(list(range(30)))
    assert opened(pool, again) == 28
    pages = pool.of(again)
    assert pages.released == 20 and pages.table == [GONE] * 5 + [5, pool.of(first).table[6]]
    pool.check_integrity([first, again])
    other = make_sequence([5] * 20)
    pool.open(other)
    pool.extend(other, 20)  # evicts three pages, which were given back last first
    late = make_sequence(list(range(30)))
    assert opened(pool, late) == 8
    pool.check_integrity([first, again, other, late])


def test_methods_are_noted_of_released_pages_unless_they_skipped_some():
    pool = pool_of(20)
    seq, skipping = make_sequence(list(range(30))), make_sequence([3] * 30)
    for one in (seq, skipping):
        pool.open(one)
        pool.of(one).drafted = {"small": 28}
    pool.of(skipping).skipped.add("small")
    for one in (seq, skipping):
        fill(pool, one, 28)
        assert pool.of(one).released == 20
        pool.close(one)
        assert not pool.of(one).skipped
    again, other = make_sequence(list(range(30))), make_sequence([3] * 30)
    assert [pool.open(one) for one in (again, other)] == [28, 28]
    assert pool.of(again).drafted["small"] == 28 and not pool.of(other).drafted.get("small")
    store: Any = None  # whose bytes nobody reads here
    drafts = DraftPages(pool, store, "small", 0)
    assert (drafts.begin(again), drafts.begin(other), drafts.begin(other, 1)) == (28, 20, 21)
    assert (drafts.unread(again), drafts.unread(other)) == (1, 9)


def test_long_sequences_run_in_a_pool_of_the_pages_that_are_counted():
    pool = pool_of(5)
    assert pool.most(10_000) == 20
    scheduler = Scheduler(pool, 4, ROWS)
    long, short = make_sequence([1] * 101, max_tokens=60), make_sequence([2] * 9, max_tokens=60)
    scheduler.add([long])
    scheduler.add([short])
    for _ in range(200):
        spans = scheduler.plan()
        done = {s.seq for s in spans if len(s.seq.tokens) == s.seq.request.max_len - 1}
        assert all(readable(pool, s.seq, REACH, 0) for s in spans)
        run(scheduler, spans, finish=done)
        scheduler.check_integrity()
    assert not scheduler.has_work and short.stats.preemptions
    assert [len(seq.tokens) for seq in (long, short)] == [161, 69]
