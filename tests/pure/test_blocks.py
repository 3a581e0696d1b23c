from __future__ import annotations

import random

import pytest

from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.kv.blocks import BlockPool
from tests.builders import make_sequence
from tests.pure.pages import fill, opened


def test_pages_of_a_starting_sequence_are_consecutive_also_beside_others():
    pool = BlockPool(64, 4)
    seqs = [make_sequence([i] * 9, max_tokens=30) for i in range(3)]
    for seq in seqs:
        opened(pool, seq)
        fill(pool, seq)
    for step in range(25):
        for seq in seqs:
            seq.tokens.append(step)
            fill(pool, seq)
    for seq in seqs:
        table = pool.of(seq).table
        assert table == list(range(table[0], table[0] + len(table)))
    pool.check_integrity(seqs)


def test_a_prompt_that_begins_alike_finds_full_pages_but_computes_at_least_one_token():
    pool = BlockPool(16, 4)
    first = make_sequence(list(range(8)))
    assert opened(pool, first) == 0
    fill(pool, first)
    same, longer, other = (
        make_sequence(list(range(8))),
        make_sequence(list(range(10))),
        make_sequence([9, *range(1, 8)]),
    )
    assert [opened(pool, s) for s in (same, longer, other)] == [4, 8, 0]
    table = pool.of(first).table
    assert pool.of(same).table == table[:1] and pool.of(longer).table == table[:2]
    pool.check_integrity([first, same, longer, other])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reach", [None, 6])
def test_what_a_waiting_prompt_finds_is_what_is_in_pages_then(seed: int, reach: int | None):
    rng, pool = random.Random(seed), BlockPool(14, 2, reach=reach)
    waiting = [make_sequence([rng.randrange(2) for _ in range(rng.randint(1, 20))]) for _ in range(12)]
    running: list[Sequence] = []
    found = 0
    for _ in range(300):
        seq = rng.choice(waiting) if rng.random() < 0.5 or not running else rng.choice(running)
        if seq in running:
            running.remove(seq)
            pool.close(seq)
        elif pool.available > 10:
            started = make_sequence(seq.tokens)
            opened(pool, started)
            fill(pool, started, rng.randint(started.committed, len(started.tokens)))
            running.append(started)
        for seq in rng.sample(waiting, 3):
            found += pool.cached(seq)
            assert pool.cached(seq) == pool.cached(fresh := make_sequence(seq.tokens))
            pool.close(fresh)
        pool.check_integrity(running)
    assert found


def test_released_pages_stay_findable_until_evicted_oldest_first():
    pool = BlockPool(4, 4)
    old, new = make_sequence([1] * 8), make_sequence([2] * 8)
    for seq in (old, new):
        opened(pool, seq)
        fill(pool, seq)
        pool.close(seq)
    assert pool.available == 4
    third = make_sequence([3] * 4)
    opened(pool, third)
    fill(pool, third)
    again = make_sequence([2] * 9)
    assert opened(pool, again) == 8
    pool.check_integrity([third, again])


def test_a_page_is_found_only_behind_the_same_prefix():
    pool = BlockPool(16, 2)
    seq = make_sequence([1, 1, 7, 7])
    opened(pool, seq)
    fill(pool, seq)
    assert opened(pool, make_sequence([2, 2, 7, 7, 5])) == 0


def test_a_step_returns_what_is_beyond_the_committed_tokens():
    pool = BlockPool(8, 4)
    seq = make_sequence([1] * 5)
    opened(pool, seq)
    pool.extend(seq, 20)
    seq.committed = 5
    pool.cut_to_committed(seq)
    assert len(pool.of(seq).table) == 2 and pool.available == 6
    pool.check_integrity([seq])


