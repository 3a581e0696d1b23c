"""Both layouts of DFlash blocks with every Markov head and every K."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny.test_dflash import KS, MARKOV, check_layout

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("markov", MARKOV)
@pytest.mark.parametrize("from_anchor", [False, True])
def test_both_layouts_draft_with_every_head(
    from_anchor: bool, markov: str | None, k: int, tmp_path: Path
) -> None:
    check_layout(from_anchor, markov, k, tmp_path)
