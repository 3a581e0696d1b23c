"""Reads the record of rounds (docs/events.md) as typed lines, and fails on a field that is not documented."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from speculon.core.types import CallCost, Estimate, Reason, SpanOutcome
from speculon.speculation.events import VERSION, older


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Header(_Line):
    speculon_events: int
    part: int
    run: str
    time: float
    versions: dict[str, str]
    model: str
    device: str
    dtype: str
    max_context: int
    max_num_seqs: int
    max_batch_tokens: int
    pages: int
    block_size: int
    speculation: dict[str, Any]


class ProposalLine(_Line):
    method: str
    k: int
    found: int = 0
    confidence: tuple[float, ...] | None = None
    match: int = 0
    stop: str | None = None


class SequenceRound(_Line):
    """What a round was for one sequence."""

    id: str
    sample: int = 0
    policy: str
    methods: dict[str, int] | None = None
    prompt_class: str | None = None
    marker: str | None = None
    prompt: int = 0
    proposals: tuple[ProposalLine, ...] = ()
    drafts: tuple[tuple[str, int], ...] = ()
    accepted: int = 0
    estimate: Estimate | None = None
    outcome: SpanOutcome | None = None
    tokens: int
    reason: Reason | None = None
    finish: str | None = None

    @property
    def drafted(self) -> int:
        return sum(number for _, number in self.drafts)

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample


class RoundLine(_Line):
    time: float
    running: int
    waiting: int
    free_pages: int
    rows: int
    prompt_rows: int = 0
    target_ms: float | None
    ms: dict[str, float]
    repair_ms: float = 0.0
    proposals: dict[str, CallCost] = Field(default_factory=dict)
    texts: tuple[SequenceRound, ...] = ()
    lost: int = 0


@dataclass(slots=True)
class Recording:
    header: Header
    rounds: list[RoundLine]
    cut: bool  # whether the last line was not whole


def read(path: Path) -> Recording:
    """A whole record, with the part before the last rotation where that is of the same run."""
    recording = read_part(path)
    if recording.header.part and older(path).is_file():
        before = read_part(older(path))
        if (before.header.run, before.header.part) == (recording.header.run, recording.header.part - 1):
            return Recording(before.header, before.rounds + recording.rounds, recording.cut)
    return recording


def read_part(path: Path) -> Recording:
    first, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    header = Header.model_validate_json(first)
    assert header.speculon_events == VERSION
    cut = bool(lines) and not is_whole(lines[-1])
    if cut:
        lines.pop()
    return Recording(header, [RoundLine.model_validate_json(line) for line in lines], cut)


def is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith("\n")
