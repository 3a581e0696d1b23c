"""What tiny/test_prediction leaves out of every variant, mode and setting with every K."""

from __future__ import annotations

import pytest

from tests.builders import left_out
from tests.tiny.requests import MODES, SETTINGS
from tests.tiny.test_prediction import ALONE, CHOSEN, KS, WRONG, check_alone, check_batch

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("setting", "mode", "chained", "k"), left_out(CHOSEN, SETTINGS, MODES, [False, True], KS)
)
def test_predictions_of_all_variants_in_a_batch_give_the_plain_output(
    mode: str, setting: str, chained: bool, k: int | None
) -> None:
    check_batch(mode, setting, k, chained)


@pytest.mark.parametrize(("variant", "mode"), left_out(ALONE, WRONG, MODES))
def test_alone_any_prediction_gives_the_plain_output(variant: str, mode: str) -> None:
    check_alone(mode, variant)