def test_a_step_ends_at_the_committed_tokens_whether_it_was_committed_or_not():
    pool = BlockPool(8, 4)
    seq = make_sequence([1] * 9)
    opened(pool, seq)
    fill(pool, seq, 8)
    for _ in range(3):  # drafts that nobody commits
        pool.extend(seq, 15)
        pool.of(seq).drafted = {"small": 14}
        pool.cut_to_committed(seq)
        assert (pool.of(seq).drafted, len(pool.of(seq).table)) == ({"small": 8}, 2)
        pool.check_integrity([seq])
    pool.extend(seq, 15)
    seq.tokens, seq.committed = [1] * 13, 12
    pool.cut_to_committed(seq)
    pool.cut_to_committed(seq)
    pool.check_integrity([seq])
    assert opened(pool, make_sequence([1] * 13)) == 12


def test_prompt_logprobs_take_no_cached_prefix():
    from speculon.core.config import SamplingParams

    pool = BlockPool(8, 2)
    seq = make_sequence([1] * 6)
    opened(pool, seq)
    fill(pool, seq)
    assert opened(pool, make_sequence([1] * 6, params=SamplingParams(prompt_logprobs=0))) == 0


@pytest.mark.parametrize("seed", range(2))
def test_random_life_keeps_the_pool_whole(seed: int):
    chance = random.Random(seed)
    pool, live = BlockPool(24, 4), []
    for _ in range(600):
        action = chance.random()
        if action < 0.3:
            seq = make_sequence(
                [chance.randrange(2) for _ in range(chance.randrange(1, 20))], max_tokens=chance.randrange(20)
            )
            opened(pool, seq)
            if pool.missing(seq, len(seq.tokens)) <= pool.available:
                fill(pool, seq)
                live.append(seq)
            else:
                pool.close(seq)
        elif action < 0.5 and live:
            pool.close(live.pop(chance.randrange(len(live))))
        elif live:
            seq = chance.choice(live)
            if pool.missing(seq, len(seq.tokens) + 6) <= pool.available:
                pool.extend(seq, len(seq.tokens) + 6)  # drafts
                seq.tokens += [chance.randrange(2) for _ in range(chance.randrange(1, 7))]
                seq.committed = len(seq.tokens) - 1
                pool.cut_to_committed(seq)
        pool.check_integrity(live)
    for seq in live:
        pool.close(seq)
    pool.check_integrity([])
    assert pool.available == 24


def test_integrity_goes_red_on_a_leak_and_on_a_double_owner():
    pool = BlockPool(8, 4)
    seq = make_sequence([1] * 8)
    opened(pool, seq)
    fill(pool, seq)
    with pytest.raises(AssertionError):
        pool.check_integrity([])  # a sequence forgotten
    table = pool.of(seq).table
    table.append(table[0])
    with pytest.raises(AssertionError):
        pool.check_integrity([seq])
    table.pop()
    pool.check_integrity([seq])
    pool.of(waiting := make_sequence([2])).table.append(5)  # a page that the pool does not know to be taken
    with pytest.raises(AssertionError, match=str(waiting.id)):
        pool.check_integrity([seq])


def test_what_a_drafter_has_in_a_page_is_found_with_the_page():
    pool = BlockPool(8, 4)
    first = make_sequence(list(range(14)))
    opened(pool, first)
    fill(pool, first)
    pool.of(first).drafted = {"small": 14, "late": 7}
    pool.close(first)
    longer, branch = make_sequence(list(range(15))), make_sequence([*range(8), *[9] * 8])
    assert [opened(pool, seq) for seq in (longer, branch)] == [12, 8]
    assert pool.of(longer).drafted == {"small": 12, "late": 4}
    assert pool.of(branch).drafted == {"small": 8, "late": 4}
    pool.check_integrity([longer, branch])


def test_an_evicted_page_takes_what_drafters_had_in_it_along():
    pool = BlockPool(2, 4)
    for token, drafted in ((1, {"small": 8}), (2, {})):
        seq = make_sequence([token] * 8)
        assert opened(pool, seq) == 0
        fill(pool, seq)
        pool.of(seq).drafted = dict(drafted)
        pool.close(seq)
        pool.check_integrity([])
    again = make_sequence([2] * 9)
    assert opened(pool, again) == 8 and pool.of(again).drafted == {}
