"""Every policy in every mode and setting, alone and in a batch, with a draft model too."""

from __future__ import annotations

import pytest

from tests.tiny.test_parity import MODES
from tests.tiny.test_policies import (
    CHAINED,
    NAMES,
    SETTINGS,
    check_alone,
    check_batch,
    check_cheap,
    check_draft_model,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", NAMES)
def test_a_batch_writes_the_plain_outputs(policy: str, mode: str, setting: str) -> None:
    check_batch(policy, mode, setting)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", NAMES)
def test_sequences_alone_are_the_plain_ones(policy: str, mode: str) -> None:
    check_alone(policy, mode)


@pytest.mark.parametrize("chained", CHAINED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", NAMES)
def test_a_draft_model_stays_right_under_every_policy(policy: str, mode: str, chained: str) -> None:
    check_draft_model(policy, mode, chained)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_where_drafts_are_cheap_every_accepted_length_gives_the_plain_output(
    mode: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cheap(mode, setting, monkeypatch)
