"""Writers of a settings file that are killed, or write together; prints as JSON what was left.

A program of its own: it forks, which a process with threads must not.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from speculon.core.config.models import Methods, ModelSettingsFile, store, written
from speculon.core.errors import ConfigError

METHODS = Methods(frozenset({"off", "auto"}), frozenset(), frozenset({"off"}), lambda path: None)
TEXT = "# of all\n" + "".join(
    f'\n[models."{name}"]  # {name}\ntop_k = 0  # first\nmax_tokens = 0\n' for name in ("a/b-1.5", "m", "n")
)
PAUSE = 0.002  # seconds by which a write is lengthened, so that most kills hit one
SYNCS = 4  # of two writes: of the text before it is renamed, of the folder after that, twice


def in_place(path: Path, old: str, new: str) -> bool:
    """The planted error: a reader, and a kill, may come between two pieces."""
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, len(new), 20):
            file.write(new[start : start + 20])
            file.flush()
            os.fsync(file.fileno())
    return True


def without_temporary_names(folder: Path, pattern: str) -> Iterator[Path]:
    """The planted error: nothing finds what killed writers left."""
    return iter(())


@contextmanager
def unlocked(path: Path) -> Iterator[Path]:
    yield path


def unlooked(path: Path, old: str, new: str) -> bool:
    """The planted error: replaces whatever is there now."""
    time.sleep(PAUSE)
    return written.replace(path, written.read_exactly(path), new)


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def slow_sync(number: int) -> None:
    """A killed process loses nothing that it wrote, so that no disk has to be waited for."""
    time.sleep(PAUSE)


def stop_at(sync: int) -> None:
    """The process stops in its so many-th sync from now on."""
    before = iter(range(1, sync))

    def stop(number: int) -> None:
        if next(before, None) is None:
            os.kill(os.getpid(), signal.SIGSTOP)

    os.fsync = stop


def write_on(path: Path, started: int, sync: int | None) -> None:
    """Both numbers are equal in every text that is written."""
    file = ModelSettingsFile(path, METHODS)
    for number in range(1, 10**6):
        file.update("m", {"top_k": number, "max_tokens": number})
        os.write(started, b".")
        if number == 1 and sync is not None:
            stop_at(sync)


def is_whole(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    try:
        table = ModelSettingsFile(path, METHODS).tables()["m"]
    except (ConfigError, KeyError):
        return False
    return re.sub(r"= \d+", "= 0", text) == TEXT and table["top_k"] == table["max_tokens"]


def temporary(path: Path) -> int:
    return sum(name.endswith(".tmp") for name in os.listdir(path.parent))


def kill_writers(path: Path, kills: int) -> dict[str, Any]:
    """Every second writer is killed at a random moment, the others in each sync in turn."""
    found = {"broken": 0, "interrupted": 0, "most_left": 0}
    chance = random.Random(0)
    path.write_text(TEXT, encoding="utf-8")
    ModelSettingsFile(path, METHODS).update("m", {})  # imports what forks would import one by one
    for turn in range(kills):
        path.write_text(TEXT, encoding="utf-8")
        sync = None if turn % 2 else turn // 2 % SYNCS + 1
        reading, started = os.pipe()
        child = forked(partial(write_on, path, started, sync))
        os.read(reading, 1)
        if sync is None:
            time.sleep(chance.uniform(0, 8 * PAUSE))
        else:
            os.waitpid(child, os.WUNTRACED)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(started)
        found["broken"] += not is_whole(path)
        found["interrupted"] += temporary(path) > 0
        found["most_left"] = max(found["most_left"], temporary(path))
    path.write_text(TEXT, encoding="utf-8")
    ModelSettingsFile(path, METHODS).update("m", {"top_k": 1, "max_tokens": 1})
    return found | {"left": temporary(path)}


def write_together(path: Path, writers: int, tables: int) -> dict[str, Any]:
    path.write_text(TEXT, encoding="utf-8")
    ModelSettingsFile(path, METHODS).update("m", {})

    waiting, begin = os.pipe()

    def add(writer: int) -> None:
        os.close(begin)
        os.read(waiting, 1)  # until all are there: on a busy machine the first could be done before the last
        for number in range(tables):
            ModelSettingsFile(path, METHODS).update(f"{writer}-{number}", {"top_k": number})

    children = [forked(partial(add, writer)) for writer in range(writers)]
    os.close(begin)
    os.close(waiting)
    for child in children:
        os.waitpid(child, 0)
    names = ModelSettingsFile(path, METHODS).tables().keys()
    return {"lost": sum(f"{w}-{n}" not in names for w in range(writers) for n in range(tables))}


PLANTED: dict[str, dict[Any, dict[str, Any]]] = {
    "nothing": {},
    "in place": {store: {"replace": in_place}},
    "left over": {Path: {"glob": without_temporary_names}},
    "unlocked": {store: {"writing": unlocked, "replace": unlooked}},
}
TASKS: list[tuple[str, Callable[[Path], dict[str, Any]]]] = [
    ("nothing", lambda path: kill_writers(path, kills=50)),
    ("in place", lambda path: kill_writers(path, kills=15)),
    ("left over", lambda path: kill_writers(path, kills=15)),
    ("nothing", lambda path: write_together(path, writers=3, tables=6)),
    ("unlocked", lambda path: write_together(path, writers=3, tables=6)),
]


def main(folder: str) -> None:
    os.fsync = slow_sync
    found = []
    for number, (planted, task) in enumerate(TASKS):
        path = Path(folder) / str(number) / "speculon-models.toml"
        path.parent.mkdir()
        with ExitStack() as stack:
            for target, names in PLANTED[planted].items():
                stack.enter_context(patch.multiple(target, **names))
            found.append(task(path))
    print(json.dumps({"found": found, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main(*sys.argv[1:])
