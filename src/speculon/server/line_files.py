"""A folder of lines within a limit of bytes: one folder for each label, the oldest files deleted first.

Half a line, which a kill may leave, is cut off at the next start.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

FILE_BYTES = 2**26  # at most; also a sixteenth of the limit, since files are deleted as a whole
BLOCK = 2**12
LABEL = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"\d{8,}\.jsonl")

log = logging.getLogger("speculon.server")


class Files:
    """The folder, within its limit: beyond it the file that was written longest ago is deleted.

    Touches only files of its own naming. A fault of the disk is an `OSError`, and leaves no half a line.
    """

    def __init__(self, root: Path, limit: int):
        self.root, self._limit, self._file_bytes = root, limit, min(FILE_BYTES, limit // 16)
        self._sizes: dict[Path, int] = {}  # of each file, the one written longest ago first
        self._last: dict[str, Path] = {}  # label -> the file that takes its next line
        self.disk_bytes = 0  # in blocks
        root.mkdir(mode=0o700, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        paths = [
            path
            for path in root.glob("*/*.jsonl")
            if LABEL.fullmatch(path.parent.name) and NAME.fullmatch(path.name)
        ]
        for path in sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            self._note(path, mend(path))
        self._number = max((int(path.stem) for path in paths), default=0)

    def append(self, label: str, line: bytes) -> bool:
        """False for a line that is larger than the limit."""
        room = len(line) + blocks(0)
        if room > self._limit:
            return False
        path = self._last.get(label)
        if path is None or self._sizes[path] + len(line) > self._file_bytes:
            self._number += 1
            path = self.root / label / f"{self._number:08}.jsonl"
        while self.disk_bytes + room > self._limit:
            self._delete(next(iter(self._sizes)))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._note(path, append(path, line))
        return True

    def forget(self, label: str) -> int:
        """Deletes all files of a label; returns how many."""
        paths = [path for path in self._sizes if path.parent.name == label]
        for path in paths:
            self._delete(path)
        return len(paths)

    def _note(self, path: Path, size: int) -> None:
        """The file was written last, and takes its label's next line."""
        before = self._sizes.pop(path, None)
        self._sizes[path] = size
        self._last[path.parent.name] = path
        self.disk_bytes += blocks(size) - (0 if before is None else blocks(before))

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.disk_bytes -= blocks(self._sizes.pop(path))
        label = path.parent.name
        if self._last[label] == path:
            del self._last[label]
            with suppress(OSError):  # it has other files
                path.parent.rmdir()


def blocks(size: int) -> int:
    """Bytes of a file on the disk, its folder included: many keys with a line each stay within the limit."""
    return (size // BLOCK + 2) * BLOCK


def append(path: Path, line: bytes) -> int:
    """Returns the file's new size; a line that the disk cannot hold is removed again."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600)
    try:
        size = os.fstat(file).st_size
        try:
            rest = line
            while rest:  # a write may be partial
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.ftruncate(file, size)
            raise
        return size + len(line)
    finally:
        os.close(file)


def mend(path: Path) -> int:
    """Cuts off half a line, which a kill may leave; returns the file's new size."""
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
            log.warning("capture: an incomplete last line was removed from %s", path)
            file.truncate(keep)
    return keep
