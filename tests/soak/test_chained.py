"""What tiny/test_chained leaves out of every mode and setting under every policy."""

from __future__ import annotations

import pytest

from speculon.speculation.control.policies import POLICIES
from tests.builders import left_out
from tests.tiny.requests import MODES, SETTINGS
from tests.tiny.test_chained import CHOSEN, check_lengths

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("policy", "mode", "setting"), left_out(CHOSEN, POLICIES, MODES, SETTINGS))
def test_chained_drafts_of_every_accepted_length_give_the_plain_output(
    mode: str, setting: str, policy: str
) -> None:
    check_lengths(mode, setting, policy)
