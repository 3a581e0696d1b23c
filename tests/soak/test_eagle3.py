"""What tiny/test_eagle3 leaves out of every format, mode and setting with every K."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import left_out
from tests.tiny.heads import FORMATS
from tests.tiny.requests import MODES
from tests.tiny.test_eagle3 import CHOSEN, CHOSEN_FORMATS, KS, SETTINGS, check_format, check_setting

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("format", "k"), left_out(CHOSEN_FORMATS, FORMATS, KS))
def test_every_format_changes_no_token(format: str, k: int, tmp_path: Path) -> None:
    check_format(format, k, tmp_path)


@pytest.mark.parametrize(("setting", "mode", "k"), left_out(CHOSEN, SETTINGS, MODES, KS))
def test_no_setting_changes_a_token_or_a_row(setting: str, k: int, mode: str, tmp_path: Path) -> None:
    check_setting(setting, k, mode, tmp_path)
