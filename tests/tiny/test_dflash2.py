"""DFlash2 drafters change no token, and their blocks and drafts are those of the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders import spread
from tests.tiny.blocks import ask, drafter_of, folder_of, watch_blocks, wrong_blocks
from tests.tiny.dflash_checkpoints import write_dflash
from tests.tiny.heads import deep_model
from tests.tiny.scripted import texts_of
from tests.tiny.test_dflash import KS, drafted_with
from tests.tiny.test_eagle3 import SETTINGS, plain, requests_of, whole, write
from tests.tiny.test_parity import MODES, accepted_lengths

FLASH2: dict[str, Any] = {"group": 8}
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}


@pytest.mark.parametrize("k", KS)
def test_blocks_and_paths_are_those_of_the_formula(k: int, tmp_path: Path) -> None:
    results, watch = drafted_with(tmp_path, k, **FLASH2)
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_blocks(watch, drafter_of(**FLASH2), whole("greedy"))
