"""A draft model in what tiny/test_draft_model leaves out of every mode and setting."""

from __future__ import annotations

import pytest

from tests.builders import left_out
from tests.tiny.requests import MODES
from tests.tiny.test_draft_model import CHOSEN, METHODS, SETTINGS, check_tokens

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("setting", "method", "mode"), left_out(CHOSEN, SETTINGS, METHODS, MODES))
def test_no_token_changes(setting: str, method: str, mode: str) -> None:
    check_tokens(setting, method, mode)
