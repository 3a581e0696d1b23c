"""DFlash and DSpark drafters on a CUDA device: no token changes, and each block is the formula's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny.blocks import ask, drafter_of, folder_of, watch_blocks, write_dflash, wrong_blocks
from tests.tiny.heads import deep_model
from tests.tiny.requests import MODES
from tests.tiny.scripted import texts_of
from tests.tiny.test_dflash import SPARK, VARIANTS
from tests.tiny.test_eagle3 import SETTINGS, plain, requests_of, whole, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, **VARIANTS[variant])
    watch = watch_blocks(plain("greedy"))
    assert texts_of(write(requests_of("greedy"), folder_of(path), ask(4), "cuda")) == plain("greedy")
    wrong = wrong_blocks(watch, drafter_of(**VARIANTS[variant]), whole("greedy"), greedy=False, atol=1e-3)
    assert not wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_token(setting: str, mode: str, tmp_path: Path) -> None:
    path = write_dflash(tmp_path, deep_model().config, **SPARK)
    watch_blocks(plain(mode, 9))
    results = write(requests_of(mode, 9), folder_of(path), ask(5), "cuda", **SETTINGS[setting])
    assert texts_of(results) == plain(mode, 9)
