"""Files of the cache folder are whole or not there, and neither too many nor too old."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import pytest

from speculon.core import kept_files
from speculon.core.kept_files import clean, key_of, read_json, write_json

KEY = key_of("something")
SIZE, WRITES = 20_000, 40


def test_what_was_written_is_read_under_its_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache" / f"{KEY}.json"
    assert read_json(path, KEY) is None
    write_json(path, KEY, {"a": [1, 2.5]})
    assert read_json(path, KEY) == {"a": [1, 2.5]} and read_json(path, key_of("another")) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"key": 1}', b"[" * 100_000])
def test_a_damaged_file_counts_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.json"
    path.write_bytes(content)
    assert read_json(path, KEY) is None


def keep_writing(path: Path, number: int) -> None:
    for _ in range(WRITES):
        write_json(path, KEY, [number] * SIZE)


def keep_writing_in_place(path: Path, number: int) -> None:
    """As nobody should."""
    text = json.dumps({"key": KEY, "content": [number] * SIZE})
    for _ in range(WRITES):
        with path.open("w") as stream:
            stream.write(text[: SIZE // 2])
            stream.flush()
            time.sleep(0.02)
            stream.write(text[SIZE // 2 :])


def broken_reads(path: Path, writer: Callable[[Path, int], None]) -> int:
    """Of the file, while two processes write it."""
    writer(path, 0)
    broken = 0
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        writing = [pool.submit(writer, path, number) for number in (1, 2)]
        while not all(one.done() for one in writing):
            content = read_json(path, KEY)
            broken += content is None or len(content) != SIZE or len(set(content)) != 1
        for one in writing:
            one.result()
    return broken


def test_two_processes_that_write_at_once_leave_whole_files(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.json"
    assert broken_reads(path, keep_writing) == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert broken_reads(path, keep_writing_in_place) > 0, "the twin"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.json"
    write_json(path, KEY, "before")

    def half(stream: BinaryIO) -> None:
        stream.write(b'{"key":')
        raise OSError("no space left")

    kept_files.write(path, half)
    assert read_json(path, KEY) == "before" and [*tmp_path.iterdir()] == [path]


def file_of(folder: Path, name: str, days: float, size: int = 10) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size)
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))
    return path


def test_files_leave_by_age_and_by_size_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = partial("{:040x}{}".format)
    old = [ours(1, ".json"), ours(2, ".safetensors")]
    old += [f"costs-{ours(3, '.json')}", f"llama-{ours(4, '.json')}"]
    old.append(ours(5, ".77-88.safetensors"))  # of a process that was killed
    old.append(f"{6:064x}-cpp.threads.pt2")  # a program
    for name in old:
        file_of(tmp_path, name, days=31)
    foreign = [file_of(tmp_path, name, days=400) for name in ("model.safetensors", "costs.json", "a.gguf")]
    young = [file_of(tmp_path, ours(10 + days, ".json"), days) for days in range(5)]
    clean(tmp_path)
    assert {*tmp_path.iterdir()} == {*foreign, *young}
    monkeypatch.setattr(kept_files, "LIMIT", 30)
    clean(tmp_path)
    assert {*tmp_path.iterdir()} == {*foreign, *young[:3]}


def test_a_use_counts_for_the_age_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.json"
    write_json(path, KEY, "x")
    os.utime(path, (1, 1))
    assert read_json(path, "another key") is None and path.stat().st_mtime == 1
    assert read_json(path, KEY) == "x" and path.stat().st_mtime > time.time() - 60
