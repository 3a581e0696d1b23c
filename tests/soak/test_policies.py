"""What tiny/test_policies leaves out of every policy, mode and setting, with a draft model too."""

from __future__ import annotations

import pytest

from tests.builders import left_out
from tests.tiny.requests import MODES
from tests.tiny.test_policies import (
    ALONE,
    CHAINED,
    CHOSEN,
    CHOSEN_CHAINED,
    CHOSEN_CHEAP,
    NAMES,
    SETTINGS,
    check_alone,
    check_batch,
    check_cheap,
    check_draft_model,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("policy", "mode", "setting"), left_out(CHOSEN, NAMES, MODES, SETTINGS))
def test_a_batch_writes_the_plain_outputs(policy: str, mode: str, setting: str) -> None:
    check_batch(policy, mode, setting)


@pytest.mark.parametrize(("policy", "mode"), left_out(ALONE, NAMES, MODES))
def test_sequences_alone_are_the_plain_ones(policy: str, mode: str) -> None:
    check_alone(policy, mode)


@pytest.mark.parametrize(("policy", "mode", "chained"), left_out(CHOSEN_CHAINED, NAMES, MODES, CHAINED))
def test_a_draft_model_stays_right_under_every_policy(policy: str, mode: str, chained: str) -> None:
    check_draft_model(policy, mode, chained)


@pytest.mark.parametrize(("mode", "setting"), left_out(CHOSEN_CHEAP, MODES, SETTINGS))
def test_where_drafts_are_cheap_every_accepted_length_gives_the_plain_output(
    mode: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cheap(mode, setting, monkeypatch)
