"""DFlash and DSpark drafters of every format change no token, and their blocks are those of the formula,
whatever happens to their pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speculon.proposers import registry
from tests.tiny.blocks import ask, drafter_of, folder_of, watch_blocks, wrong_blocks
from tests.tiny.dflash_checkpoints import FORMATS, write_dflash
from tests.tiny.heads import deep_model
from tests.tiny.test_eagle3 import plain, requests_of, texts_of, whole, write
from tests.tiny.test_parity import accepted_lengths

KS = (1, 3, 7)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The table of methods as it was."""
    yield
    registry._registered.pop("dflash", None)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_changes_no_token(format: str, k: int, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path, deep_model().config, format)
    watch = watch_blocks(plain("greedy"))
    results = write(requests_of("greedy"), folder_of(folder), ask(k))
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_blocks(watch, drafter_of(format), whole("greedy"))
    assert len(watch.rounds) > 20
