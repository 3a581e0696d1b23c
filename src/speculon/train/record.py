"""What a run reports while it lasts, and its record: JSON files and logs of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol


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


ReportStep = Callable[[float, Mapping[str, Any]], None]  # share of the run that is done, and figures to show


class TrainingProgress(Protocol):
    """Where a run reports its stages and its figures."""

    def tell(self, stage: str) -> None: ...
    def counting(self, what: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]: ...
    def training(self) -> AbstractContextManager[ReportStep]: ...
