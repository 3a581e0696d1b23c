"""Recurrent models of every architecture draft for themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny.recurrent import DIFFERENT, RECURRENT
from tests.tiny.recurrent_drafts import check_estimate, check_states

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
OTHERS = [name for name in RECURRENT if name not in DIFFERENT]


@pytest.mark.parametrize("name", OTHERS)
def test_after_rejected_drafts_its_states_are_those_of_the_text(name: str) -> None:
    check_states(name, kept=True)


@pytest.mark.parametrize("name", OTHERS)
def test_the_estimate_before_loading_is_that_of_the_loaded_draft(name: str, tmp_path: Path) -> None:
    check_estimate(name, tmp_path)
