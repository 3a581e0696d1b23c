"""MTP modules of every layout with every K, and in every mode and setting."""

from __future__ import annotations

import pytest

from tests.tiny.mtp_forms import FORMS
from tests.tiny.test_mtp import BOTH, KS, SETTINGS, check_layout, check_setting
from tests.tiny.test_parity import MODES

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("form", FORMS)
def test_every_layout_changes_no_token(form: str, k: int) -> None:
    check_layout(form, k)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_token_or_a_row(setting: str, form: str, mode: str) -> None:
    check_setting(setting, form, mode)
