"""Changes of the file of model settings: comments stay, no change is lost, and no kill leaves half a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import pytest
from filelock import FileLock

from speculon.core.config.models import ModelSettingsFile, store, written
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
        assert "cannot be edited" in str(error) and file.path.read_text() == text
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
        ({"metod": None}, "metod = None: unknown field"),
        ({"top_k": 6, "method": "sufix"}, "method = 'sufix': known are "),
        ({"top_k": 6, "draft": "/gone"}, "draft = '/gone': /gone: no such folder"),
        ({"top_k": 6, "draft": {"pard": "there", "eagle3": "/gone"}}, "draft = .*/gone: no such folder"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens = 9: min_tokens = 9: is beyond max_tokens 8"),
        ({"prompt_lookup_min": 9}, "prompt_lookup_min = 9: prompt_lookup_min 9 > prompt_lookup_max 5"),
        ({"aliases": ["n"]}, "name = 'n': of two models"),
        ({"seed": 2**63}, "seed = 9223372036854775808: cannot be written as TOML"),
        ({"options": {"a": None}}, "options = {'a': None}: cannot be written as TOML"),
    ],
)
def test_a_refused_change_leaves_the_file(
    changes: dict[str, Any], expected: str, file: ModelSettingsFile
) -> None:
    with pytest.raises(InvalidParameter, match=expected):
        file.update("a/b-1.5", changes)
    assert file.path.read_text() == TEXT


def test_a_model_without_name_is_refused(file: ModelSettingsFile) -> None:
    with pytest.raises(InvalidParameter, match="name = ' '"):
        file.update(" ", {})
    assert file.path.read_text() == TEXT


def test_a_conflict_that_was_there_hinders_no_other_change(file: ModelSettingsFile) -> None:
    file.path.write_text("[models.n]\nprompt_lookup_min = 9\n")
    file.update("n", {"top_k": 1})
    file.update("n", {"policy": "fixed"})
    with pytest.raises(InvalidParameter, match="prompt_lookup_min 8 > prompt_lookup_max 5"):
        file.update("n", {"prompt_lookup_min": 8})
    file.update("n", {"prompt_lookup_max": 9})


def test_a_broken_file_is_not_written(file: ModelSettingsFile) -> None:
    file.path.write_text("[models.n]\ntop_k = \n")
    with pytest.raises(ConfigError, match="models.toml, line 2"):
        file.update("n", {"top_k": 1})
    assert file.path.read_text() == "[models.n]\ntop_k = \n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/models.toml: there is no such folder"):
        ModelSettingsFile(tmp_path / "nowhere" / "models.toml", METHODS).update("n", {})
    assert not (tmp_path / "nowhere").exists()


def test_the_disk_has_the_text_before_its_name(
    file: ModelSettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def sync(number: int) -> None:
        calls.append(f"sync {'folder' if S_ISDIR(os.fstat(number).st_mode) else 'text'}")

    def rename(old: Any, new: Any, replace: Any = os.replace) -> None:
        calls.append(f"replace {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    file.update("n", {"top_k": 1})
    assert calls == ["sync text", "replace models.toml", "sync folder"]


# several writers


def test_what_an_editor_saves_meanwhile_is_kept(
    file: ModelSettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = [TEXT.replace("pinned = true", "pinned = false")]

    def edit(*arguments: Any) -> str:
        found = written.edited(*arguments)
        if saved:
            file.path.write_text(saved.pop())
        return found

    monkeypatch.setattr(store, "edited", edit)
    file.update("a/b-1.5", {"top_k": 6})
    assert file.tables()["n"] == {"pinned": False} and file.tables()["a/b-1.5"]["top_k"] == 6


def test_a_program_that_never_stops_is_an_error(
    file: ModelSettingsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(text: str, *arguments: Any) -> str:
        file.path.write_text(f"{text}#\n")
        return written.edited(text, *arguments)

    monkeypatch.setattr(store, "edited", edit)
    with pytest.raises(ConfigError, match="another program keeps changing it; nothing was written"):
        file.update("n", {"top_k": 6})
    assert file.path.read_text() == TEXT + "#\n" * store.ATTEMPTS
    assert not list(file.path.parent.glob(".*.tmp"))


def test_a_lock_that_is_held_is_an_error(file: ModelSettingsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "LOCK_SECONDS", 0.05)
    with FileLock(file.path.with_name(".models.toml.lock")):
        with pytest.raises(ConfigError, match=r"another process has been writing it for 0\.05 s"):
            file.update("n", {"top_k": 6})
    assert file.path.read_text() == TEXT
    file.update("n", {"top_k": 6})


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What writers of other processes left, by task of `settings_writer.TASKS`."""
    program = Path(__file__).with_name("settings_writer.py")
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("writers"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert payload["torch"] is False
    return payload["found"]


def test_a_killed_writer_leaves_the_old_or_the_new_file(writers: list[dict[str, Any]]) -> None:
    found = writers[0]
    assert found["interrupted"] > 5  # else the kills came when nothing was written
    assert (found["broken"], found["left"]) == (0, 0) and found["most_left"] == 1


def test_a_planted_write_in_place_is_found(writers: list[dict[str, Any]]) -> None:
    assert writers[1]["broken"] > 0


def test_planted_temporary_files_that_pile_up_are_found(writers: list[dict[str, Any]]) -> None:
    found = writers[2]
    assert found["broken"] == 0 and found["most_left"] == found["left"] > 1


def test_writers_together_lose_no_change(writers: list[dict[str, Any]]) -> None:
    assert writers[3] == {"lost": 0}


def test_a_planted_missing_lock_is_found(writers: list[dict[str, Any]]) -> None:
    assert writers[4]["lost"] > 0
