"""The settings of a mode as a speculon.toml, and as the next command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.exceptions import ConvertError, ParseError

from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.config.models.written import as_inline, read_exactly, replace
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.measure.bench.plan import Mode
from speculon.speculation.proposers.registry import OFF

TABLE = "speculation"
# settings that the measurement does not depend on
UNRELATED = {"speculation", "serve", "events", "events_limit_mb", "state", "warmup"}
UNRELATED |= {"prefix_cache", "snapshot_memory_gb"}
# none of these stays in a file that is written to
MEASURED = EngineConfig.model_fields.keys() - UNRELATED | {TABLE}


def settings(base: SpeculationConfig, mode: Mode, methods: Sequence[str]) -> dict[str, Any]:
    """Of the mode, with the drafters of its methods, and all else that is not default."""
    if not mode.speculates:
        return {"method": OFF}
    others = base.model_dump(exclude_defaults=True, exclude={"draft"})
    drafts = {name: draft for name, draft in base.drafts.items() if name in methods}
    first = {"method": mode.speculation["method"], "policy": mode.policy(base.policy)}
    values = {**first, **others, **mode.speculation}
    if base.drafts:  # an empty table keeps the model's own drafter from being loaded
        values["draft"] = base.draft if drafts and isinstance(base.draft, str) else drafts
    return values


def whole(config: EngineConfig, speculation: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of the run: model, the engine's that are not default, and `[speculation]`."""
    engine = config.model_dump(mode="json", exclude_defaults=True, exclude=UNRELATED)
    return {"model": config.model, **engine, TABLE: dict(speculation)}


def as_toml(values: Mapping[str, Any]) -> str:
    """Top-level values, then the table. Raises `ConfigError` for what TOML cannot express."""
    return tomlkit.dumps(with_values(tomlkit.document(), values))


def with_values(document: TOMLDocument, values: Mapping[str, Any]) -> TOMLDocument:
    table = tomlkit.table()
    try:
        for name, value in values[TABLE].items():
            table.add(name, as_inline(value))
        for name, value in values.items():
            document.add(name, table if name == TABLE else as_inline(value))
    except ConvertError:
        raise ConfigError(f"these settings cannot be written as TOML: {dict(values)!r}") from None
    return document


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
    old, new = merged(path, values)
    if not replace(path.resolve(), old, new):
        raise ConfigError(f"{path}: another process has written it meanwhile")


def merged(path: Path, values: Mapping[str, Any]) -> tuple[str, str]:
    """The text of the file, and the text that takes its place."""
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidParameter(
            "write", str(path), "is no file" if path.is_dir() else "there is no such folder"
        )
    try:
        text = read_exactly(path)
        document = tomlkit.parse(text)
    except (UnicodeDecodeError, ParseError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for name in MEASURED & document.keys():
        document.remove(name)
    return text, tomlkit.dumps(with_values(document, values))
