"""Models by name: those of a package, and those in folders of `SPECULON_MODELS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from speculon.checkpoints.locate import PACKAGED, locate, name_of, refuse_missing, usual_drafters
from speculon.cli.discover import find_models
from speculon.core.config import MODELS, EngineConfig
from speculon.core.config.file import CACHE
from speculon.core.errors import ModelNotFound
from speculon.runtimes.torch.drafters.choose import with_drafts

PACKAGE = PACKAGED["smollm2"]


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for packages, and the only one; the current folder is another one."""
    here, packages = tmp_path / "here", tmp_path / "packages"
    here.mkdir()
    packages.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(packages)])
    return packages


@pytest.fixture
def present(absent: Path) -> Path:
    """The GGUF file of a package that cannot be imported."""
    file = absent / PACKAGE.path
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    file.write_bytes(b"GGUF")
    return file


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders of models; the second has another model of a name of the first."""
    for name in ("one/coder", "one/coder-draft", "two/coder", "two/little", "two/notes"):
        (tmp_path / name).mkdir(parents=True)
        if "notes" not in name:
            (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "two" / "file.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv(MODELS, os.pathsep.join(str(tmp_path / name) for name in ("one", "", "none", "two")))
    return tmp_path


def test_the_file_of_a_package_is_found_and_nothing_is_imported(present: Path) -> None:
    assert locate("smollm2") == present and present.parent.name not in sys.modules
    refuse_missing("smollm2")
    assert find_models(["smollm2"], None).models == {"smollm2": "smollm2"}


def test_without_its_package_a_model_is_refused_with_the_way_to_get_it(absent: Path) -> None:
    for look in (locate, refuse_missing):
        with pytest.raises(ModelNotFound, match=r"smollm2 \(.* 98 MB, .* run `speculon pull smollm2`$"):
            look("smollm2")
    Path("smollm2").mkdir()
    with pytest.raises(ModelNotFound, match=r"`speculon pull smollm2`; the folder here is \./smollm2$"):
        locate("smollm2")


def test_the_makefile_installs_the_same_version() -> None:
    (requirement,) = PACKAGE.parts
    assert requirement in (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def test_another_version_of_the_package_does_not_count(present: Path) -> None:
    present.unlink()
    with pytest.raises(ModelNotFound, match="not on this machine"):
        locate("smollm2")


def test_a_pulled_file_comes_before_that_of_a_package(
    present: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pulled = tmp_path / "speculon" / "models" / PACKAGE.path
    pulled.parent.mkdir(parents=True)
    pulled.write_bytes(b"GGUF")
    assert locate("smollm2") == pulled


def test_models_in_folders_have_names_and_the_first_is_taken(folders: Path) -> None:
    assert locate("coder") == folders / "one" / "coder"
    assert locate("little") == folders / "two" / "little"
    assert locate("file") == folders / "two" / "file.gguf"
    assert EngineConfig(model="coder").model == "coder"


def test_a_split_file_has_the_name_before_the_number_of_its_part(folders: Path) -> None:
    parts = [folders / "two" / f"large-0000{number}-of-00002.gguf" for number in (2, 1)]
    for part in parts:
        part.write_bytes(b"GGUF")
        assert name_of(str(part)) == "large"
    assert locate("large") == parts[1]


def test_other_names_stay_what_they_are(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("notes", "nowhere"):
        with pytest.raises(ModelNotFound, match=f"{name}: no such folder"):
            locate(name)
    monkeypatch.chdir(folders / "two")
    assert locate("./coder") == Path("coder") and locate("..") == Path("..")


def test_a_folder_may_have_smollm2_too(folders: Path) -> None:
    (folders / "one" / "smollm2").symlink_to(folders / "one" / "coder")
    assert locate("smollm2") == folders / "one" / "smollm2"


def test_a_model_in_a_folder_has_the_draft_model_of_its_name(folders: Path) -> None:
    assert usual_drafters("coder") == {"draft_model": "coder-draft"} and usual_drafters("little") == {}
    assert with_drafts(EngineConfig(model="coder")).speculation.draft == {"draft_model": "coder-draft"}
    assert with_drafts(EngineConfig(model="little")).speculation.draft is None
    assert with_drafts(EngineConfig(model=str(folders / "one" / "coder"))).speculation.draft is None


def test_smollm2_has_the_drafter_that_is_shipped() -> None:
    drafters = usual_drafters("smollm2")
    assert (
        with_drafts(EngineConfig(model="smollm2")).speculation.draft
        == drafters
        == {"eagle3": "smollm2-eagle3"}
    )
    assert (locate("smollm2-eagle3") / "model.safetensors").is_file()
    assert with_drafts(EngineConfig(model="smollm2", speculation={"draft": {}})).speculation.draft == {}


@pytest.mark.parametrize(
    ("method", "drafts"), [("auto", True), ("eagle3", True), ("suffix", False), ("off", False)]
)
def test_a_model_s_own_drafter_is_loaded_where_the_method_asks_it(method: str, drafts: bool) -> None:
    config = with_drafts(EngineConfig(model="smollm2", speculation={"method": method}))
    assert bool(config.speculation.drafts) == drafts
