"""Recurrent models of every architecture draft for themselves; every planted error in the states is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders import left_out
from tests.tiny.recurrent import DIFFERENT, RECURRENT, TWO
from tests.tiny.recurrent_drafts import check_accepted, check_estimate, check_states
from tests.tiny.test_recurrent_drafts import CHOSEN, CHOSEN_LOWER, PLANTS, check_lower, check_planted

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
OTHERS = [name for name in RECURRENT if name not in DIFFERENT]


@pytest.mark.parametrize("name", OTHERS)
def test_every_draft_of_the_target_itself_is_accepted(name: str) -> None:
    check_accepted(name)


@pytest.mark.parametrize("name", OTHERS)
def test_after_rejected_drafts_its_states_are_those_of_the_text(name: str) -> None:
    check_states(name, kept=True)


@pytest.mark.parametrize("name", OTHERS)
def test_the_estimate_before_loading_is_that_of_the_loaded_draft(name: str, tmp_path: Path) -> None:
    check_estimate(name, tmp_path)


@pytest.mark.parametrize(("plant", "name"), left_out(CHOSEN, PLANTS, TWO))
def test_a_planted_error_changes_drafts_and_no_text(
    name: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_planted(name, plant, monkeypatch)


@pytest.mark.parametrize(("plant", "name"), left_out(CHOSEN_LOWER, PLANTS[1:], TWO))
def test_a_planted_error_lowers_acceptance(name: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_lower(name, plant, monkeypatch)
