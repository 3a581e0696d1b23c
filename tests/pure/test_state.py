"""What is kept across restarts: whole files of their owner alone; none in doubt is believed, written over, or
fatal.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import ConfigError
from speculon.core.types import CallCost, Draft, Load, PromptShape, SpanOutcome, Timing, Verdict
from speculon.engine import state as module
from speculon.engine.state import EVERY, EngineState
from speculon.speculation.control.policies import Policies
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.compose import Proposers
from speculon.speculation.proposers.suffix import Suffix
from tests.builders import decisions, judged_of, make_sequence

MACHINE = {"device": "cpu", "dtype": "float32", "compile": False, "threads": 1}
CONFIG = SpeculationConfig(method="suffix")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """What keeps a state, without a model."""

    def __init__(
        self,
        folder: Path,
        config: SpeculationConfig = CONFIG,
        vocab_size: int = 50,
        parameters: int = 7,
        machine: dict[str, Any] = MACHINE,
    ):
        self.proposers = Proposers(config, TargetFacts(vocab_size, 1000))
        self.policies = Policies(config)
        settings, learned = EngineConfig(state=folder, speculation=config), (self.proposers, self.policies)
        state = EngineState.of(
            settings, *learned, vocab_size=vocab_size, parameters=parameters, machine=machine
        )
        assert state is not None
        self.state, self.loaded = state, state.load()

    def write(self, answer: list[int], pool: str = "me") -> None:
        suffix = self.proposers.find("suffix")
        assert isinstance(suffix, Suffix)
        seq = make_sequence([1, 2, 3], output=answer, pool=pool)
        suffix.admit(seq)
        suffix.release(seq)

    def learn(self) -> Policies:
        """Some rounds of policy goodput."""
        seq = make_sequence([1, 2, 3], methods=("model",), shape=PromptShape("greedy"), policy="goodput")
        for i in range(8):
            decisions(self.policies, [seq], Load(1, 0, 9))
            draft = Draft((4, 5), ("model", "model"), confidence=(0.9, 0.5))
            verdict = Verdict((4, 5, 6)[: 1 + i % 3], i % 3, SpanOutcome.TAIL)
            timing = Timing(8.0 + i % 3, {"model": CallCost(1, 2, 1.0 + i % 2)})
            self.policies.observe([judged_of(seq, draft, verdict)], timing)
        return self.policies


@pytest.fixture(autouse=True)
def same_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "versions", lambda: {"torch": "1"})


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def the(folder: Path, part: str) -> Path:
    (path,) = folder.glob(f"{part}-*")
    return path


def kept(folder: Path) -> Path:
    """By an engine that wrote two answers, and learned."""
    engine = Engine(folder)
    engine.write([4, 5, 6, 7, 8])
    engine.write([9, 9, 9], pool="you")
    engine.learn()
    engine.state.close()
    return folder


def test_what_was_learned_is_known_again(tmp_path: Path) -> None:
    first = Engine(tmp_path / "state")
    assert first.loaded == {"pools": 0, "policies": 0}
    first.write([4, 5, 6, 7, 8])
    learned = first.learn()
    first.state.close()
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) == 0o700
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (tmp_path / "state").iterdir()] == [0o600] * 2

    again = Engine(tmp_path / "state")
    assert again.loaded == {"pools": 1, "policies": 2}
    assert again.proposers.remembered == first.proposers.remembered == (1, 9)
    assert again.policies.state() == learned.state() and again.policies.costs.known
    assert again.policies.costs.proposal("model", 3, 4) == pytest.approx(
        learned.costs.proposal("model", 3, 4), rel=0.2
    )


def test_no_text_and_no_name_is_in_what_policies_keep(tmp_path: Path) -> None:
    folder = kept(tmp_path)
    assert '"me"' not in the(folder, "pools").read_text() + the(folder, "policies").read_text()
    assert (
        "[4,5,6,7,8" not in the(folder, "policies").read_text()
        and "4,5,6,7,8" in the(folder, "pools").read_text()
    )


@pytest.mark.parametrize("other", [{"parameters": 8}, {"vocab_size": 51}], ids=["model", "vocabulary"])
def test_another_models_files_are_left_alone(
    other: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(kept(tmp_path))
    with caplog.at_level(logging.INFO, "speculon"):
        engine = Engine(tmp_path, **other)
    assert engine.loaded == {"pools": 0, "policies": 0} and engine.proposers.remembered == (0, 0)
    assert all(
        f"1 files of other models or settings ({part})" in caplog.text for part in ("pools", "policies")
    )
    engine.state.close()
    assert len(contents(tmp_path)) == 4
    assert {name: text for name, text in contents(tmp_path).items() if name in before} == before


@pytest.mark.parametrize(
    "other",
    [
        {"machine": {**MACHINE, "device": "cuda:0"}},
        {"machine": {**MACHINE, "dtype": "bfloat16"}},
        {"machine": {**MACHINE, "compile": True}},
        {"config": SpeculationConfig(method="suffix", draft={"plug": "a/draft"})},
    ],
    ids=["device", "dtype", "compiled", "draft"],
)
def test_beliefs_are_of_a_machine_and_answers_are_not(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path)
    monkeypatch.setattr(
        Proposers,
        "_build",
        lambda self, method, build=Proposers._build: method != "plug" and build(self, method),
    )
    monkeypatch.setattr("speculon.speculation.proposers.compose.check_method", lambda name: name)
    assert Engine(tmp_path, **other).loaded == {"pools": 2, "policies": 0}


def test_other_versions_believe_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    monkeypatch.setattr(module, "versions", lambda: {"torch": "2"})
    assert Engine(tmp_path).loaded == {"pools": 2, "policies": 0}


DAMAGED: list[Any] = [
    pytest.param("pools", lambda text: text[:-9], id="half a file"),
    pytest.param("pools", lambda text: "", id="an empty file"),
    pytest.param("pools", lambda text: "\0\xff" + text, id="no text"),
    pytest.param("pools", lambda text: "[" * 100_000, id="too deep"),
    pytest.param("pools", lambda text: text.replace("state 2", "state 1"), id="another format"),
    pytest.param(
        "pools", lambda text: text.replace('"vocab_size":50', '"vocab_size":51'), id="another model"
    ),
    pytest.param("pools", lambda text: text.replace('"suffix"', '"nosuch"'), id="an unknown method"),
    pytest.param("pools", lambda text: text.replace("[1,2,3,4,5", "[1,2,[3],4,5"), id="a list for a token"),
    pytest.param("pools", lambda text: text.replace(",4,5,", ",4,50,"), id="no token"),
    pytest.param(
        "pools",
        lambda text: "\n".join(line for line in text.split("\n") if "4,5,6" not in line),
        id="a pool is gone",
    ),
    pytest.param("policies", lambda text: text.replace('"goodput"', '"nosuch"'), id="an unknown policy"),
    pytest.param("policies", lambda text: text.replace('"model":[[', '"model":[[9,'), id="a place of five"),
    pytest.param(
        "policies", lambda text: text.replace('["costs",{"":[', '["costs",{"":["x",'), id="no number"
    ),
    pytest.param("policies", lambda text: text.replace('"costs"', '"coasts"'), id="no costs"),
    pytest.param("policies", lambda text: text.replace('"model":[[', '"model":[["x"],['), id="no place"),
    pytest.param(
        "policies", lambda text: text.replace('"model":[[16,', '"model":[[99,'), id="a position too deep"
    ),
]


@pytest.mark.parametrize(("part", "change"), DAMAGED)
def test_a_damaged_file_is_reported_once_and_stays(
    part: str, change: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = the(kept(tmp_path), part)
    broken = change(path.read_text())
    assert broken != path.read_text()
    path.write_bytes(broken.encode("latin-1"))
    engine = Engine(tmp_path)
    assert engine.loaded[part] == 0 and sum(engine.loaded.values()) == 2
    if part == "pools":
        assert engine.proposers.remembered == (0, 0)
    else:
        assert not any(
            acceptance for _, learned in engine.policies.state()[1:] for acceptance in learned.values()
        )
    engine.write([5, 5, 5])
    engine.learn()
    engine.state.save()
    engine.state.close()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(path) in record.getMessage() and "left as it is" in record.getMessage()
    assert path.read_bytes() == broken.encode("latin-1"), "not written over"


def test_a_file_written_over_in_spite_of_doubt_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted error: a part that is kept although its file is not believed."""
    path = the(kept(tmp_path), "pools")
    path.write_text("x")
    engine = Engine(tmp_path)
    for part in engine.state._parts:
        part.readable = True
    engine.state.close()
    assert path.read_text() != "x"


