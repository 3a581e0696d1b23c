"""Snapshots of the states of every architecture."""

from __future__ import annotations

import pytest

from tests.tiny import test_snapshots
from tests.tiny.recurrent import DIFFERENT, RECURRENT
from tests.tiny.test_snapshots import check_found_again

every_prefix = test_snapshots.every_prefix
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
OTHERS = [name for name in RECURRENT if name not in DIFFERENT]


@pytest.mark.parametrize("name", OTHERS)
def test_a_prompt_is_found_again(name: str) -> None:
    check_found_again(name)
