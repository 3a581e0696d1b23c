"""A server's own traffic, kept as lines that drafters are trained on. It may cost its own lines, and never an
answer.

A folder per API key, named by a digest of it, holds files of lines; a line is whole or, after a kill, cut off
at the start.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from asyncio import Future
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from speculon.errors import ConfigError
from speculon.config.serve import ServeConfig
from speculon.server.answer import Answer
from speculon.server.door import tenant_of
from speculon.server.lines import ended_well, lines_of

GB = 2**30
PART = 2**26  # bytes of a file, at most; and a sixteenth of all, since the oldest file goes as a whole
BLOCK = 2**12
# bytes that wait for a slow disk, as far as they are known; beyond, texts are lost and counted
MOST_HELD = 2**26
LABEL = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"\d{8,}\.jsonl")

log = logging.getLogger("speculon.server")

Written = tuple[int, int, int]  # texts, their bytes, texts that were lost


def label_of(tenant: str) -> str:
    """What stands for an API key in names and lines."""
    return tenant[:32]


class Files:
    """The folder, within its bound: beyond it the file that was written longest ago goes, whose ever it is.

    Touches nothing but files of its own naming. What the disk refuses is an `OSError`, and leaves no half a
    line behind.
    """

    def __init__(self, root: Path, limit: int):
        self.root, self._limit, self._part = root, limit, min(PART, limit // 16)
        self._sizes: dict[Path, int] = {}  # of every file, the one written longest ago first
        self._last: dict[str, Path] = {}  # label -> the file that its lines go to
        self.taken = 0  # bytes on the disk, as blocks
        root.mkdir(mode=0o700, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        found = [
            path
            for path in root.glob("*/*.jsonl")
            if LABEL.fullmatch(path.parent.name) and NAME.fullmatch(path.name)
        ]
        for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            self._note(path, mend(path))
        self._number = max((int(path.stem) for path in found), default=0)

    def append(self, label: str, line: bytes) -> bool:
        """Whether the line was taken: not one that is larger than all there may be."""
        room = len(line) + blocks(0)
        if room > self._limit:
            return False
        path = self._last.get(label)
        if path is None or self._sizes[path] + len(line) > self._part:
            self._number += 1
            path = self.root / label / f"{self._number:08}.jsonl"
        while self.taken + room > self._limit:
            self._delete(next(iter(self._sizes)))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._note(path, append(path, line))
        return True

    def forget(self, label: str) -> int:
        """Deletes all of a label; how many files that were."""
        mine = [path for path in self._sizes if path.parent.name == label]
        for path in mine:
            self._delete(path)
        return len(mine)

    def _note(self, path: Path, size: int) -> None:
        """The file is now the youngest, and the one that its label's lines go to."""
        before = self._sizes.pop(path, None)
        self._sizes[path] = size
        self._last[path.parent.name] = path
        self.taken += blocks(size) - (0 if before is None else blocks(before))

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.taken -= blocks(self._sizes.pop(path))
        label = path.parent.name
        if self._last[label] == path:
            del self._last[label]
            with suppress(OSError):  # something else lies in it
                path.parent.rmdir()


class Capture:
    """What has been asked and answered goes to files, in a thread of its own; all accounts are kept on the
    event loop.
    """

    @classmethod
    def of(cls, config: ServeConfig) -> Capture | None:
        """Where the settings ask for it. Raises `ConfigError` for a folder that cannot be."""
        if config.capture is None:
            return None
        try:
            files = Files(config.capture, int(config.capture_gb * GB))
        except OSError as error:
            raise ConfigError(
                f"capture: {error.filename or config.capture}: {error.strerror or error}"
            ) from None
        return cls(files, frozenset(tenant_of(key.get_secret_value().encode()) for key in config.capture_key))

    def __init__(self, files: Files, only: frozenset[str] = frozenset()):
        self._files, self._only = files, only  # tenants; none: everybody
        self._writer = ThreadPoolExecutor(1, "speculon-capture")
        self._held = 0  # bytes that wait for the disk
        self.open = True
        self.texts = self.bytes = self.lost = 0

    @property
    def taken(self) -> int:
        """Bytes on the disk, as blocks."""
        return self._files.taken

    def take(self, answer: Answer, tenant: str) -> None:
        """Has the texts of an answer written, where they are to be kept."""
        job = answer.job
        if not job.asked or (self._only and tenant not in self._only) or not ended_well(answer):
            return
        size = sum(map(len, job.asked)) * job.params.n + answer.tokens
        if not self.open or (self._held and self._held + size > MOST_HELD):
            self.lost += job.texts
            return
        self._held += size
        writing = asyncio.get_running_loop().run_in_executor(
            self._writer, self._write, answer, label_of(tenant)
        )
        writing.add_done_callback(partial(self._settle, size))

    async def forget(self, tenant: str) -> int:
        """Deletes all that was captured of a tenant, what waits for the disk included; how many files that
        were.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._writer, self._files.forget, label_of(tenant)
        )

    async def close(self) -> None:
        """Writes what waits."""
        await asyncio.get_running_loop().run_in_executor(self._writer, lambda: None)
        self.open = False
        self._writer.shutdown(wait=False)

    def _write(self, answer: Answer, label: str) -> Written:
        texts = size = lost = 0
        for line in lines_of(answer, label):
            if self.open and self._append(label, line):
                texts, size = texts + 1, size + len(line)
            else:
                lost += 1
        return texts, size, lost

    def _append(self, label: str, line: bytes) -> bool:
        try:
            return self._files.append(label, line)
        except OSError as error:
            self.open = False
            log.warning(
                "no more texts are captured: %s: %s",
                error.filename or self._files.root,
                error.strerror or error,
            )
            return False

    def _settle(self, size: int, writing: Future[Written]) -> None:
        self._held -= size
        if fault := writing.exception():
            self.open = False
            log.error("no more texts are captured: a fault in the capture itself", exc_info=fault)
            return
        texts, written, lost = writing.result()
        self.texts, self.bytes, self.lost = self.texts + texts, self.bytes + written, self.lost + lost


def blocks(size: int) -> int:
    """Bytes that a file and its part of a folder take on the disk: many keys with a line each must not pass
    the bound.
    """
    return (size // BLOCK + 2) * BLOCK


def append(path: Path, line: bytes) -> int:
    """The file's new size; a line that does not fit on the disk is taken back."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
    try:
        size = os.fstat(file).st_size
        try:
            rest = line
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.ftruncate(file, size)
            raise
        return size + len(line)
    finally:
        os.close(file)


def mend(path: Path) -> int:
    """Cuts off what a kill may have left of a last line; the file's size then."""
    with path.open("r+b") as file:
        size = keep = file.seek(0, os.SEEK_END)
        while keep:
            start = max(0, keep - BLOCK)
            file.seek(start)
            end = file.read(keep - start).rfind(b"\n") + 1
            keep = start + end
            if end:
                break
        if keep < size:
            log.warning("capture: %s ended in half a line, which is cut off", path)
            file.truncate(keep)
    return keep
