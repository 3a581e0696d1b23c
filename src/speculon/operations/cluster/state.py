"""State folders of replicas: each writes one of its own, and begins with the answers that all have kept."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from itertools import count as numbers
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from speculon.engine.state import Lines, hold, make_folder, read, write
from speculon.speculation.proposers.pools import END, belongs

POOLS, POLICIES = "pools-*.jsonl", "policies-*.jsonl"

log = logging.getLogger("speculon")

PoolLine = tuple[float, list[int]]  # when it was last used, and its answers


def claim(folder: Path, model: str) -> tuple[Path, FileLock]:
    """The first of `replica-0`, `replica-1`, .. that no other replica has, with what all have kept.

    It is free again once the lock is released, or the process has ended. Raises `ConfigError`, and
    `StateInUse` where the engine of an earlier replica still writes it.
    """
    make_folder(folder)
    for number in numbers():
        own, lock = folder / f"replica-{number}", FileLock(folder / f"replica-{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        with hold(own, model):
            merge(own, [path for path in sorted(folder.glob("replica-*")) if path.is_dir() and path != own])
        return own, lock
    raise AssertionError("there is always another number")


def forget(folder: Path, tenant: str, pool: str | None) -> int:
    """Deletes a pool, or all of a tenant, from the folders that no replica has now: a later one would bring
    it back. Returns how many there were.
    """
    count = 0
    for path in sorted(folder.glob(f"replica-*/{POOLS}")):
        with suppress(Timeout), FileLock(f"{path.parent}.lock", timeout=0):
            if (found := read_file(path)) is None:
                continue
            head, lines = found
            kept = [line for line in lines if not belongs(line[1][0], tenant, pool)]
            count += len(lines) - len(kept)
            if len(kept) < len(lines):
                save(path, head, kept)
    return count


def merge(own: Path, others: list[Path]) -> None:
    """Adds to a folder what engines like its own have kept in others: every answer, and what policies learned
    where it has nothing of that.

    A file that cannot be read is left out, and is not written over.
    """
    for name in {path.name for folder in others for path in folder.glob(POOLS)}:
        found = [lines for folder in (own, *others) if (lines := read_file(folder / name))]
        if found and (read_file(own / name) or not (own / name).exists()):
            pools = merged_pools([lines for _, lines in found])
            save(own / name, found[0][0], [(method, [key, *pool]) for (method, key), pool in pools.items()])
    for name in {path.name for folder in others for path in folder.glob(POLICIES)}:
        if not (own / name).exists():
            paths = [folder / name for folder in others if (folder / name).exists()]
            if latest := read_file(max(paths, key=lambda path: path.stat().st_mtime)):
                save(own / name, *latest)


def merged_pools(found: list[Lines]) -> dict[tuple[str, str], PoolLine]:
    """By method and key, in the order of their last use; of an answer that several have, one is kept."""
    every = [(at, method, key, tokens) for lines in found for method, (key, at, tokens) in lines]
    pools: dict[tuple[str, str], PoolLine] = {}
    for at, method, key, tokens in sorted(every, key=lambda one: one[0]):
        _, older = pools.pop((method, key), (0.0, []))
        pools[method, key] = at, joined(older, tokens)
    return pools


def joined(older: list[int], newer: list[int]) -> list[int]:
    """The answers of both, those of `newer` last."""
    latest = set(answers(newer))
    return [token for answer in answers(older) if answer not in latest for token in answer] + newer


def answers(tokens: list[int]) -> list[tuple[int, ...]]:
    """Each with the END that follows it."""
    ends = [i + 1 for i, token in enumerate(tokens) if token == END]
    begins = [0, *ends]
    return [tuple(tokens[a:b]) for a, b in zip(begins, [*ends, len(tokens)], strict=True) if a < b]


def read_file(path: Path) -> tuple[dict[str, Any], Lines] | None:
    """(its first line, the others); None where there is no whole file."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
        lines = read(path, head["identity"])
        if path.match(POOLS):
            merged_pools([lines])
        return head, lines
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("state: %s is ignored, because it cannot be read: %.200s", path, error)
        return None


def save(path: Path, head: dict[str, Any], lines: Lines) -> None:
    write(path, [head, *lines, {"end": len(lines)}])
