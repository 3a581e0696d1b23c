"""A random target, a draft model that is often right, and the findings of a sound engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculon import LLM
from speculon.core.config import SpeculationConfig
from speculon.measure.check.plan import CheckPlan
from speculon.measure.check.run import Findings, check
from tests.tiny.check.plans import SMALL
from tests.tiny.folders import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("check") / "model")


@pytest.fixture(scope="session")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a head that is a little wrong: it agrees often, not always."""
    path = tmp_path_factory.mktemp("check") / "draft"
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(3))
        model.lm_head.weight.add_(noise * 0.5 * model.lm_head.weight.std())
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def llm(folder: Path, draft: Path) -> LLM:
    fixed = SpeculationConfig(
        method="draft_model", policy="fixed", draft=str(draft), num_speculative_tokens=3
    )
    return LLM(str(folder), speculation=fixed)


@pytest.fixture(scope="session")
def sound(llm: LLM) -> Findings:
    return check(llm, CheckPlan(**SMALL))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no speculon.toml of whoever runs the tests
