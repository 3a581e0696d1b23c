"""The record of rounds: what is written, what a bad disk costs, and how a broken file is reported."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError
from speculon.core.types import (
    Ask,
    CallCost,
    Decision,
    Draft,
    Finish,
    Load,
    Reason,
    SpanOutcome,
    Stop,
    Verdict,
    no_draft,
)
from speculon.decoding.rounds import Drafted, Judged, Proposed, Round, Span
from speculon.speculation import events as module
from speculon.speculation.events import Events, older
from tests.builders import make_sequence
from tests.recording import Recording, read

FACTS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 128, "pages": 8}
SECRET = 987654  # a token id
ASKS = (Ask("ngram", 4), Ask("model", 4))
DRAFT = Draft((SECRET,) * 3, ("model",) * 3, confidence=(0.9, 0.8, 0.7), match=5, stop=Stop.CONFIDENCE)


def begun(path: Path, **settings: Any) -> Events:
    made = Events.of(EngineConfig(events=path, **settings), **FACTS)
    assert made is not None
    return made


def tell(events: Events, seq: Any = None, ms: float = 2.0) -> None:
    """One round of one sequence: the lookup has no match, the model three drafts, of which two are kept and
    one is accepted.
    """
    span = Span.of(seq or make_sequence([SECRET] * 4, methods=("ngram", "model")), 3, 1)
    proposals = Proposed("ngram", 4, no_draft(Stop.NO_MATCH)), Proposed("model", 4, DRAFT)
    drafted = Drafted(span, DRAFT.truncated(2), None, Decision.of(ASKS), proposals)
    judged = Judged(drafted, Verdict((SECRET, SECRET), 1, SpanOutcome.TAIL))
    calls = {"model": CallCost(1, 4, 0.5, 7)}
    events.round(Round(Load(1, 2, 3), [judged], calls, 0.5, ms), {"forward": ms})


def written(path: Path, rounds: int = 3, **settings: Any) -> Recording:
    events = begun(path, **settings)
    for _ in range(rounds):
        tell(events)
    events.close()
    return read(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_a_round_is_recorded_with_all_its_numbers(path: Path) -> None:
    recording = written(path, speculation={"method": "ngram", "options": {"key": "hidden"}})
    header, (first, _, last) = recording.header, recording.rounds
    assert (
        header.device == "cpu"
        and header.versions["python"] == sys.version.split()[0]
        and header.block_size == 16
    )
    assert header.speculation["method"] == "ngram" and header.speculation["options"] == ["key"]
    assert (first.running, first.waiting, first.free_pages, first.rows, first.prompt_rows) == (1, 2, 3, 3, 0)
    assert first.target_ms == 2.0 and first.proposals == {"model": CallCost(1, 4, 0.5, 7)}
    assert first.ms == {"forward": 2.0} and last.ms == {"forward": 0.0}, "parts since the line before"
    (row,) = first.texts
    assert row.policy == "fixed" and row.methods == {"ngram": 4, "model": 4}
    assert [(one.method, one.k, one.found) for one in row.proposals] == [
        ("ngram", 4, 0),
        ("model", 4, 3),
    ]
    _, by_model = row.proposals
    assert by_model.confidence == (0.9, 0.8, 0.7)
    assert [(one.match, one.stop) for one in row.proposals] == [(0, "no_match"), (5, "confidence")]
    assert row.drafts == (("model", 2),) and (row.accepted, row.outcome, row.tokens) == (
        1,
        SpanOutcome.TAIL,
        2,
    )
    assert row.reason is None and not recording.cut


def test_plain_rounds_prompts_and_ends_are_recorded(path: Path) -> None:
    events = begun(path)
    prompt, plain = (make_sequence([1] * 6, sample=2, methods=()) for _ in range(2))
    chunk, last = Drafted(Span.of(prompt, 0, 6)), Drafted(Span.of(plain, 5, 1), reason=Reason.COST)
    judged = [Judged(chunk, Verdict((1,))), Judged(last, Verdict((2,), finish=Finish("length")))]
    events.round(Round(Load(2, 0, 1), judged, {}, 0.0, 1.0), {})
    events.close()
    (round_,) = read(path).rounds
    first, second = round_.texts
    assert round_.prompt_rows == 6 and (first.prompt, first.reason, first.sample) == (6, None, 2)
    assert (second.prompt, second.reason, second.finish, second.proposals) == (0, Reason.COST, "length", ())


def test_nothing_of_a_text_is_recorded(path: Path) -> None:
    written(path)
    assert str(SECRET) not in path.read_text()


def test_a_recorded_token_would_be_seen(path: Path) -> None:
    """The twin: a request whose name is the secret."""
    events = begun(path)
    tell(events, make_sequence([1] * 4, request_id=f"r-{SECRET}"))
    events.close()
    assert str(SECRET) in path.read_text()


# size


def test_the_record_stays_within_its_limit_and_its_older_half_goes(path: Path) -> None:
    events = begun(path, events_limit_mb=1)
    texts = [make_sequence([1] * 4, methods=("ngram", "model")) for _ in range(2)]
    for i in range(6000):
        tell(events, texts[i % 2], ms=i)
    events.close()
    size = path.stat().st_size + older(path).stat().st_size
    assert 2**19 < size <= 2**20 and len(list(path.parent.iterdir())) == 2
    recording = read(path)
    times = [round_.target_ms for round_ in recording.rounds]
    assert times == [float(i) for i in range(6000 - len(times), 6000)] and recording.header.part > 1
    assert all(round_.texts[0].methods for round_ in recording.rounds[:2]), "each part repeats the methods"


def test_a_new_run_leaves_the_last_one_beside(path: Path) -> None:
    first, second = written(path, 2), written(path, 5)
    assert len(read(path).rounds) == 5 and len(read(older(path)).rounds) == 2
    assert first.header.run != second.header.run


def test_what_is_no_record_is_not_touched(path: Path) -> None:
    for name in (path, older(path)):
        name.write_text("my novel")
        with pytest.raises(ConfigError, match="is not a record of rounds"):
            begun(path)
        assert name.read_text() == "my novel" and list(path.parent.iterdir()) == [name]
        name.unlink()
    path.touch()
    assert written(path).rounds


@pytest.mark.parametrize("place", ["", "no/such/folder/events.jsonl"])
def test_a_bad_place_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="events = .*must be a file, or a new name, in an existing folder"):
        EngineConfig(events=tmp_path / place)
    with pytest.raises(ConfigError, match="events"):
        EngineConfig(events="/dev/null")


# faults


def fill(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """A disk with so many bytes left; a write that does not fit is made in part, and the next one fails."""
    real = os.write

    def write(file: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(file, data[:room])
        room -= done
        return done

    monkeypatch.setattr(module.os, "write", write)


def test_a_full_disk_costs_the_record_and_one_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = len(written(path, 1).rounds) and len(path.read_bytes().splitlines(keepends=True)[-1])
    head = path.stat().st_size - line
    fill(monkeypatch, head + 10 * line)
    events = begun(path)
    seq = make_sequence([1] * 4, methods=("ngram", "model"))
    for _ in range(50):
        tell(events, seq)
    events.close()
    tell(events, seq)
    (warning,) = [record for record in caplog.records if record.name == "speculon"]
    assert warning.levelno == logging.WARNING and "No space left" in warning.getMessage()
    recording = read(path)
    assert recording.cut and 5 < len(recording.rounds) < 50


def test_a_slow_disk_costs_rounds_that_are_counted_and_no_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, stuck, free, real = begun(path), threading.Event(), threading.Event(), os.write

    def write(file: int, data: bytes) -> int:
        stuck.set()
        free.wait(10)
        return real(file, data)

    monkeypatch.setattr(module.os, "write", write)
    monkeypatch.setattr(module, "MAX_HELD", 4000)
    tell(events)
    assert stuck.wait(10)
    began = time.thread_time()
    for _ in range(40):
        tell(events)
    assert time.thread_time() - began < 1
    free.set()
    while events.writer.held:
        time.sleep(0.01)
    tell(events)
    events.close()
    rounds = read(path).rounds
    assert rounds[-1].lost > 20 and len(rounds) + rounds[-1].lost == 42


def test_a_fault_of_its_own_ends_the_record_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = begun(path)
    tell(events)
    for _ in range(3):
        tell(events, make_sequence([1] * 4, request_id=b"no text"))  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        "no more rounds are recorded: a fault in the record itself"
    ]
    assert len(read(path).rounds) == 1


def test_what_a_process_leaves_is_whole(path: Path) -> None:
    """At its end, without a word; and when it is killed, up to the last whole line."""
    code = (
        "import sys; from pathlib import Path; from tests.pure.test_events import begun, tell; "
        "e = begun(Path(sys.argv[1]))\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code + "for _ in range(30): tell(e)", str(path)], check=True, cwd=root
    )
    assert len(read(path).rounds) == 30

    def written() -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:  # it renames the older file, and then makes its own
            return 0

    endless = subprocess.Popen([sys.executable, "-c", code + "while True: tell(e)", str(path)], cwd=root)
    try:
        while written() < 100_000 or len(read(older(path)).rounds) != 30:
            time.sleep(0.02)
            assert endless.poll() is None
    finally:
        endless.kill()
        endless.wait()
    assert read(path).rounds


def test_nobody_holds_on_to_a_record(path: Path) -> None:
    events = begun(path)
    tell(events)
    gone, thread = weakref.ref(events), events.writer.thread
    del events
    gc.collect()
    assert gone() is None and not thread.is_alive()
    assert len(read(path).rounds) == 1
