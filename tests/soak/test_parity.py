"""What tiny/test_parity leaves out of every mode and setting with every K."""

from __future__ import annotations

import pytest

from tests.builders import left_out
from tests.tiny.test_parity import CHOSEN, DRAFTS, MODES, SETTINGS, check_lengths, check_methods

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
OTHERS = left_out(CHOSEN, MODES, SETTINGS, DRAFTS)


@pytest.mark.parametrize(("mode", "setting", "k"), OTHERS)
def test_in_a_batch_every_accepted_length_gives_the_plain_output(mode: str, setting: str, k: int) -> None:
    check_lengths(mode, setting, k)


@pytest.mark.parametrize(("mode", "setting", "k"), OTHERS)
def test_a_batch_of_different_methods_and_lengths_gives_the_plain_output(
    mode: str, setting: str, k: int
) -> None:
    check_methods(mode, setting, k)