# when


def test_it_writes_now_and_then_beside_the_engine(tmp_path: Path) -> None:
    clock, engine = Clock(), Engine(tmp_path)
    engine.state.clock, engine.state.due = clock, clock.now + EVERY
    engine.write([4, 5, 6])
    engine.state.tick()
    assert contents(tmp_path) == {} and engine.state.writing is None
    clock.now += EVERY
    engine.state.tick()
    assert engine.state.writing is not None
    engine.state.writing.join()
    assert Engine(tmp_path).loaded["pools"] == 1
    engine.write([7, 8, 9], pool="you")
    engine.state.tick()
    assert Engine(tmp_path).loaded["pools"] == 1, "not due again"


def test_a_late_writing_does_not_undo_what_was_saved_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pool that was deleted would come back with the next start."""
    held, write = threading.Event(), module.write

    def slow(path: Path, lines: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            held.wait(5)
        write(path, lines)

    monkeypatch.setattr(module, "write", slow)
    engine = Engine(tmp_path)
    engine.write([4, 5, 6])
    engine.state.due = 0.0
    engine.state.tick()
    assert engine.proposers.forget("", "me") == 1
    threading.Timer(0.05, held.set).start()
    engine.state.save()
    assert Engine(tmp_path).loaded["pools"] == 0


def test_it_is_kept_when_its_owner_goes(tmp_path: Path) -> None:
    class Owner:
        pass

    engine, owner = Engine(tmp_path), Owner()
    engine.state.save_at_end(owner)
    engine.write([4, 5, 6])
    del owner
    gc.collect()
    assert Engine(tmp_path).loaded["pools"] == 1


# bad folders and disks


def test_a_folder_that_cannot_be_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "no" / "where", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="state"):
            EngineConfig(state=wrong)
    assert EngineConfig().state is None, "off by default"


def test_a_full_disk_costs_the_state_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(kept(tmp_path))
    engine = Engine(tmp_path)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    engine.write([5, 5, 5], pool="new")
    for _ in range(3):
        engine.state.save()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No space left" in record.getMessage()
    assert contents(tmp_path) == before, "no half file, nothing beside"
    monkeypatch.undo()
    monkeypatch.setattr(module, "versions", lambda: {"torch": "1"})
    engine.state.save()
    assert Engine(tmp_path).loaded["pools"] == 3


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    module.make_folder(tmp_path)
    assert contents(tmp_path) == {}, "nothing is left of the attempt"
    for owner, name in ((module.tempfile, "TemporaryFile"), (Path, "mkdir")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, read_only)
            with pytest.raises(ConfigError, match=f"state = '{tmp_path}': Read-only file system"):
                module.make_folder(tmp_path)
