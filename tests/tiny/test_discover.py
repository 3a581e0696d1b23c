"""Models and drafters of a folder, under their names, and the memory of a model before it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculon.checkpoints.locate import locate
from speculon.cli.discover import find_models
from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, ModelError
from speculon.runtimes.torch.drafters.choose import with_drafts
from speculon.runtimes.torch.drafters.needs import drafter_needs
from speculon.runtimes.torch.loading import memory
from speculon.runtimes.torch.loading.memory import LIBRARIES, ProcessMemory, largest_step
from speculon.server.pool.loader import GB, ModelLoader
from tests.tiny.gguf_files import tiny_llama, write_gguf


def process_memory(config: EngineConfig, total: int) -> ProcessMemory:
    config = with_drafts(config)
    step = largest_step(config)
    return memory.process_memory(config, step, drafter_needs(config, step), total)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The shipped checkpoints, and folders that are no models."""
    for name, path in (("coder", "demo"), ("little", "demo-draft"), ("head", "demo-eagle3")):
        (tmp_path / name).symlink_to(locate(path))
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    return tmp_path


def test_a_folder_has_models_and_drafters(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = find_models([], library)
    assert found.models == {name: str(library / name) for name in ("coder", "little")}
    assert found.drafters == {"head": "eagle3"}
    assert "broken is left out" in caplog.text and "notes" not in caplog.text


def test_a_split_file_is_one_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = write_gguf(tiny_llama(), tmp_path / "large.gguf", split=5)
    assert find_models([], tmp_path).models == {"large": str(first)} and not caplog.text


def test_those_that_are_given_come_first_and_once(library: Path) -> None:
    found = find_models(["demo", "org/name", str(library / "little")], library, "mine")
    assert list(found.models) == ["mine", "org/name", "little", "coder"]
    assert found.models["mine"] == "demo" and found.models["org/name"] == "org/name"


def test_two_models_of_one_name_are_refused_with_both_paths(library: Path) -> None:
    other = library / "notes" / "coder"
    other.mkdir()
    with pytest.raises(ConfigError, match=f"two models are named 'coder': {other} and {library / 'coder'}"):
        find_models([str(other)], library)
    with pytest.raises(ConfigError, match="two models are named 'little': demo and "):
        find_models(["demo"], library, "little")


@pytest.mark.parametrize(
    ("folder", "words"), [("notes", "it has no subfolder with a model"), ("none", "no such folder")]
)
def test_a_folder_without_a_model_is_refused(library: Path, folder: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_models([], library / folder)


def test_the_memory_of_a_process_is_known_before_it_starts() -> None:
    config = EngineConfig(model="demo", max_num_seqs=4)
    small, large = process_memory(config, 2 * GB).estimate, process_memory(config, 200 * GB).estimate
    assert small.held == large.held > LIBRARIES
    assert small.drafters > 0, "the draft model that ships with it"
    assert small.total <= 2 * GB and small.pages <= large.pages
    tight = process_memory(config, small.held + small.scratch).estimate
    assert tight.pages < large.pages, "pages depend on the memory of all models, not on what is free"


def test_a_share_is_held_by_settings() -> None:
    share = ModelLoader().share({"model": "demo", "max_num_seqs": 4}, 50 * GB)
    config = EngineConfig(**share.settings)
    assert config.kv_memory_gb and config.speculation.memory_limit_gb == share.bytes / GB
    given = ModelLoader().share(
        {"model": "demo", "speculation": {"memory_limit_gb": 3.0}, "num_blocks": 9}, 50 * GB
    )
    assert given.bytes == 3 * GB and "kv_memory_gb" not in given.settings


def test_without_room_for_a_page_the_share_is_larger_than_the_memory() -> None:
    share = ModelLoader().share({"model": "demo"}, GB)
    assert share.bytes > GB and "kv_memory_gb" not in share.settings


def test_a_checkpoint_that_cannot_be_read_has_no_estimate(library: Path) -> None:
    with pytest.raises(ModelError):
        ModelLoader().share({"model": str(library / "broken")}, 50 * GB)
