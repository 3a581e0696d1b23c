"""Predictions of every variant, in every mode and setting, alone and in a batch, with every K."""

from __future__ import annotations

import pytest

from tests.tiny.test_parity import MODES, SETTINGS
from tests.tiny.test_prediction import KS, WRONG, check_alone, check_batch

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("chained", [False, True], ids=["separate", "chained"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_predictions_of_all_variants_in_a_batch_give_the_plain_output(
    mode: str, setting: str, chained: bool, k: int | None
) -> None:
    check_batch(mode, setting, k, chained)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", WRONG)
def test_alone_any_prediction_gives_the_plain_output(variant: str, mode: str) -> None:
    check_alone(mode, variant)
