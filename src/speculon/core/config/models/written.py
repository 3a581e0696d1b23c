"""A TOML file that several processes change: one writer at a time, and no state between old and new."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel

from speculon.core.errors import ConfigError, InvalidParameter

LOCK_SECONDS = 10.0  # a write takes milliseconds, and the lock of a process that ends is released
INT64 = range(-(2**63), 2**63)  # what every reader of TOML must accept


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The file itself, behind links, for the one process that writes it now.

    What a writer left that ended before it was done is deleted. Raises `ConfigError` after ten seconds, and
    for a folder that does not exist.
    """
    real = path.resolve()
    if not real.parent.is_dir():  # the lock would make it
        raise ConfigError(f"{path}: there is no such folder")
    try:
        with FileLock(real.with_name(f".{real.name}.lock"), timeout=LOCK_SECONDS):
            for stale in real.parent.glob(f".{real.name}.*.tmp"):
                stale.unlink(missing_ok=True)
            yield real
    except Timeout:
        raise ConfigError(f"{path}: another process has been writing it for {LOCK_SECONDS:g} s") from None


def replace(path: Path, old: str, new: str) -> bool:
    """Replaces the file's text in one step that survives a crash; False where it is no longer `old`."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8", newline="") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        if read_exactly(path) != old:
            return False
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def read_exactly(path: Path) -> str:
    """The text with its line ends as they are; empty for a file that does not exist."""
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def sync_folder(folder: Path) -> None:
    """Makes the file's new name survive a crash of the machine."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def edited(text: str, top: str, name: str, table: Mapping[str, Any]) -> str:
    """TOML in which `[top.name]` has exactly these fields. Comments and order stay."""
    import tomlkit  # takes 50 ms, and readers need it not

    document = tomlkit.parse(text)
    if top not in document:
        document.add(top, tomlkit.table(is_super_table=True))
    tables: Any = document[top]
    if name not in tables:
        tables.add(name, tomlkit.table())
    fields = tables[name]
    for field in set(fields) - set(table):
        del fields[field]
    for field, value in table.items():
        if field not in fields or fields[field] != value:
            fields[field] = as_inline(value)
    return tomlkit.dumps(document)


def as_inline(value: Any) -> Any:
    """A table on the line of its key: one with a header of its own would end its model's table."""
    if not isinstance(value, dict):
        return value
    import tomlkit

    inline = tomlkit.inline_table()
    inline.update(value)
    return inline


def plain(field: str, value: Any) -> Any:
    """The value as TOML can have it; None takes a field away. Raises `InvalidParameter`."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and value in INT64:
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return plain(field, value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping) and None not in value.values():
        return {str(key): plain(field, part) for key, part in value.items()}
    if isinstance(value, list | tuple) and None not in value:
        return [plain(field, part) for part in value]
    raise InvalidParameter(field, value, "cannot be written as TOML")
