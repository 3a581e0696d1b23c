"""A cluster in virtual time: it scales, keeps prefix hits, and the router's state is bounded."""

from __future__ import annotations

from random import Random

import pytest
from recipes.cluster.simulate import (
    Costs,
    by_chance,
    by_load,
    by_routing,
    conversations,
    linear,
    scaled,
)

from speculon.operations.cluster.routing import MAX_BLOCKS, Routing

COSTS = Costs.read()
MS = 20_000.0


def to_the_first(
    routing: Routing, rng: Random, prompt: list[int], pool: str, load: dict[str, int], limit: int
) -> str:
    """Planted: one replica gets everything."""
    return next(iter(load))


def test_throughput_and_waiting_times_scale() -> None:
    rows = [scaled(COSTS, replicas, by_routing, MS) for replicas in (1, 4)]
    assert linear(rows), rows
    assert all(row["blocks"] <= MAX_BLOCKS for row in rows)


@pytest.mark.parametrize("planted", [to_the_first, by_load])
def test_a_planted_router_does_not_scale(planted: object) -> None:
    rows = [scaled(COSTS, 1, by_routing, MS), scaled(COSTS, 4, planted, MS)]  # type: ignore[arg-type]
    assert not linear(rows), rows


def test_conversations_keep_the_prefix_hits_of_one_engine() -> None:
    alone = conversations(COSTS, 1, by_routing)
    assert conversations(COSTS, 4, by_routing) >= 0.95 * alone
    assert conversations(COSTS, 4, by_chance) < 0.8 * alone, "else the figure could not fail"


def test_two_ingresses_route_by_what_each_has_seen() -> None:
    assert conversations(COSTS, 4, by_routing, ingresses=2) > conversations(COSTS, 4, by_chance)
