"""Writes the record of rounds, one line each. It may cost its own lines, and never a token or a step."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from speculon.core import NO_DRAFT, Decision, Draft, Load, Plan, Proposal, Proposed, Sequence, Span, Verdict
from speculon.errors import ConfigError
from speculon.events import MARK, VERSION, begins_well, older

if TYPE_CHECKING:
    from speculon.config import EngineConfig

PAUSE = 0.25  # seconds between two writes: what a kill may cost
MOST_HELD = 2**24  # bytes that wait for a slow disk; beyond, rounds are lost and counted
PATIENCE = 5.0  # seconds at the end for what still waits
MARGIN = 2**16  # bytes of half a limit, for its last line and the header
NEXT_FILE = b""
PACKAGES = ("speculon", "torch", "transformers")

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
        self._held = self._size = self._begun = 0
        self._file = -1
        self.part = 0  # of the record, that the next line goes to
        self.open = True
        try:
            for name in (path, older(path)):
                if name.exists() and not begins_well(name):
                    raise ConfigError(
                        f"events = {str(path)!r}: {name} is no record of rounds, and would be lost"
                    )
            self._begin()
        except OSError as error:
            raise ConfigError(f"events = {str(path)!r}: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._work, name="speculon-events", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> bool:
        """Whether the line was taken: not while too many wait for the disk."""
        with self._lock:
            if self._held + len(line) > MOST_HELD:
                return False
            self._lines.append(line)
            self._held += len(line)
            self._size += len(line)
            if self._size > self._half:
                self._lines.append(NEXT_FILE)
                self.part, self._size = self.part + 1, 0
        return True

    def close(self) -> None:
        """Writes what waits and lets go of the file."""
        self.open = False
        self._wake.set()
        if threading.current_thread() is not self._thread:  # where the garbage is collected nobody chooses
            self._thread.join(PATIENCE)

    def _begin(self) -> None:
        """A new file; what stood under the name is now the older half."""
        self._let_go()
        if self.path.exists():
            os.replace(self.path, older(self.path))
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
        )
        self._write(self._head(self._begun))
        self._begun += 1

    def _work(self) -> None:
        try:
            while self.open:
                self._wake.wait(PAUSE)
                self._flush()
            self._flush()
        except OSError as error:
            log.warning("no more rounds are recorded in %s: %s", self.path, error.strerror or error)
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
            self._held -= sum(map(len, lines))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


class Events:
    """What the engine tells of each round, as lines. A fault in here ends the record, with one warning."""

    @classmethod
    def of(cls, config: EngineConfig, **facts: Any) -> Events | None:
        """Where the settings ask for it; `facts` of the engine are for the first line.

        Raises `ConfigError` for a bad file.
        """
        if config.events is None:
            return None
        fixed: dict[str, Any] = {
            "run": secrets.token_hex(8),
            "time": round(time(), 3),
            "versions": versions(),
            **facts,
        }
        fixed |= {
            name: getattr(config, name)
            for name in ("model", "max_num_seqs", "max_batch_tokens", "block_size")
        }
        fixed["speculation"] = settings_of(config)
        limit = int(config.events_limit_mb * 2**20)
        return cls(
            Writer(config.events, limit, lambda part: as_line({MARK: VERSION, "part": part} | fixed)),
            fixed["time"],
        )

    def __init__(self, writer: Writer, began: float):
        self._writer, self._began = writer, began
        self._known: set[int] = set()  # texts whose methods this part tells
        self._part = 0
        self._lost = 0  # rounds since the last line
        # (sequence, method) -> what was proposed in this round
        self._found: dict[tuple[int, str], Draft] = {}
        self._ms: dict[str, float] = {}  # the profile at the last line
        # also at the end of the process; the writer does not know this object
        self.close = weakref.finalize(self, writer.close)

    def round(
        self,
        load: Load,
        plan: Plan,
        planned: list[Decision],
        decisions: list[Decision],
        proposed: Iterable[Proposed],
        verdicts: list[Verdict],
        proposals: Mapping[str, Proposal],
        target_ms: float,
        profile: Mapping[str, float],
    ) -> None:
        """Tells of a round that was committed.

        `planned` is what was reserved, `decisions` what it came to, by decoding span.
        """
        if not self._writer.open:
            return
        try:
            if self._part != self._writer.part:
                self._part = self._writer.part
                self._known.clear()
            self._found = {
                (seq.id, method): draft
                for method, seqs, drafts in proposed
                for seq, draft in zip(seqs, drafts, strict=True)
            }
            decided = {
                span.seq.id: both for span, *both in zip(plan.decoding, planned, decisions, strict=True)
            }
            texts = [
                self._text(s, v, *decided.get(s.seq.id, ()))
                for s, v in zip(plan.spans, verdicts, strict=True)
                if s.samples
            ]
            rows = sum(span.rows for span in plan.spans)
            line = {
                "time": round(time() - self._began, 4),
                "running": load.running,
                "waiting": load.waiting,
                "free_pages": load.free_pages,
                "rows": rows,
                "prompt_rows": rows - sum(1 + len(span.draft.tokens) for span in plan.decoding),
                "target_ms": round(target_ms, 4),
                "ms": {part: round(ms - self._ms.get(part, 0.0), 4) for part, ms in profile.items()},
                "proposals": {
                    method: call._replace(ms=round(call.ms, 4)) for method, call in proposals.items()
                },
                "texts": texts,
            }
            self._ms = dict(profile)
            taken = self._writer.put(as_line({**line, "lost": self._lost} if self._lost else line))
            self._lost = 0 if taken else self._lost + 1
            self._found = {}
        except Exception:
            log.exception("no more rounds are recorded: a fault in the record itself")
            self.close()

    def _text(
        self, span: Span, verdict: Verdict, planned: Decision | None = None, decision: Decision | None = None
    ) -> dict[str, Any]:
        seq = span.seq
        told: dict[str, Any] = {"id": seq.request_id, "policy": seq.policy, "tokens": len(verdict.tokens)}
        if seq.sample:
            told["sample"] = seq.sample
        if seq.id not in self._known:
            self._known.add(seq.id)
            told["methods"] = {method: seq.most(method) for method in seq.methods}
            told |= {
                "prompt_class": seq.shape.name,
                "marker": seq.shape.marker,
                "cold_matches": seq.cold_matches,
            }
        if planned is None or decision is None:
            told["prompt"] = span.length
        elif asked := self._asked(seq, planned, bool(span.draft.tokens)):
            told["asked"] = asked
        if span.draft.tokens:
            told["drafts"] = [(source, len(list(some))) for source, some in groupby(span.draft.sources)]
            told["accepted"] = verdict.accepted
            told |= {"estimate": [round(value, 3) for value in span.estimate]} if span.estimate else {}
        told |= {"kind": verdict.kind} if verdict.kind else {}
        told |= {"reason": decision.reason} if decision and decision.reason else {}
        return told | ({"finish": verdict.finish.reason} if verdict.finish else {})

    def _asked(self, seq: Sequence, planned: Decision, drafted: bool) -> list[dict[str, Any]]:
        """The proposals that were made for a text: those up to the one whose draft was kept."""
        asked: list[dict[str, Any]] = []
        last = max(
            (i for i, ask in enumerate(planned.asks) if (seq.id, ask.method) in self._found), default=-1
        )
        for ask in planned.asks[: last + 1] if drafted else planned.asks:
            draft = self._found.get((seq.id, ask.method), NO_DRAFT)
            told: dict[str, Any] = {
                "method": ask.method,
                "k": min(ask.k, planned.k),
                "found": len(draft.tokens),
            }
            if draft.confidence:
                told["confidence"] = [round(value, 3) for value in draft.confidence]
            told |= {"match": draft.match} if draft.match else {}
            told |= {"stop": draft.stop} if draft.stop else {}
            asked.append(told)
        return asked


def as_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Of speculation. What a plug-in was given stays out: nobody knows what is in it."""
    settings = config.speculation
    drafts = {
        method: draft if isinstance(draft, str) else type(draft).__name__
        for method, draft in settings.drafts.items()
        if draft
    }
    return settings.model_dump(mode="json", exclude={"draft", "options"}) | {
        "draft": drafts,
        "options": sorted(settings.options),
    }
