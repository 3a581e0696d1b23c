"""Snapshots of the states of every architecture."""

from __future__ import annotations

import pytest

from tests.tiny import test_snapshots
from tests.tiny.recurrent import DIFFERENT, RECURRENT
from tests.tiny.test_snapshots import check_batches, check_found_again

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
OTHERS = [name for name in RECURRENT if name not in DIFFERENT]
found, every_prefix = test_snapshots.found, test_snapshots.every_prefix


@pytest.mark.parametrize("name", OTHERS)
def test_a_prompt_is_found_again(name: str) -> None:
    check_found_again(name)


@pytest.mark.parametrize("name", OTHERS)
def test_batches_of_hits_and_drafts(name: str, found: list[tuple[int, int]]) -> None:
    check_batches(name, found)
