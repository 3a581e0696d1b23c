"""What tiny/test_mtp leaves out of every layout with every K, and of every mode and setting."""

from __future__ import annotations

import pytest

from tests.builders import left_out
from tests.tiny.mtp_forms import FORMS
from tests.tiny.requests import MODES
from tests.tiny.test_mtp import (
    BOTH,
    CHOSEN,
    CHOSEN_LAYOUTS,
    KS,
    SETTINGS,
    check_layout,
    check_setting,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("form", "k"), left_out(CHOSEN_LAYOUTS, FORMS, KS))
def test_every_layout_changes_no_token(form: str, k: int) -> None:
    check_layout(form, k)


@pytest.mark.parametrize(("setting", "form", "mode"), left_out(CHOSEN, SETTINGS, BOTH, MODES))
def test_no_setting_changes_a_token_or_a_row(setting: str, form: str, mode: str) -> None:
    check_setting(setting, form, mode)
