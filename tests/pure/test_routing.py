"""Where requests go: to the longest prefix, to the pool of their user, else to the less busy of two."""

from __future__ import annotations

from random import Random
from typing import Any

from speculon.operations.cluster.routing import LOAD, POOL, POOL_TOKENS, PREFIX, TOKENS_PER_REQUEST, Routing

A, B, C = "a", "b", "c"
LIMIT = 32


def routing(**options: Any) -> Routing:
    return Routing(**{"block_size": 4, "rng": Random(0), **options})


def prompt(user: int, blocks: int = 4) -> list[int]:
    return [1000 * user + i for i in range(4 * blocks)]


def chosen(one: Routing, tokens: list[int], load: dict[str, int], pool: str | None = None) -> set[str]:
    """Every replica that twenty choices take."""
    return {one.choose(tokens, pool, load, LIMIT) for _ in range(20)}


def test_the_longest_known_prefix_decides() -> None:
    one = routing()
    one.sent(A, prompt(1, 1) + prompt(2, 1), None)
    one.sent(B, prompt(1, 4), None)
    idle = {A: 0, B: 0, C: 0}
    assert chosen(one, prompt(1, 4) + prompt(3), idle) == {B}
    assert chosen(one, prompt(1, 1) + prompt(2, 1), idle) == {A}
    assert chosen(one, prompt(1, 1) + prompt(7, 1), idle) == {A, B}, "both have the first block"
    assert chosen(one, prompt(9), idle) == {A, B, C}, "nobody has anything"


def test_an_answer_is_part_of_the_next_prompt() -> None:
    one = routing()
    one.sent(A, prompt(1), None)
    one.sent(B, prompt(1), None)
    one.wrote(B, prompt(1) + prompt(2), None)
    assert chosen(one, prompt(1) + prompt(2) + prompt(3), {A: 0, B: 0}) == {B}


def test_tokens_beyond_the_last_whole_block_do_not_count() -> None:
    one = routing()
    one.sent(A, [1, 2, 3], None)
    assert one.blocks == 0
    one.sent(B, [1, 2, 3, 4, 5], None)
    assert one.blocks == 1
    assert chosen(one, [1, 2, 3, 4, 9, 9, 9], {A: 0, B: 0}) == {B}


def test_a_user_goes_where_the_earlier_answers_are() -> None:
    one = routing()
    one.wrote(C, prompt(1), "me")
    idle = {A: 0, B: 0, C: 0}
    assert chosen(one, prompt(2), idle, "me") == {C}
    assert chosen(one, prompt(2), idle, "you") == {A, B, C}
    one.sent(A, prompt(3), None)
    assert chosen(one, prompt(3), idle, "me") == {A}, "a prefix comes before a pool"
    one.sent(C, prompt(3), None)
    assert chosen(one, prompt(3), idle, "me") == {C}, "of equal prefixes, that of the pool"
    one.wrote(B, prompt(4), "me")
    assert chosen(one, prompt(2), idle, "me") == {B}, "the latest answer"


def test_a_longer_prefix_outweighs_more_open_requests() -> None:
    one, blocks = routing(), 2 * TOKENS_PER_REQUEST // 4
    one.sent(A, prompt(1, blocks), None)
    assert chosen(one, prompt(1, blocks), {A: 2, B: 0}) == {A}
    assert chosen(one, prompt(1, blocks), {A: 3, B: 0}) == {B}
    assert chosen(one, prompt(1, 1), {A: 1, B: 0}) == {B}, "a short one outweighs none"
    one.wrote(A, [], "me")
    assert chosen(one, prompt(2), {A: POOL_TOKENS // TOKENS_PER_REQUEST, B: 0}, "me") == {A}
    assert chosen(one, prompt(2), {A: POOL_TOKENS // TOKENS_PER_REQUEST + 1, B: 0}, "me") == {B}


def test_a_replica_at_its_limit_is_passed_over_unless_all_are() -> None:
    one = routing()
    one.wrote(A, prompt(1, 1000), "me")
    assert one.choose(prompt(1), "me", {A: LIMIT, B: LIMIT - 1}, LIMIT) == B
    assert one.passed_over == 1
    assert one.choose(prompt(1), "me", {A: LIMIT, B: LIMIT + 5}, LIMIT) == A
    assert one.choose(prompt(1), "me", {A: 0, B: 0}, LIMIT) == A
    assert one.passed_over == 2


def test_what_replicas_leave_behind_is_forgotten() -> None:
    one = routing()
    one.wrote(A, prompt(1), "me")
    one.sent(B, prompt(1, 2), None)
    one.keep({B, C})
    assert (one.blocks, one.pools) == (2, 0)
    assert chosen(one, prompt(1), {B: 0, C: 0}, "me") == {B}
    one.sent(C, prompt(5), None)  # has the bit that A had
    assert chosen(one, prompt(1, 4), {B: 0, C: 0}) == {B}
    assert chosen(one, prompt(5), {B: 0, C: 0}) == {C}


def test_its_memory_is_bounded_and_the_latest_use_counts() -> None:
    one = routing(max_blocks=64, max_pools=8)
    one.wrote(A, prompt(0), "first")
    for user in range(1, 200):
        one.wrote(B, prompt(user), f"user {user}")
        one.choose(prompt(0), None, {A: 0, B: 0}, LIMIT)  # a use
        assert one.blocks <= 64 and one.pools <= 8
    assert chosen(one, prompt(0), {A: 0, B: 0}) == {A}
    assert chosen(one, prompt(1), {A: 0, B: 0}) == {A, B}, "forgotten"
    assert chosen(one, prompt(199), {A: 0, B: 0}) == {B}


def test_what_a_request_was_routed_by_is_counted() -> None:
    one = routing()
    one.sent(A, prompt(1), "me")
    one.wrote(A, prompt(1), "me")
    one.sent(A, prompt(1), "me")
    one.sent(A, prompt(2), "me")
    one.sent(B, prompt(2), "me")
    assert one.routed == {LOAD: 2, PREFIX: 1, POOL: 1}
