"""What an engine has learned, kept in a folder across restarts: earlier answers, and what policies believe.

Lines of JSON that only their owner reads: whose they are, one line per pool or policy, how many these were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from filelock import FileLock, Timeout

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, SpeculonError, StateInUse
from speculon.speculation.events import speculation_settings, versions

FORMAT = "speculon state 2"
EVERY = 300.0  # seconds between two writings, while sequences are generated
LOCK_SECONDS = 5.0  # guess: given to an engine that is about to end, and still writes

log = logging.getLogger("speculon")

Lines = list[tuple[str, Any]]


class Learned(Protocol):
    def state(self) -> Lines: ...

    def restore(self, state: Lines) -> None:
        """Raises `ValueError` or a `SpeculonError` for what is not to be read."""


@dataclass(slots=True)
class KeptPart:
    """One thing to keep, and what it must come from to be believed again: its file is named by that."""

    name: str
    learned: Learned
    identity: Mapping[str, Any]
    readable: bool = True  # False once its file is in doubt: nothing is written over it

    @property
    def file(self) -> str:
        identity = json.dumps(self.identity, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.jsonl"


class EngineState:
    """Of one engine, whose thread calls it; a fault of the disk costs what is not kept, with one warning."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        proposers: Learned,
        policies: Learned,
        *,
        vocab_size: int,
        parameters: int,
        machine: Mapping[str, Any],
        adapters: Mapping[str, str] | None = None,
        lock: FileLock | None = None,
    ) -> EngineState | None:
        """Where the settings ask for it. Raises `ConfigError` for a folder that cannot be.

        `machine` are the facts that costs depend on: device, dtype, threads and how the target runs.
        `adapters` have digests by name: what was learned under one is not that of another.
        """
        if config.state is None:
            return None
        model: dict[str, Any] = {"model": config.model, "parameters": parameters, "vocab_size": vocab_size}
        model |= {"adapters": dict(adapters)} if adapters else {}
        draft, quantization = speculation_settings(config)["draft"], config.speculation.draft_quantization
        drafter = {"draft": draft, "draft_quantization": quantization}
        costs = {**model, **machine, **drafter, "versions": versions()}
        parts = [KeptPart("pools", proposers, model), KeptPart("policies", policies, costs)]
        return cls(config.state, parts, lock=lock)

    def __init__(
        self,
        folder: Path,
        parts: list[KeptPart],
        clock: Callable[[], float] = monotonic,
        lock: FileLock | None = None,
    ):
        self._folder, self._parts, self.clock = folder, parts, clock
        self._lock = lock  # of the folder; released at the end
        self.due = clock() + EVERY
        self.writing: threading.Thread | None = None
        self._warned = False
        self.close: Callable[[], Any] = self._end
        make_folder(folder)

    def load(self) -> dict[str, int]:
        """Pools and policies that were found, by part."""
        return {part.name: self._load(part) for part in self._parts}

    def tick(self) -> None:
        """Writes what there is when it is time to, beside the engine."""
        if self.clock() < self.due or (self.writing and self.writing.is_alive()):
            return
        self.due = self.clock() + EVERY
        self.writing = threading.Thread(target=self._write, args=(self._collect(),), name="speculon-state")
        self.writing.start()

    def save(self) -> None:
        """Writes what there is now."""
        # where the garbage is collected nobody chooses
        if self.writing and self.writing is not threading.current_thread():
            self.writing.join()
        self._write(self._collect())

    def save_at_end(self, owner: object) -> None:
        """Once: when this is closed, when the owner is collected, or at the end of the process."""
        self.close = weakref.finalize(owner, self._end)

    def _end(self) -> None:
        self.save()
        if self._lock is not None:
            self._lock.release()

    def _collect(self) -> list[tuple[KeptPart, Lines]]:
        return [(part, part.learned.state()) for part in self._parts if part.readable]

    def _write(self, collected: list[tuple[KeptPart, Lines]]) -> None:
        try:
            for part, lines in collected:
                head = {"format": FORMAT, "identity": part.identity}
                write(self._folder / part.file, [head, *lines, {"end": len(lines)}])
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.warning(
                    "state: what was learned cannot be written to %s: %s",
                    self._folder,
                    error.strerror or error,
                )
            self._warned = True

    def _load(self, part: KeptPart) -> int:
        path = self._folder / part.file
        others = sum(file != path for file in self._folder.glob(f"{part.name}-*.jsonl"))
        if others:
            message = "state: %d files of other models or settings (%s) in %s are left alone"
            log.info(message, others, part.name, self._folder)
        if not path.exists():
            return 0
        try:
            lines = read(path, part.identity)
            part.learned.restore(lines)
        except (OSError, ValueError, SpeculonError, RecursionError) as error:
            part.readable = False
            log.warning("state: %s is ignored and left as it is, because %.200s", path, error)
            return 0
        return len(lines)


def make_folder(folder: Path) -> None:
    """The folder, there and writable. Raises `ConfigError` for one that cannot be."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"state = {str(folder)!r}: {error.strerror or error}") from None


def hold(folder: Path, model: str) -> FileLock:
    """Makes the folder's files of a model those of this process alone, until the lock is released or the
    process ends.

    Raises `ConfigError` for a folder that cannot be, and `StateInUse`.
    """
    make_folder(folder)
    path = folder / f"lock-{hashlib.sha256(model.encode()).hexdigest()[:12]}"
    lock = FileLock(path, mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        holder = path.read_text(encoding="utf-8") or "another process"
        why = f"{holder} already writes what is learned of {model!r}; give each engine a folder of its own"
        raise StateInUse(f"state = {str(folder)!r}: {why}") from None
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    return lock


def write(path: Path, lines: Iterable[Any]) -> None:
    """The file whole or not at all, readable by its owner alone."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            for line in lines:  # one by one: a step waits for the interpreter no longer than a pool takes
                file.write(json.dumps(line, separators=(",", ":"), default=array.tolist) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path, identity: Mapping[str, Any]) -> Lines:
    """What was told. Raises `ValueError` for a file that is not whole, or of something else."""
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    head, *lines, end = values or (None, None)
    if head != {"format": FORMAT, "identity": identity}:
        raise ValueError("it was learned with another model, other settings or another version")
    if end != {"end": len(lines)} or not all(isinstance(line, list) and len(line) == 2 for line in lines):
        raise ValueError("its end is missing or damaged")
    if not all(isinstance(name, str) for name, _ in lines):
        raise ValueError("an entry has no name")
    return [(name, said) for name, said in lines]
