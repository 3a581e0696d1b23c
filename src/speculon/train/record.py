"""The record of a run: JSON files, logs of JSON lines, and provenance."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speculon.measure.bench.provenance import commit, versions


def provenance() -> dict[str, Any]:
    """Command, commit and versions of a run."""
    return {"argv": sys.argv, "commit": commit(), "versions": versions()}


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def whole_lines(file: Path) -> list[str]:
    """The lines of an appended file; a partial last line, left by a killed run, is removed."""
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.write_bytes(whole)
    return whole.decode().splitlines()
