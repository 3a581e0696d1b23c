"""For every test: a clean environment, and Hypothesis without deadlines (a busy machine is no bug)."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("speculon", deadline=None, database=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("speculon")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECULON_")]:
        monkeypatch.delenv(name)
