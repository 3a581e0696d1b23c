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
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from speculon.core.config import models
from speculon.core.config.models import Methods, ModelSettingsFile
from speculon.core.errors import ConfigError

METHODS = Methods(frozenset({"off", "auto"}), frozenset(), frozenset({"off"}), lambda path: None)
TEXT = "# of all\n" + "".join(
    f'\n[models."{name}"]  # {name}\ntop_k = 0  # first\nmax_tokens = 0\n' for name in ("a/b-1.5", "m", "n")
)
PAUSE = 0.004  # seconds by which a write is lengthened, so that most kills hit one


def in_place(path: Path, old: str, new: str) -> bool:
    """The planted error: a reader, and a kill, may come between two pieces."""
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, len(new), 20):
            file.write(new[start : start + 20])
            file.flush()
            os.fsync(file.fileno())
    return True


@contextmanager
def unlocked(path: Path) -> Iterator[Path]:
    """The planted error: nobody waits for anybody."""
    yield path


def unlooked(path: Path, old: str, new: str) -> bool:
    """Replaces whatever is there now, as a writer without a lock does a moment later."""
    time.sleep(PAUSE)
    path.write_text(new, encoding="utf-8")
    return True


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def write_on(path: Path, started: int) -> None:
    """Both numbers are equal in every text that is written."""
    file = ModelSettingsFile(path, METHODS)
    for number in range(1, 10**6):
        file.update("m", {"top_k": number, "max_tokens": number})
        os.write(started, b".")


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
    found = {"broken": 0, "interrupted": 0}
    chance = random.Random(0)
    for _ in range(kills):
        path.write_text(TEXT, encoding="utf-8")
        reading, started = os.pipe()
        child = forked(partial(write_on, path, started))
        os.read(reading, 1)
        time.sleep(chance.uniform(0, 8 * PAUSE))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(started)
        found["broken"] += not is_whole(path)
        found["interrupted"] += temporary(path)
    path.write_text(TEXT, encoding="utf-8")
    ModelSettingsFile(path, METHODS).update("m", {"top_k": 1, "max_tokens": 1})
    return found | {"left": temporary(path)}


def write_together(path: Path, writers: int, tables: int) -> dict[str, Any]:
    path.write_text(TEXT, encoding="utf-8")
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
    try:
        names = ModelSettingsFile(path, METHODS).tables().keys()
    except ConfigError:
        return {"lost": writers * tables}
    return {"lost": sum(f"{w}-{n}" not in names for w in range(writers) for n in range(tables))}


TASKS: list[tuple[dict[str, Any], Callable[[Path], dict[str, Any]]]] = [
    ({}, partial(kill_writers, kills=30)),
    ({"replace": in_place}, partial(kill_writers, kills=15)),
    ({}, partial(write_together, writers=3, tables=6)),
    ({"writing": unlocked, "replace": unlooked}, partial(write_together, writers=3, tables=6)),
]


def main(folder: str) -> None:
    # a killed process loses nothing that it wrote, so that no disk has to be waited for
    os.fsync = lambda number: time.sleep(PAUSE)
    first = Path(folder) / "first.toml"
    ModelSettingsFile(first, METHODS).update("m", {})  # imports what forks would import one by one
    found = []
    for number, (planted, task) in enumerate(TASKS):
        path = Path(folder) / str(number) / "speculon-models.toml"
        path.parent.mkdir()
        with patch.multiple(models, **planted) if planted else nullcontext():
            found.append(task(path))
    print(json.dumps({"found": found, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main(*sys.argv[1:])
