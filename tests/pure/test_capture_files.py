"""Captured lines in their folder: bounded, whole after a kill, and nobody else's files touched."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.server import line_files
from speculon.server.capture import Capture
from speculon.server.line_files import BLOCK, Files

A, B = "a" * 32, "b" * 32
MB = 2**20


def line(number: int, size: int = 1000) -> bytes:
    return f"{number:{size - 1}}\n".encode()


def numbers(root: Path) -> list[int]:
    """Of all lines; each of them is whole."""
    texts = [path.read_text() for path in root.glob("*/*.jsonl")]
    assert all(text.endswith("\n") for text in texts)
    return sorted(int(one) for text in texts for one in text.splitlines())


def on_disk(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*"))


# the bound


def check_bound(root: Path) -> None:
    files = Files(root, MB)
    for number in range(3000):
        assert files.append((A, B)[number % 2], line(number))
    kept = numbers(root)
    assert kept == list(range(kept[0], 3000)), "the oldest went, and only those"
    assert on_disk(root) <= files.disk_bytes <= MB, "the bound is held"
    assert len(kept) > 700, "and used: a file is a sixteenth of it"


def test_the_oldest_go_beyond_the_bound(tmp_path: Path) -> None:
    check_bound(tmp_path / "new")


@pytest.mark.parametrize(
    "name, wrong",
    [
        pytest.param(
            "_delete",
            lambda files, path: files._sizes.pop(path) and setattr(files, "disk_bytes", 0),
            id="nothing is deleted",
        ),
        pytest.param("append", lambda files, label, line: True, id="nothing is written"),
    ],
)
def test_a_bound_that_is_not_held_is_found_out(
    name: str, wrong: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, name, wrong)
    with pytest.raises((AssertionError, IndexError)):
        check_bound(tmp_path)


def test_a_line_each_of_many_keys_is_bounded_by_what_the_disk_takes(tmp_path: Path) -> None:
    files = Files(tmp_path, MB)
    for number in range(400):
        files.append(f"{number:032x}", line(number, 100))
    assert on_disk(tmp_path) <= files.disk_bytes <= MB
    kept = numbers(tmp_path)
    assert (
        kept == list(range(kept[0], 400))
        and len(list(tmp_path.iterdir())) == len(kept) >= MB // (2 * BLOCK) - 1
    )


def test_the_file_that_was_written_longest_ago_goes_first(tmp_path: Path) -> None:
    files = Files(tmp_path, MB)
    files.append(A, line(0))
    for number in range(1, 900):
        files.append(B, line(number))
        if number == 500:
            files.append(A, line(501_000))
    assert {0, 501_000} < set(numbers(tmp_path)), "its first line is old, its last is not"
    for number in range(900, 1600):
        files.append(B, line(number))
    assert not {0, 501_000} & set(numbers(tmp_path))


def test_a_line_larger_than_all_is_not_taken(tmp_path: Path) -> None:
    files = Files(tmp_path, MB)
    files.append(A, line(1))
    assert not files.append(A, line(2, MB)) and numbers(tmp_path) == [1]
    assert files.append(A, line(3, MB // 2)) and numbers(tmp_path) == [1, 3]


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    for number in range(2000):
        if number % 100 == 0:
            files = Files(tmp_path, MB)
        files.append(A, line(number))
    kept = numbers(tmp_path)
    assert kept == list(range(kept[0], 2000)) and 700 < len(kept) and on_disk(tmp_path) <= MB
    assert Files(tmp_path, MB).disk_bytes == files.disk_bytes
    Files(tmp_path, MB // 4).append(A, line(2000))
    assert numbers(tmp_path)[-1] == 2000 and on_disk(tmp_path) <= MB // 4, "a bound that was lowered"


def test_only_its_own_files_are_touched(tmp_path: Path) -> None:
    strange = [tmp_path / "mine.jsonl", tmp_path / "data" / "00000001.jsonl", tmp_path / A / "notes.jsonl"]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("no line")
    files = Files(tmp_path, MB)
    for number in range(1500):
        files.append(A, line(number))
    files.forget(A)
    assert [path.read_text() for path in strange] == ["no line"] * 3
    assert sorted(path for path in tmp_path.rglob("*.jsonl")) == sorted(strange)


def test_who_takes_files_away_does_no_harm(tmp_path: Path) -> None:
    files = Files(tmp_path, MB)
    for number in range(1500):
        files.append(A, line(number))
        if number == 700:
            for path in tmp_path.glob("*/*.jsonl"):
                path.unlink()
            (tmp_path / A).rmdir()
    assert numbers(tmp_path)[-1] == 1499 and files.disk_bytes <= MB


def test_files_are_their_owners(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Files(tmp_path / "new", MB).append(A, line(1))
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", tmp_path / "new" / A)]
    (file,) = tmp_path.glob("new/*/*.jsonl")
    assert modes == [0o700, 0o700] and stat.S_IMODE(file.stat().st_mode) == 0o600


# deletion


def test_what_is_forgotten_is_gone_and_the_rest_is_not(tmp_path: Path) -> None:
    files = Files(tmp_path, MB)
    for number in range(400):
        files.append((A, B)[number % 2], line(number))
    assert files.forget(A) == 4 and files.forget(A) == 0 and not (tmp_path / A).exists()
    assert numbers(tmp_path) == list(range(1, 400, 2))
    files.append(A, line(1000))
    assert numbers(tmp_path)[-1] == 1000 and files.disk_bytes == Files(tmp_path, MB).disk_bytes


# kills and disks


def check_mended(root: Path, left: bytes) -> None:
    files = Files(root, MB)
    for number in range(20):
        files.append(A, line(number))
    (path,) = root.glob("*/*.jsonl")
    with path.open("ab") as file:
        file.write(left)
    files = Files(root, MB)
    files.append(A, line(20))
    assert numbers(root) == list(range(21)) and files.disk_bytes == Files(root, MB).disk_bytes


@pytest.mark.parametrize(
    "left", [b"", b"4", b"7" * 999, b"8" * (2 * BLOCK + 17)], ids=["nothing", "a byte", "most", "blocks"]
)
def test_half_a_line_is_cut_off(left: bytes, tmp_path: Path) -> None:
    check_mended(tmp_path, left)


def test_half_a_line_that_stays_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "mend", lambda path: path.stat().st_size)
    with pytest.raises((AssertionError, ValueError)):
        check_mended(tmp_path, b"4")


def test_a_file_that_is_half_a_line_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / A).mkdir()
    (tmp_path / A / "00000007.jsonl").write_bytes(b"half")
    Files(tmp_path, MB).append(A, line(1))
    assert numbers(tmp_path) == [1]


def test_a_full_disk_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path, MB)
    files.append(A, line(1))
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:600])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.append(A, line(2))
    monkeypatch.undo()
    assert numbers(tmp_path) == [1]


# settings


@pytest.mark.parametrize(
    "settings, name",
    [
        pytest.param({"capture": "/no/such/place"}, "capture", id="no such place"),
        pytest.param({"capture_gb": 0}, "capture_gb", id="nothing"),
        pytest.param({"capture_key": " "}, "capture_key", id="an empty key"),
        pytest.param(
            {"api_key": "one", "capture_key": "secret"}, "capture_key", id="a key that opens nothing"
        ),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        ServeConfig(**settings)
    assert refused.value.name == name and "secret" not in str(refused.value)


def test_a_folder_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Capture.of(ServeConfig()) is None
    config = ServeConfig(capture=tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"capture: .*new: Permission denied"):
        Capture.of(config)
