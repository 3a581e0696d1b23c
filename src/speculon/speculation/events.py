"""Writes the record of rounds, one line each. It may cost its own lines, and never a token or a step."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from speculon.core.errors import ConfigError
from speculon.decoding.rounds import Judged, Proposed, Round

if TYPE_CHECKING:
    from speculon.core.config import EngineConfig

VERSION = 2
MARK = "speculon_events"  # the first key of a first line
BEGINNING = f'{{"{MARK}":'.encode()
PAUSE = 0.25  # seconds between two writes: what a kill may cost
MAX_HELD = 2**24  # bytes that wait for a slow disk; beyond, rounds are lost and counted
PATIENCE = 5.0  # seconds at the end for what still waits
MARGIN = 2**16  # bytes of half a limit, for its last line and the header
NEXT_FILE = b""
PACKAGES = ("speculon", "torch", "transformers")
SETTINGS = ("model", "max_num_seqs", "max_batch_tokens", "block_size")  # in the first line

log = logging.getLogger("speculon")


class Writer:
    """Lines to a file and, past half of the limit, to a new one: `path` is the younger half and `path`.1 the
    older.

    A thread of its own writes, so a step never waits for the disk. An error of the disk ends the record, with
    a warning.
    """

    def __init__(self, path: Path, limit: int, head: Callable[[int], bytes]):
        self.path, self._half, self._head = path, limit // 2 - MARGIN, head
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._lines: list[bytes] = []
        self.held = self._size = self._begun = 0
        self._file = -1
        self.part = 0  # of the record, that the next line goes to
        self.open = True
        try:
            for name in (path, older(path)):
                if name.exists() and not is_record(name):
                    why = (
                        f"{name} exists and is not a record of rounds, so it is not overwritten; name "
                        "another file"
                    )
                    raise ConfigError(f"events = {str(path)!r}: {why}")
            self._begin()
        except OSError as error:
            raise ConfigError(f"events = {str(path)!r}: {error.strerror or error}") from None
        self.thread = threading.Thread(target=self._work, name="speculon-events", daemon=True)
        self.thread.start()

    def put(self, line: bytes) -> bool:
        """Whether the line was taken: not while too many wait for the disk."""
        with self._lock:
            if self.held + len(line) > MAX_HELD:
                return False
            self._lines.append(line)
            self.held += len(line)
            self._size += len(line)
            if self._size > self._half:
                self._lines.append(NEXT_FILE)
                self.part, self._size = self.part + 1, 0
        return True

    def close(self) -> None:
        """Writes what waits and lets go of the file."""
        self.open = False
        self._wake.set()
        if threading.current_thread() is not self.thread:  # where the garbage is collected nobody chooses
            self.thread.join(PATIENCE)

    def _begin(self) -> None:
        """A new file; what stood under the name is now the older half."""
        self._let_go()
        if self.path.exists():
            os.replace(self.path, older(self.path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, flags, 0o666)
        self._write(self._head(self._begun))
        self._begun += 1

    def _work(self) -> None:
        try:
            while self.open:
                self._wake.wait(PAUSE)
                self._flush()
            self._flush()
        except OSError as error:
            log.warning("recording of rounds in %s has ended: %s", self.path, error.strerror or error)
        finally:
            self.open = False
            self._let_go()

    def _let_go(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _flush(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        for new, some in groupby(lines, key=lambda line: line == NEXT_FILE):
            if new:
                self._begin()
            else:
                self._write(b"".join(some))
        with self._lock:
            self.held -= sum(map(len, lines))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


def older(path: Path) -> Path:
    """Where the part before the last rotation lies."""
    return path.with_name(path.name + ".1")


def is_record(path: Path) -> bool:
    """Whether a file is a record, of whatever version, or empty."""
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) in (b"", BEGINNING)


class Events:
    """What the engine tells of each round, as lines. A fault in here ends the record, with one warning."""

    @classmethod
    def of(cls, config: EngineConfig, **facts: Any) -> Events | None:
        """Where the settings ask for it; `facts` are for the first line. Raises `ConfigError`."""
        if config.events is None:
            return None
        began = round(time(), 3)
        fixed = {"run": secrets.token_hex(8), "time": began, "versions": versions(), **facts}
        fixed |= {name: getattr(config, name) for name in SETTINGS}
        fixed["speculation"] = speculation_settings(config)
        limit = int(config.events_limit_mb * 2**20)
        writer = Writer(config.events, limit, lambda part: as_line({MARK: VERSION, "part": part} | fixed))
        return cls(writer, began)

    def __init__(self, writer: Writer, began: float):
        self.writer, self._began = writer, began
        self._known: set[int] = set()  # texts whose methods this part tells
        self._part = 0
        self._lost = 0  # rounds since the last line
        self._ms: dict[str, float] = {}  # the profile at the last line
        # also at the end of the process; the writer does not know this object
        self.close = weakref.finalize(self, writer.close)

    def round(self, done: Round, profile: Mapping[str, float]) -> None:
        """Writes the line of a committed round; `profile` holds the ms of all steps so far, by part."""
        if not self.writer.open:
            return
        try:
            if self._part != self.writer.part:
                self._part = self.writer.part
                self._known.clear()
            line = self._line(done, profile)
            self._ms = dict(profile)
            taken = self.writer.put(as_line({**line, "lost": self._lost} if self._lost else line))
            self._lost = 0 if taken else self._lost + 1
        except Exception:
            log.exception("no more rounds are recorded: a fault in the record itself")
            self.close()

    def _line(self, done: Round, profile: Mapping[str, float]) -> dict[str, Any]:
        return {
            "time": round(time() - self._began, 4),
            "running": done.load.running,
            "waiting": done.load.waiting,
            "free_pages": done.load.free_pages,
            "rows": done.rows,
            "prompt_rows": done.rows - sum(1 + len(one.draft.tokens) for one in done.decoding),
            "target_ms": None if done.step_ms is None else round(done.step_ms, 4),
            "ms": {part: round(ms - self._ms.get(part, 0.0), 4) for part, ms in profile.items()},
            **({"repair_ms": round(done.repair_ms, 4)} if done.repair_ms else {}),
            "proposals": {method: call._replace(ms=round(call.ms, 4)) for method, call in done.calls.items()},
            "texts": [self._sequence(one) for one in done.judged if one.span.samples],
        }

    def _sequence(self, judged: Judged) -> dict[str, Any]:
        span, seq, verdict = judged.span, judged.seq, judged.verdict
        request = seq.request
        fields: dict[str, Any] = {"id": request.id, "policy": request.policy, "tokens": len(verdict.tokens)}
        if seq.sample:
            fields["sample"] = seq.sample
        if seq.id not in self._known:
            self._known.add(seq.id)
            fields["methods"] = {method: request.max_drafts[method] for method in seq.methods}
            fields |= {"adapter": request.adapter} if request.adapter else {}
            fields |= {"prompt_class": request.shape.name, "marker": request.shape.marker}
        fields |= drafted_fields(judged) if span.decodes else {"prompt": span.length}
        fields |= {"outcome": verdict.outcome} if verdict.outcome else {}
        return fields | ({"finish": verdict.finish.reason} if verdict.finish else {})


def drafted_fields(judged: Judged) -> dict[str, Any]:
    """What was proposed and verified for a sequence, or why nothing was."""
    fields: dict[str, Any] = {}
    drafted = judged.drafted
    if drafted.proposals:
        fields["proposals"] = [*map(proposal_fields, drafted.proposals)]
    if sources := drafted.draft.sources:
        fields["drafts"] = [(source, len(list(some))) for source, some in groupby(sources)]
        fields["accepted"] = judged.verdict.accepted
    if drafted.estimate:
        fields["estimate"] = [round(value, 3) for value in drafted.estimate]
    return fields | ({"reason": drafted.reason} if drafted.reason else {})


def proposal_fields(proposed: Proposed) -> dict[str, Any]:
    draft = proposed.draft
    fields: dict[str, Any] = {"method": proposed.method, "k": proposed.k, "found": len(draft.tokens)}
    if draft.confidence:
        fields["confidence"] = [round(value, 3) for value in draft.confidence]
    fields |= {"match": draft.match} if draft.match else {}
    return fields | ({"stop": draft.stop} if draft.stop else {})


def as_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def versions() -> dict[str, str]:
    installed = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def speculation_settings(config: EngineConfig) -> dict[str, Any]:
    """Of speculation. What a plug-in was given stays out: nobody knows what is in it."""
    settings = config.speculation
    drafts = {
        method: draft if isinstance(draft, str) else type(draft).__name__
        for method, draft in settings.drafts.items()
        if draft
    }
    fields = settings.model_dump(mode="json", exclude={"draft", "options"})
    return fields | {"draft": drafts, "options": sorted(settings.options)}
