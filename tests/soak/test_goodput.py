"""The scenes of the policy `goodput` that take longest, with more seeds."""

from __future__ import annotations

import pytest

from tests.pure.test_goodput import PHASES, check_rate, late, swing

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("accept", "texts"), [(0.3, 8), (0.6, 1), (0.95, 8)])
def test_it_comes_close_to_the_best_fixed_number_of_drafts(accept: float, texts: int) -> None:
    check_rate(accept, texts, seeds=6)


def test_a_drafter_that_recovers_is_used_again_within_400_rounds() -> None:
    assert len(late(range(20))) <= 1


@pytest.mark.parametrize("first", PHASES)
def test_load_that_swings_is_followed(first: int) -> None:
    assert min(swing(first, seeds=2)) > 0.94
