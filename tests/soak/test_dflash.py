"""What tiny/test_dflash leaves out of both layouts with every Markov head and K, and of every setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import left_out
from tests.tiny.requests import MODES
from tests.tiny.test_dflash import (
    CHOSEN,
    CHOSEN_SETTINGS,
    KS,
    MARKOV,
    SETTINGS,
    check_layout,
    check_setting,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("from_anchor", "markov", "k"), left_out(CHOSEN, [False, True], MARKOV, KS))
def test_both_layouts_draft_with_every_head(
    from_anchor: bool, markov: str | None, k: int, tmp_path: Path
) -> None:
    check_layout(from_anchor, markov, k, tmp_path)


@pytest.mark.parametrize(("setting", "mode"), left_out(CHOSEN_SETTINGS, SETTINGS, MODES))
def test_no_setting_changes_a_token_or_a_block(setting: str, mode: str, tmp_path: Path) -> None:
    check_setting(setting, mode, tmp_path)
