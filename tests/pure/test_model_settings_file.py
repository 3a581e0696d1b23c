"""Changes of the file of model settings: comments stay, no change is lost, and no kill leaves half a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from speculon.core.config import models
from speculon.core.config.models import ModelSettingsFile
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.speculation.proposers.registry import methods

METHODS = methods()
TEXT = """\
# models of this server

[models."a/b-1.5"]   # the large one
method = "suffix"  # asks no drafter
draft = { pard = "there" }   # for some

  # indented
top_k = 5


[models.n]
pinned = true
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSettingsFile:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    path = tmp_path / "models.toml"
    path.write_text(TEXT)
    return ModelSettingsFile(path, METHODS)


def test_only_what_changes_is_rewritten(file: ModelSettingsFile) -> None:
    file.update("a/b-1.5", {"top_k": 6, "method": None})
    expected = TEXT.replace("top_k = 5", "top_k = 6").replace('method = "suffix"  # asks no drafter\n', "")
    assert file.path.read_text() == expected
    file.update("n", {"temperature": 0.5})
    assert file.path.read_text() == expected + "temperature = 0.5\n"


def test_line_ends_and_mode_stay(file: ModelSettingsFile) -> None:
    file.path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    file.path.chmod(0o640)
    file.update("a/b-1.5", {"top_k": 6})
    assert file.path.read_bytes() == TEXT.replace("top_k = 5", "top_k = 6").replace("\n", "\r\n").encode()
    assert file.path.stat().st_mode & 0o777 == 0o640


def test_a_file_begins_with_its_first_model(tmp_path: Path) -> None:
    file = ModelSettingsFile(tmp_path / "new.toml", METHODS)
    assert file.tables() == {} and file.names() == {}
    values = {
        "options": {"a": [1, {"b": 2}]},
        "logit_bias": {7: 1.5},
        "stop": ("x",),
        "events": tmp_path / "e",
    }
    file.update("Qwen/Qwen2.5", values)
    file.update("é ü", {"structured": {"regex": "a\\.b\n"}})
    assert file.tables() == {
        "Qwen/Qwen2.5": {
            "options": {"a": [1, {"b": 2}]},
            "logit_bias": {"7": 1.5},
            "stop": ["x"],
            "events": str(tmp_path / "e"),
        },
        "é ü": {"structured": {"regex": "a\\.b\n"}},
    }
    assert file.settings_of("Qwen/Qwen2.5").config.speculation.options == {"a": [1, {"b": 2}]}


@pytest.mark.parametrize(
    "text",
    [
        "models.n.top_k = 1\nmodels.n.top_p = 0.5\nmodels.m.top_k = 1\n",
        "models = { n = { top_k = 1 }, m = {} }\n",
        "[models]\nn = { top_k = 1 }\n[models.m]\n",
        "[models.n]\ntop_k = 1\n[models.n.draft]\npard = 'there'\n[models.m]\n[models.n.options]\na = 1\n",
        "[models.n.draft]\npard = 'there'\n",
        "",
    ],
)
def test_any_form_of_a_table_is_edited_rightly_or_refused(text: str, file: ModelSettingsFile) -> None:
    file.path.write_text(text)
    expected = file.tables()
    expected["n"] = {**expected.get("n", {}), "top_k": 2, "draft": {"eagle3": "there"}}
    try:
        file.update("n", {"top_k": 2, "draft": {"eagle3": "there"}})
    except ConfigError as error:
        assert "this program cannot edit" in str(error) and file.path.read_text() == text
    else:
        assert file.tables() == expected


def test_a_link_stays_a_link(file: ModelSettingsFile, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(file.path)
    ModelSettingsFile(link, METHODS).update("n", {"top_k": 1})
    assert link.is_symlink() and file.tables()["n"]["top_k"] == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 6, "top_p": 2}, "top_p = 2: Input should be less than or equal to 1"),
        ({"top_k": 6, "metod": "off"}, "metod = 'off': unknown field; did you mean method?"),
        ({"top_k": 6, "method": "sufix"}, "method = 'sufix': must be one of "),
        ({"top_k": 6, "draft": "/gone"}, "draft = '/gone': /gone: no such folder"),
        ({"top_k": 6, "draft": {"pard": "there", "eagle3": "/gone"}}, "draft = .*/gone: no such folder"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9: .* left out: .* must be at most max_tokens, 8"),
        ({"method": "eagle3"}, "method = 'eagle3': .* needs a drafter"),
        ({"aliases": ["n"]}, "name = 'n': two models have this name"),
        ({"options": {"a": None}}, "options = {'a': None}: TOML has no form for this value"),
    ],
)
def test_a_refused_change_leaves_the_file(
    changes: dict[str, Any], expected: str, file: ModelSettingsFile
) -> None:
    with pytest.raises(InvalidParameter, match=expected):
        file.update("a/b-1.5", changes)
    assert file.path.read_text() == TEXT


def test_a_conflict_that_was_there_hinders_no_other_change(file: ModelSettingsFile) -> None:
    file.path.write_text("[models.n]\nprompt_lookup_min = 9\n")
    file.update("n", {"top_k": 1})
    file.update("n", {"policy": "fixed"})
    with pytest.raises(InvalidParameter, match="prompt_lookup_min = 8: must be at most prompt_lookup_max, 5"):
        file.update("n", {"prompt_lookup_min": 8})
    file.update("n", {"prompt_lookup_max": 9})


def test_a_broken_file_is_not_written(file: ModelSettingsFile) -> None:
    file.path.write_text("[models.n]\ntop_k = \n")
    with pytest.raises(ConfigError, match="models.toml, line 2"):
        file.update("n", {"top_k": 1})
    assert file.path.read_text() == "[models.n]\ntop_k = \n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/models.toml: the folder of this file does not exist"):
        ModelSettingsFile(tmp_path / "nowhere" / "models.toml", METHODS).update("n", {})
    assert not (tmp_path / "nowhere").exists()


# several writers


def test_what_an_editor_saves_meanwhile_is_kept(
    file: ModelSettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, edited = TEXT.replace("pinned = true", "pinned = false"), models.edited

    def edit(*arguments: Any) -> str:
        file.path.write_text(saved)
        return edited(*arguments)

    monkeypatch.setattr(models, "edited", edit)
    with pytest.raises(
        ConfigError, match="another program changed the file just now, so nothing was written"
    ):
        file.update("a/b-1.5", {"top_k": 6})
    assert file.path.read_text() == saved and not list(file.path.parent.glob(".*.tmp"))


def test_a_lock_that_is_held_is_an_error(file: ModelSettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LOCK_SECONDS", 0.05)
    with FileLock(file.path.with_name(".models.toml.lock")):
        with pytest.raises(ConfigError, match=r"another process has been writing it for 0\.05 s"):
            file.update("n", {"top_k": 6})
    assert file.path.read_text() == TEXT
    file.update("n", {"top_k": 6})


def test_killed_writers_leave_a_whole_file_and_writers_together_lose_no_change(tmp_path: Path) -> None:
    """With a planted write in place, and a planted missing lock, which must be found."""
    program = Path(__file__).with_name("settings_writer.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    killed, killed_in_place, together, together_without_a_lock = payload["found"]
    assert payload["torch"] is False
    assert killed["interrupted"] > 3  # else the kills came when nothing was written
    assert (killed["broken"], killed["left"]) == (0, 0) and killed_in_place["broken"] > 0
    assert together["lost"] == 0 and together_without_a_lock["lost"] > 0
