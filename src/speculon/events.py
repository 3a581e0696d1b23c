"""The record of rounds: one line of JSON for the engine, then one per round. What the lines hold, and how
they are read.

No token ids and no text: numbers, names of methods, reasons, and the ids of requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speculon.core import Estimate, Proposal, Reason, SpanOutcome
from speculon.errors import RecordError

VERSION = 2
MARK = "speculon_events"  # the first key of a first line
BEGINNING = f'{{"{MARK}":'

Line = TypeVar("Line", bound=BaseModel)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Header(_Line):
    """Of the engine that wrote the record. A part after a rotation begins with it, too."""

    speculon_events: int
    part: int  # 0 until the file reaches half of its limit
    run: str  # the same in all parts of a record
    time: float  # when the run began, seconds since 1970
    versions: dict[str, str]
    model: str
    device: str
    dtype: str
    max_context: int
    max_num_seqs: int
    max_batch_tokens: int
    pages: int
    block_size: int
    speculation: dict[str, Any]  # settings; of a model object and of a plug-in's options the name alone


class ProposalLine(_Line):
    """One proposal made for a text; a later one was asked because nothing was kept of this."""

    method: str
    k: int  # tokens it might draft
    found: int = 0  # tokens it drafted
    confidence: tuple[float, ...] | None = None  # the drafter's own, of each token
    match: int = 0  # tokens of context that a lookup matched
    stop: str | None = None  # why it ended there (core.Stop); None where its drafter does not say


class SequenceRound(_Line):
    """What a round was for one text."""

    id: str  # of the request
    sample: int = 0
    policy: str
    # that may draft for it, and their most drafts; with its first line in a part
    methods: dict[str, int] | None = None
    prompt_class: str | None = None  # with its first line in a part, as the next two
    marker: str | None = None  # of the prompt, that makes its class favourable
    cold_matches: int | None = None  # continuations that must match before a lookup's drafts are verified
    prompt: int = 0  # rows of its prompt, whose end gave the first token: no round that could speculate
    proposals: tuple[ProposalLine, ...] = ()
    drafts: tuple[tuple[str, int], ...] = ()  # verified: (source, number), from the first position on
    accepted: int = 0
    estimate: Estimate | None = None  # what its policy expected of the drafts, and their price, in tokens
    outcome: SpanOutcome | None = None
    tokens: int  # committed
    reason: Reason | None = None  # why it was plain
    finish: str | None = None

    @property
    def drafted(self) -> int:
        return sum(number for _, number in self.drafts)

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample


class Round(_Line):
    """One committed round of the engine."""

    time: float  # seconds since the header's
    running: int
    waiting: int
    free_pages: int
    rows: int
    prompt_rows: int = 0  # of these, rows of prompts
    target_ms: float  # from the plan to the commit, without proposals: what a policy is told of
    ms: dict[str, float]  # part of a step -> ms since the last line: together all time in steps
    repair_ms: float = 0.0  # of these, to restore recurrent states after rejected drafts
    proposals: dict[str, Proposal] = Field(default_factory=dict)  # by method
    texts: tuple[SequenceRound, ...] = ()
    lost: int = 0  # rounds before this one that could not be written as fast as they came


@dataclass(slots=True)
class Recording:
    """A record that was read."""

    header: Header
    rounds: list[Round] = field(default_factory=list)
    cut: bool = False  # whether the last line was not whole: the writer was killed, or the disk was full


def read(path: Path) -> Recording:
    """A whole record, with the part before the last rotation where that is of the same run.

    A last line that is not whole is skipped (`Recording.cut`). Raises `RecordError` with file and line: for
    another broken line, for a file that is none, and for a version that is not known.
    """
    recording = read_part(path)
    if recording.header.part and older(path).is_file():
        before = read_part(older(path))
        if (before.header.run, before.header.part) == (recording.header.run, recording.header.part - 1):
            return Recording(before.header, before.rounds + recording.rounds, recording.cut)
    return recording


def older(path: Path) -> Path:
    """Where the part before the last rotation lies."""
    return path.with_name(path.name + ".1")


def begins_well(path: Path) -> bool:
    """Whether a file is a record, of whatever version, or empty."""
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) in (b"", BEGINNING.encode())


def read_part(path: Path) -> Recording:
    first, *lines = lines_of(path) or [""]
    header = read_header(path, first)
    cut = bool(lines) and not is_whole(lines[-1])
    if cut:
        lines.pop()
    return Recording(header, [parse(path, number, line, Round) for number, line in enumerate(lines, 2)], cut)


def lines_of(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            return list(file)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None


def is_whole(line: str) -> bool:
    """Whether a line has its end and is JSON: what was written in part, or never reached the disk, is not."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return line.endswith("\n")


def read_header(path: Path, line: str) -> Header:
    try:
        version = json.loads(line)[MARK]
    except (ValueError, TypeError, KeyError):
        raise RecordError(f"{path}, line 1: no record of rounds begins like this") from None
    if version != VERSION:
        raise RecordError(f"{path}, line 1: version {version!r}; this speculon reads version {VERSION}")
    return parse(path, 1, line, Header)


def parse(path: Path, number: int, line: str, kind: type[Line]) -> Line:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}") from None
