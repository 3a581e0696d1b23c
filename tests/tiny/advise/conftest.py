"""A random target with itself and with a stranger as drafters."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from speculon import LLM
from speculon.demo import corpus
from tests.tiny.advise.plans import K, plant
from tests.tiny.conftest import build
from tests.tiny.folders import CONTEXT, make_folder, make_library


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("advise") / "model")


@pytest.fixture(scope="session")
def stranger(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of the same vocabulary that knows nothing of the target."""
    path = tmp_path_factory.mktemp("advise") / "stranger"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(path)
    build(
        "llama", seed=9, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, eos_token_id=2
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def own(folder: Path) -> LLM:
    """The target is its own draft."""
    return LLM(
        str(folder), prefix_cache=False, speculation={"draft": str(folder), "num_speculative_tokens": K}
    )


@pytest.fixture(scope="session")
def strange(folder: Path, stranger: Path) -> LLM:
    return LLM(
        str(folder), prefix_cache=False, speculation={"draft": str(stranger), "num_speculative_tokens": K}
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_library(tmp_path / "library")
    monkeypatch.setattr(corpus, "stdlib_root", lambda: root)


@pytest.fixture
def as_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft costs as much as a plain step; nothing is noisy."""
    plant(monkeypatch, draft=1.0)
