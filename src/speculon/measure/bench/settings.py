"""The settings of a mode as a speculon.toml, and as the next command."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.measure.bench.plan import Mode
from speculon.speculation.proposers.registry import OFF

TABLE = "speculation"
HEADER = re.compile(r"^\s*\[\[?\s*([\w-]+|\"[^\"]*\"|'[^']*')")
KEY = re.compile(r"^\s*[\"']?([\w-]+)[\"']?\s*=")
# settings that the measurement does not depend on
UNRELATED = {"speculation", "serve", "events", "events_limit_mb", "state", "warmup"}
UNRELATED |= {"prefix_cache", "snapshot_memory_gb", "monitor_share", "monitor_max_tokens"}
# none of these stays in a file that is written to
MEASURED = EngineConfig.model_fields.keys() - UNRELATED | {TABLE}


def settings(base: SpeculationConfig, mode: Mode, methods: Sequence[str]) -> dict[str, Any]:
    """Of the mode, with the drafters of its methods, and all else that is not default."""
    if not mode.speculates:
        return {"method": OFF}
    kept = base.model_dump(exclude_defaults=True, exclude={"draft"})
    drafts = {name: draft for name, draft in base.drafts.items() if name in methods}
    named = {"method": mode.speculation["method"], "policy": mode.policy(base.policy)}
    found = {**named, **kept, **mode.speculation}
    if base.drafts:  # an empty table keeps the model's own drafter from being loaded
        found["draft"] = base.draft if drafts and isinstance(base.draft, str) else drafts
    return found


def whole(config: EngineConfig, speculation: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of the run: model, the engine's that are not default, and `[speculation]`."""
    engine = config.model_dump(mode="json", exclude_defaults=True, exclude=UNRELATED)
    return {"model": config.model, **engine, TABLE: dict(speculation)}


def as_toml(values: Mapping[str, Any]) -> str:
    """Top-level values, then the table. Raises `ConfigError` for what TOML cannot express."""
    text = f"{as_lines(values)}\n[{TABLE}]\n{as_lines(values[TABLE])}"
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        read = {}
    if read != values:
        raise ConfigError(f"these settings cannot be written as TOML: {dict(values)!r}")
    return text


def as_lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items() if name != TABLE)


def toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {toml_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    # else strings, numbers, truth values are alike
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def next_command(path: Path) -> str:
    """The engine finds a speculon.toml by itself only in the current folder."""
    here = path.resolve() == Path(EngineConfig.file).resolve() and "SPECULON_CONFIG" not in os.environ
    return "speculon serve" if here else f"SPECULON_CONFIG={shlex.quote(str(path))} speculon serve"


def check_writable(path: Path) -> None:
    """Raises before anything is measured where the settings could not be written afterwards."""
    merged(path, {"model": "", TABLE: {}})
    if not os.access(path.resolve().parent, os.W_OK):
        raise InvalidParameter("write", str(path), "cannot be written")


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces what was measured in the file and leaves the rest; the file is replaced atomically."""
    text, path = merged(path, values), path.resolve()
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
        raise InvalidParameter(
            "write", str(path), "is no file" if path.is_dir() else "there is no such folder"
        )
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    top, tables = kept_lines(old)
    own, _, table = as_toml(values).partition(f"[{TABLE}]\n")
    parts = [
        top.rstrip("\n") + "\n" * bool(top.strip()) + own.rstrip("\n"),
        tables.strip("\n"),
        f"[{TABLE}]\n{table}",
    ]
    text = "\n\n".join(part for part in parts if part.strip())
    try:
        before, after = tomllib.loads(old), tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    kept = {name: value for name, value in before.items() if name not in MEASURED}
    if {**kept, **values} != after:
        raise ConfigError(
            f"{path}: its settings are spread in a cascade that cannot be replaced; write another file"
        )
    return text


def kept_lines(text: str) -> tuple[str, str]:
    """The lines of a TOML file to keep: those before the first table without what was measured; other
    tables.
    """
    top, tables, table = list[str](), list[str](), None
    for line in text.splitlines(keepends=True):
        if header := HEADER.match(line):
            table = header[1].strip("\"'")
        key = KEY.match(line)
        if table is None and not (key and key[1] in MEASURED):
            top.append(line)
        elif table not in (None, TABLE):
            tables.append(line)
    return "".join(top), "".join(tables)
