"""A random model, and the library that workloads are taken from."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculon import LLM
from speculon.measure.bench import corpus
from tests.tiny.folders import make_folder, make_library


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("bench") / "library")


@pytest.fixture(autouse=True)
def held_out(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "stdlib_root", lambda: library)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed"})


@pytest.fixture(scope="module")
def drafting(folder: Path) -> LLM:
    """The target is its own draft: greedy drafts are always accepted."""
    return LLM(str(folder), prefix_cache=False, speculation={"policy": "fixed", "draft": str(folder)})
