"""A draft model in every mode and setting."""

from __future__ import annotations

import pytest

from tests.tiny.test_draft_model import METHODS, SETTINGS, check_tokens
from tests.tiny.test_parity import MODES

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_token_changes(setting: str, method: str, mode: str) -> None:
    check_tokens(setting, method, mode)
