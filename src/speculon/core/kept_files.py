"""Files of the cache folder: what a start has found out, for the starts after it.

Each file is named by a digest of all that its content depends on, and says so inside, too. A file that is
missing, damaged or of something else counts as not kept, and one that cannot be written costs the next start
its time, no more.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

LIMIT = 16 << 30  # bytes of all files; a guess, as is the next
AGE = 30 * 24 * 3600  # seconds since a start last used a file
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # read of each file of weights, evenly spread, beside its beginning
# no other file of the folder is touched: somebody may have named one with models in it
OURS = re.compile(
    r"(costs-|llama-)?[0-9a-f]{40}(\.[\d-]+)?(\.json|\.safetensors)"
    r"|[0-9a-f]{64}-cpp\.\w+\.pt2"  # programs, in a folder of their own
)

log = logging.getLogger("speculon")


def key_of(facts: object, files: Iterable[Path] = ()) -> str:
    """A digest of facts, by their `repr`, and of samples of files."""
    digest = blake2b(repr(facts).encode(), digest_size=20)
    for file in files:
        digest.update(sample(file))
    return digest.hexdigest()


def sample(file: Path) -> bytes:
    """Its size and parts of it: the weights of another training differ in all of them."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        parts = [str(size).encode()]
        for i in range(SAMPLES):
            stream.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            parts.append(stream.read(SAMPLE_BYTES))
    return b"".join(parts)


def read_json(path: Path, key: str) -> Any:
    """What was kept under this key; None where nothing was that can be read."""
    try:
        stored = json.loads(path.read_bytes())
        if stored["key"] != key:
            return None
        content = stored["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    used(path)
    return content


def write_json(path: Path, key: str, content: Any) -> None:
    text = json.dumps({"key": key, "content": content}).encode()
    write(path, lambda stream: stream.write(text))


def write(path: Path, content: Callable[[BinaryIO], object]) -> None:
    """The file whole or not at all, and then removes old ones."""
    # what a killed process leaves is cleaned up, too
    beside = path.with_name(f"{path.stem}.{os.getpid()}-{threading.get_ident()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as stream:
            content(stream)
        beside.replace(path)
    except OSError as error:
        log.info("%s is not kept: %s", path, error)
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    clean(path.parent)


def used(path: Path) -> None:
    """Notes that a start has used a file."""
    with suppress(OSError):  # of a folder that can only be read
        os.utime(path)


def clean(folder: Path) -> None:
    """Removes from a folder what no start has used for `AGE`, and the least recently used beyond `LIMIT`."""
    total = 0
    with suppress(OSError):  # another process cleans, too
        ours = [(file.stat(), file) for file in folder.iterdir() if OURS.fullmatch(file.name)]
        for facts, file in sorted(ours, key=lambda item: -item[0].st_mtime):
            total += facts.st_size
            if total > LIMIT or time.time() - facts.st_mtime > AGE:
                file.unlink(missing_ok=True)


def chip() -> str:
    """The processor for people, with a digest of all that it is."""
    lines = dict(line.split(":", 1) for line in chip_name().splitlines() if ":" in line)
    named = next((text.strip() for name, text in lines.items() if name.startswith("model name")), "")
    return f"{named} {key_of(chip_name())[:12]}".strip()


@cache
def chip_name() -> str:
    """The processor, with what it can compute."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = ("model name", "cpu family", "model\t", "stepping", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(named)))
