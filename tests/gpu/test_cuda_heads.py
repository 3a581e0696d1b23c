"""EAGLE-3 heads on a CUDA device: no token changes, and each row is the formula's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny.heads import deep_model, folder_of, head_of, watch_heads, write_eagle3, wrong_rows
from tests.tiny.requests import MODES
from tests.tiny.scripted import texts_of
from tests.tiny.test_eagle3 import KS, SETTINGS, VARIANTS, ask, plain, requests_of, whole, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config, **VARIANTS[variant])
    watch = watch_heads(plain("greedy"))
    assert texts_of(write(requests_of("greedy"), folder_of(head), ask(4), "cuda")) == plain("greedy")
    assert not wrong_rows(watch, head_of(**VARIANTS[variant]), whole("greedy"), atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_token(setting: str, k: int, mode: str, tmp_path: Path) -> None:
    head = write_eagle3(tmp_path, deep_model().config, draft_vocab=64)
    watch_heads(plain(mode, 9))
    results = write(requests_of(mode, 9), folder_of(head), ask(k), "cuda", **SETTINGS[setting])
    assert texts_of(results) == plain(mode, 9)
