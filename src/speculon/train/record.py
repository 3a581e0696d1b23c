"""The record of a run: JSON files, a log of JSON lines, and what the run was made with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speculon.bench.report import commit, versions


def circumstances() -> dict[str, Any]:
    """What a run is made with: command, commit, versions."""
    return {"argv": sys.argv, "commit": commit(), "versions": versions()}


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def whole_lines(file: Path) -> list[str]:
    """The lines of a file that was appended to; one that a killed run left torn is cut off."""
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.write_bytes(whole)
    return whole.decode().splitlines()
