"""A sequence keeps the pages that some layer may still read, and no others."""

from __future__ import annotations

import random

import pytest

from speculon.core.config import SamplingParams
from speculon.core.errors import NeverFits
from speculon.decoding.sequence import GONE, Sequence
from speculon.engine.admission import check_request
from speculon.engine.scheduler import Scheduler
from speculon.runtimes.torch.kv.blocks import BlockPool
from tests.builders import make_sequence
from tests.pure.test_blocks import fill
from tests.pure.test_scheduler import run

SIZE, REACH, ROWS = 4, 6, 8


def readable(seq: Sequence, reach: int, rows: int) -> bool:
    """Whether the pages of all positions are there that `rows` rows after the committed ones see."""
    seen = range(max(0, seq.committed - reach), seq.committed + rows)
    return all(seq.table[position // SIZE] != GONE for position in seen)


def grow(pool: BlockPool, seq: Sequence, rows: int, drafts: int = 0) -> None:
    """One step of an engine: `rows` rows are kept, and as many as `drafts` rejected."""
    pool.extend(seq, seq.committed + rows + drafts)
    assert readable(seq, REACH, rows + drafts), "a page was released too early"
    seq.tokens += [7] * (seq.committed + rows + 1 - len(seq.tokens))
    seq.committed += rows
    pool.seal(seq)
    pool.trim(seq)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_sequence_holds_what_it_may_read_and_the_most_that_is_counted(seed: int, prefix_cache: bool):
    chance = random.Random(seed)
    pool = BlockPool(200, SIZE, prefix_cache, reach=REACH)
    seq, held = make_sequence([1], max_tokens=700), []
    pool.attach(seq)
    while seq.committed < 600:
        rows = chance.randrange(1, ROWS + 1)
        pool.extend(seq, seq.committed + rows)
        held.append(pool.held(seq))
        grow(pool, seq, rows)
        pool.check_integrity([seq])
        kept = [i for i, page in enumerate(seq.table) if page != GONE]
        assert kept[0] == max(0, seq.committed - REACH) // SIZE, "a page that nobody reads"
    assert max(held) == pool.max_pages(700, ROWS) == 5
    assert pool.max_pages(7, ROWS) == 2, "a short one has fewer"
    pool.release(seq)
    pool.check_integrity([])
    assert pool.available == 200 and not seq.table and not seq.released


def test_a_page_released_too_early_and_one_never_released_are_found():
    pool = BlockPool(40, SIZE, reach=REACH - 1)
    early = make_sequence([1])
    pool.attach(early)
    with pytest.raises(AssertionError, match="released too early"):
        for _ in range(20):
            grow(pool, early, 1)
    never = BlockPool(40, SIZE)
    seq = make_sequence([1])
    never.attach(seq)
    for _ in range(20):
        grow(never, seq, 1)
    never.check_integrity([seq])
    never.reach = REACH
    with pytest.raises(AssertionError, match="0 tokens released"):
        never.check_integrity([seq])
    seq.released = 12  # noted, and kept
    with pytest.raises(AssertionError, match="a page that no layer reads"):
        never.check_integrity([seq])


def test_rejected_drafts_never_need_a_released_page():
    pool, chance = BlockPool(9, SIZE, reach=REACH), random.Random(2)
    seq = make_sequence([1], max_tokens=500)
    pool.attach(seq)
    while seq.committed < 300:
        grow(pool, seq, chance.randrange(1, 4), chance.randrange(ROWS))
        pool.check_integrity([seq])


def test_without_a_window_all_pages_stay():
    pool = BlockPool(40, SIZE)
    seq = make_sequence([1] * 90)
    pool.attach(seq)
    fill(pool, seq)
    pool.trim(seq)
    assert pool.held(seq) == pool.max_pages(90, ROWS) == 23 and GONE not in seq.table
    pool.check_integrity([seq])


def test_released_pages_are_found_again_until_they_are_evicted():
    pool = BlockPool(10, SIZE, reach=REACH)
    first = make_sequence(list(range(30)))
    pool.attach(first)
    while first.committed < 30:
        pool.extend(first, first.committed + 5)
        first.committed += 5
        pool.seal(first)
        pool.trim(first)
    assert pool.held(first) == 2 and pool.available == 8
    again = make_sequence(list(range(30)))
    assert pool.attach(again) == 28
    assert again.released == 20 and again.table == [GONE] * 5 + [5, first.table[6]]
    pool.check_integrity([first, again])
    other = make_sequence([5] * 20)
    pool.attach(other)
    pool.extend(other, 20)  # evicts three pages, which were given back last first
    late = make_sequence(list(range(30)))
    assert pool.attach(late) == 8
    pool.check_integrity([first, again, other, late])


def test_methods_are_noted_of_released_pages_unless_they_skipped_some():
    pool = BlockPool(20, SIZE, reach=REACH)
    seq, skipping = make_sequence(list(range(30))), make_sequence([3] * 30)
    for one in (seq, skipping):
        pool.attach(one)
        fill(pool, one, 28)
        one.drafted = {"small": 28}
    skipping.skipped.add("small")
    for one in (seq, skipping):
        pool.trim(one)
        assert one.released == 20
        pool.release(one)
        assert not one.skipped
    again, other = make_sequence(list(range(30))), make_sequence([3] * 30)
    assert [pool.attach(one) for one in (again, other)] == [28, 28]
    assert again.drafted["small"] == 28 and not other.drafted.get("small")
    assert (again.begin("small"), other.begin("small"), other.begin("small", 1)) == (28, 20, 21)


def test_long_sequences_run_in_a_pool_of_the_pages_that_are_counted():
    pool = BlockPool(5, SIZE, reach=REACH)
    assert pool.max_pages(10_000, ROWS) == 5
    scheduler = Scheduler(pool, 4, ROWS)
    long, short = make_sequence([1] * 101, max_tokens=60), make_sequence([2] * 9, max_tokens=60)
    scheduler.add([long])
    scheduler.add([short])
    for _ in range(200):
        spans = scheduler.plan()
        done = {s.seq for s in spans if len(s.seq.tokens) == s.seq.request.max_len - 1}
        assert all(readable(s.seq, REACH, 0) for s in spans)
        for span in spans:
            pool.extend(span.seq, span.end)
        run(scheduler, spans, finish=done)
        for span in spans:
            pool.trim(span.seq)
        scheduler.check_integrity()
    assert not scheduler.has_work and short.stats.preemptions
    assert [len(seq.tokens) for seq in (long, short)] == [161, 69]


def test_admission_counts_the_pages_of_the_window():
    kept = {"vocab_size": 10, "max_context": 1000, "block_size": SIZE}
    params = SamplingParams(max_tokens=100)
    assert check_request([1] * 100, params, **kept, pages=5, max_pages=5) == 200
    with pytest.raises(NeverFits, match="200 tokens need 5 KV pages of 4, the pool owns 4"):
        check_request([1] * 100, params, **kept, pages=4, max_pages=5)
    with pytest.raises(NeverFits, match="200 tokens need 50 KV pages"):
        check_request([1] * 100, params, **kept, pages=5)
    assert check_request([1], SamplingParams(max_tokens=3), **kept, pages=1, max_pages=5) == 4
