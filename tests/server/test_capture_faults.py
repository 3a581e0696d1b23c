"""Faults of the capture: full and slow disks, kills, its own code. They cost lines, never an answer."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from speculon.server import capture
from speculon.server.capture import Capture
from tests.server.inside import served, wait_until
from tests.server.outside import LOCAL_HTTP, started
from tests.server.test_abuse import refusal
from tests.server.test_capture import ROUTE, by, read, settle, write
from tests.server.test_life import Reader, gone

pytestmark = pytest.mark.timeout(60)


def test_the_bound_holds_over_http(tmp_path: Path) -> None:
    with served(capture=str(tmp_path), capture_gb=0.001) as inside:
        for number in range(12):
            assert inside.post("completions", prompt=f"{number:3000}", n=64, max_tokens=1).status_code == 200
        settle(inside)
        taken = inside.metric("speculon_capture_disk_bytes")
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) <= taken <= 0.001 * 2**30
    kept = [int(line["prompt"]) for line in read(tmp_path)]
    assert sorted(kept) == kept and kept[-1] == 11 and kept[0] > 5 and len(kept) > 200


def refused(*arguments: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_disk_that_refuses_ends_the_capture_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(capture=str(tmp_path)) as inside:
        write(inside, "a")
        settle(inside)
        monkeypatch.setattr(os, "write", refused)
        for _ in range(3):
            write(inside, "a")
            settle(inside)
        monkeypatch.undo()
        write(inside, "a")
        wait_until(lambda: inside.metric("speculon_capture_lost_choices_total") == 4)
        assert (
            inside.metric("speculon_capturing") == 0 and inside.metric("speculon_captured_choices_total") == 1
        )
        lines = [record.getMessage() for record in caplog.records if "capture" in record.getMessage()]
        assert lines == [f"capture has ended: {tmp_path}: No space left on device"], "once"
        assert len(read(tmp_path)) == 1
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refused)
            error = refusal(inside.client.delete(ROUTE, headers=by("a")), 500)
            assert error["message"] == "the captured texts could not be deleted: No space left on device"
        assert inside.client.delete(ROUTE, headers=by("a")).status_code == 204 and not read(tmp_path)


def test_a_fault_of_its_own_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "lines_of", lambda answer, key: 1 / 0)
    with served(capture=str(tmp_path)) as inside:
        write(inside, "a")
        wait_until(lambda: inside.metric("speculon_capturing") == 0)
        write(inside, "a")
    (record,) = [record for record in caplog.records if "capture" in record.getMessage()]
    assert record.levelno == logging.ERROR and record.exc_info and not read(tmp_path)


def test_a_slow_disk_loses_lines_and_delays_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "PENDING_BYTES", 10_000)
    with served(capture=str(tmp_path)) as inside:
        assert isinstance(inside.state.capture, Capture)
        lock = threading.Event()
        inside.state.capture.writer.submit(lock.wait, 30)
        for _ in range(5):
            write(inside, "a", "x" * 3000)
        assert inside.metric("speculon_capture_lost_choices_total") == 2 and not read(tmp_path)
        lock.set()
        wait_until(lambda: inside.metric("speculon_captured_choices_total") == 3)
        write(inside, "a", "say:once more")
    assert len(read(tmp_path)) == 4


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")
def test_what_was_answered_before_a_kill_is_there_after_it_and_the_engine_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "texts"
    with started(tmp_path, "--capture", str(folder), "--capture-gb", "0.5") as server:
        url = server.ready()
        for number in range(5):
            body = {"prompt": f"say:{number}"}
            assert httpx.post(url + "/v1/completions", json=body, **LOCAL_HTTP).status_code == 200
        wait_until(lambda: len(read(folder)) == 5)
        assert (
            f"capturing requests and answers of every API key in {folder}, at most 0.5 GB\n" in server.stderr
        )
        running = Reader(url, max_tokens=4000)
        server.wait_for(running.begun)
        (engine,) = server.children()
        server.process.kill()
        server.process.wait()
        wait_until(lambda: gone(engine))
        assert "Traceback" not in server.stderr, server.stderr
    (path,) = folder.glob("*/*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"prompt": "hal')
    with served(capture=str(folder), capture_key=["one", "two"]) as inside:
        assert "an incomplete last line" in caplog.text
        for key in ("one", "three"):
            write(inside, key, f"say:{key}")
    assert [line["completion"] for line in sorted(read(folder), key=lambda line: line["time"])] == [
        *"01234",
        "one",
    ]
