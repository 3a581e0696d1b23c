"""Settings as a `[speculation]` table of speculon.toml, and as flags."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speculon.config import SpeculationConfig
from speculon.errors import ConfigError, InvalidParameter
from speculon.proposers.registry import OFF

TABLE = "speculation"
HEADER = re.compile(r"^\s*\[\[?\s*([\w-]+|\"[^\"]*\"|'[^']*')")


def settings(base: SpeculationConfig, method: str, k: int, chain: tuple[str, ...]) -> dict[str, Any]:
    """What is to be set for a method and K: all that differs from the defaults. A draft that nobody asks for is not loaded."""
    kept = base.model_dump(exclude_defaults=True, exclude={"method", "policy", "num_speculative_tokens", "draft"})
    drafts = {name: draft for name, draft in base.drafts.items() if name in chain}
    if method == OFF:
        return {"method": OFF}
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": k, **kept}
    if drafts:
        found["draft"] = base.draft if isinstance(base.draft, str) else drafts
    return found


def as_toml(values: Mapping[str, Any]) -> str:
    """One table; what TOML cannot say raises `ConfigError`."""
    text = f"[{TABLE}]\n" + "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items())
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        read = {}
    if read != {TABLE: dict(values)}:
        raise ConfigError(f"these settings cannot be written as TOML: {dict(values)!r}")
    return text


def toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # else strings, numbers, truth values are alike


def as_flags(values: Mapping[str, Any]) -> str:
    parts = []
    for name, value in values.items():
        said = json.dumps(value) if isinstance(value, Mapping) else str(value)
        parts += [f"--{name.replace('_', '-')}", said]
    return shlex.join(parts)


def check_writable(path: Path) -> None:
    """Raises before anything is measured where the settings could not be written afterwards."""
    merged(path, {"method": OFF})
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidParameter("write", str(path), "cannot be written")


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces the file's `[speculation]` and leaves all else as it is; the file is replaced whole or not at all."""
    text = merged(path, values)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def merged(path: Path, values: Mapping[str, Any]) -> str:
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidParameter("write", str(path), "is no file" if path.is_dir() else "there is no such folder")
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = without_table(old)
    text = (kept.rstrip("\n") + "\n\n" if kept.strip() else "") + as_toml(values)
    try:
        before, after = tomllib.loads(old), tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    if {**before, TABLE: dict(values)} != after:
        raise ConfigError(f"{path}: its {TABLE} settings are spread in a way that cannot be replaced; write another file")
    return text


def without_table(text: str) -> str:
    """The lines of a TOML file outside of `[speculation]` and its parts."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if header := HEADER.match(line):
            inside = header[1].strip("\"'") == TABLE
        if not inside:
            kept.append(line)
    return "".join(kept)
