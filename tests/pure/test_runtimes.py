"""Which runtime runs a model, where llama-cpp-python is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError
from speculon.runtimes import registry
from speculon.runtimes.llama import library, trial
from speculon.runtimes.registry import chosen


@pytest.fixture(autouse=True)
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    monkeypatch.setattr(library, "installed", lambda: False)
    library.library.cache_clear()


def test_a_gguf_file_runs_on_torch(tmp_path: Path) -> None:
    assert chosen(EngineConfig(model=str(tmp_path / "x.gguf"))) == "torch"


def test_one_sentence_says_what_to_install() -> None:
    with pytest.raises(
        ConfigError, match=r"^runtime = 'llama' needs the package llama-cpp-python: pip install "
    ):
        library.library()


def test_its_settings_are_refused_with_both_reasons() -> None:
    with pytest.raises(
        ConfigError, match="mmap = False is a setting of runtime llama, and llama-cpp-python is"
    ):
        chosen(EngineConfig(mmap=False))


def test_a_trial_runs_no_file_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logging.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "situation", lambda path: "of any file")
    assert trial.may_repack(tmp_path / "none.gguf", EngineConfig(model="x"), lambda stage: None)
    assert not (tmp_path / "ran").exists()
