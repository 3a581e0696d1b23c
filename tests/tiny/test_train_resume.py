"""A killed and resumed run reads the same batches and ends at the same loss."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speculon.train.data import DocumentRows
from speculon.train.eagle3 import Eagle3Training
from speculon.train.run import train
from speculon.train.settings import HeadSettings
from tests.tiny.training import QUICK, Silent, make_world, settings

pytestmark = pytest.mark.soak
STEPS, TOLERANCE = 200, 1e-3
RUN = {"steps": STEPS, "lr": 2e-3, "eval_rows": 0, "save_minutes": 5e-3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("resume"))


def log_of(folder: Path) -> list[dict[str, float | str]]:
    """Whole lines: a killed run may leave half of one."""
    return [
        json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines() if line.endswith("}")
    ]


def last_of(folder: Path) -> dict[int, tuple[str, float]]:
    """By step its batch and loss, as read last."""
    return {int(entry["step"]): (str(entry["batch"]), float(entry["loss"])) for entry in log_of(folder)}


def go_on(world: Path, name: str) -> dict[int, tuple[str, float]]:
    given = settings(world, name, **RUN)
    train(Eagle3Training(HeadSettings(ttt=2)), given, Silent())
    return last_of(given.folder)


@pytest.fixture(scope="module")
def whole(world: Path) -> dict[int, tuple[str, float]]:
    return go_on(world, "whole")


def start(world: Path, name: str) -> subprocess.Popen[bytes]:
    """The command, until it has a checkpoint and is about a quarter through."""
    given = {
        **QUICK,
        **RUN,
        "target": world / "target",
        "data": world / "texts",
        "out": world / name,
        "ttt": 2,
    }
    options = [word for key, value in given.items() for word in ("--" + key.replace("_", "-"), str(value))]
    command = [sys.executable, "-m", "speculon.cli", "train", "eagle3", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder, deadline = world / f"{name}.work", time.monotonic() + 100
    while time.monotonic() < deadline and not (
        (folder / "checkpoint.safetensors").exists() and len(log_of(folder)) > STEPS // 4
    ):
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    return process


@pytest.fixture(scope="module")
def killed(world: Path) -> Path:
    process = start(world, "killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    folder = world / "killed.work"
    assert len(log_of(folder)) < STEPS
    return folder


def differs(found: dict[int, tuple[str, float]], expected: dict[int, tuple[str, float]]) -> str | None:
    """What is not as it would have been without the interruption."""
    if {step: batch for step, (batch, _) in found.items()} != {
        step: batch for step, (batch, _) in expected.items()
    }:
        return "batches"
    return "loss" if any(abs(found[n][1] - expected[n][1]) > TOLERANCE for n in expected) else None


def copy_of(killed: Path, name: str) -> Path:
    return Path(shutil.copytree(killed, killed.with_name(f"{name}.work")))


def test_a_killed_and_resumed_run_ends_at_the_same_loss(
    world: Path, killed: Path, whole: dict[int, tuple[str, float]]
) -> None:
    folder = copy_of(killed, "again")
    before = len(log_of(folder))
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')  # where a kill may leave it
    assert differs(go_on(world, "again"), whole) is None
    assert len(log_of(world / "again.work")) < before + STEPS  # it went on, and did not begin anew
    assert all(json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()), (
        "a torn line took the next one along"
    )
    sessions = json.loads((world / "again" / "training.json").read_text())["sessions"]
    assert [one["from_step"] > 0 for one in sessions] == [False, True]


def test_a_lost_optimizer_state_is_found(
    world: Path, killed: Path, whole: dict[int, tuple[str, float]]
) -> None:
    checkpoint = copy_of(killed, "forgetful") / "checkpoint.safetensors"
    with safe_open(checkpoint, "pt") as file:
        facts = file.metadata()
    save_file(
        {name: value for name, value in load_file(checkpoint).items() if name.startswith("model/")},
        checkpoint,
        facts,
    )
    assert differs(go_on(world, "forgetful"), whole) == "loss"


def test_a_lost_data_position_is_found(
    world: Path, killed: Path, whole: dict[int, tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(killed, "astray")
    right = DocumentRows.chosen
    monkeypatch.setattr(
        DocumentRows, "chosen", lambda self, seed, step, count: right(self, seed, step + 1, count)
    )
    assert differs(go_on(world, "astray"), whole) == "batches"


def test_a_stop_signal_saves_and_reports_how_to_resume(
    world: Path, whole: dict[int, tuple[str, float]]
) -> None:
    process = start(world, "stopped")
    process.send_signal(signal.SIGTERM)
    output = process.communicate()[1].decode()
    steps = len(log_of(world / "stopped.work"))
    assert process.returncode == 130
    assert f"stopped at step {steps}; the same command resumes from" in output
    assert not (world / "stopped").exists()
    assert differs(go_on(world, "stopped"), whole) is None
    assert [int(entry["step"]) for entry in log_of(world / "stopped.work")] == list(range(1, STEPS + 1))
