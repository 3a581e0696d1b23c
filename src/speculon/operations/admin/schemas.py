"""What the administration returns: plain data of the page and of `/admin/api`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class MethodCounts(BaseModel):
    """Drafts of one method."""

    method: str
    proposals: int
    drafted: int  # tokens
    accepted: int
    acceptance_rate: float | None  # None: nothing was drafted
    rounds: int  # that verified a draft which it began
    tokens: int  # of these rounds, with corrections, bonus and stop tokens
    tokens_per_target_call: float | None  # in these rounds


class RoundCounts(BaseModel):
    """What rounds gave, those of running sequences too."""

    emitted: int  # tokens
    stop_tokens: int  # generated too: they end texts, and are no part of them
    target_calls: int
    rounds: int  # that verified drafts
    drafted: int  # tokens
    accepted: int
    acceptance_rate: float | None
    tokens_per_target_call: float | None
    saved_seconds: float | None  # against plain steps; None: not known
    methods: list[MethodCounts]
    per_position: list[float]  # share of drafts at position i that were accepted
    drafts_at: list[int]  # rounds that drafted at position i
    plain_rounds: dict[str, int]  # reason -> rounds


class EngineStatus(RoundCounts):
    """What the process of a model tells."""

    sequences_running: int
    sequences_waiting: int
    pages: int
    pages_free: int
    page_tokens: int
    restarts: int
    steps: int
    cost_curve: dict[int, float]  # sequences -> ms of a plain step; empty: not measured
    memory_bytes: dict[str, int]  # part -> bytes, as estimated when it was loaded


class ModelOverview(BaseModel):
    name: str
    state: str
    since: float  # seconds of the epoch
    error: str | None
    requests_open: int
    tokens: int  # sent to clients since the server's start
    tokens_per_second: float  # of the last seconds
    held_bytes: int
    engine: EngineStatus | None  # None: no process has told yet


class DeviceMemory(BaseModel):
    """Bytes for all models of a device."""

    total: int
    free: int


class Overview(BaseModel):
    time: float  # seconds of the epoch
    started: float
    version: str
    draining: bool
    memory: dict[str, DeviceMemory]  # by device; empty: not limited by the server
    totals: RoundCounts  # of all models
    models: list[ModelOverview]


class FieldView(BaseModel):
    """One setting of a model."""

    name: str
    group: Literal["engine", "speculation", "sampling", "pool"]
    value: Any
    default: Any
    description: str
    value_schema: dict[str, Any]  # JSON schema
    source: Literal["default", "model", "file", "environment", "flag"]
    origin: str  # with file and line
    locked: str | None  # why it cannot be changed here
    new_worker: bool  # whether a change loads the model again


class ModelView(BaseModel):
    name: str
    aliases: list[str]
    state: str
    default: bool
    pinned: bool
    held_bytes: int
    load_seconds: float
    error: str | None
    method: str
    drafters: dict[str, str]  # checkpoints by method
    max_context: int | None
    settings_file: str
    locked: str | None  # why no setting of this model can be changed
    settings: list[FieldView]


class SettingsChange(BaseModel, extra="forbid"):
    """Fields to set; null takes a field out of the file."""

    changes: dict[str, Any] = Field(min_length=1)


class RequestView(BaseModel):
    id: str  # of the answer
    request_id: str  # of the header x-request-id
    model: str
    route: str
    state: Literal["running", "ended"]
    started: float  # seconds of the epoch
    seconds: float
    first_token_seconds: float | None
    status: int
    finish: str | None
    prompt_tokens: int
    images: int = 0  # of the prompt
    tokens: int
    explained: bool  # whether its tokens can be shown
    speculation: dict[str, Any]  # the account; while it runs, what the events have told of it
    prompt: str | None = None  # None: texts are not shown
    answer: str | None = None


class TokenRow(BaseModel):
    id: int
    text: str
    fate: str
    source: str | None  # the method that drafted it
    position: int | None  # in its draft; None: not drafted
    logprob: float | None
    rank: int | None


class TokenView(BaseModel):
    id: str
    model: str
    complete: bool
    choices: list[list[TokenRow]]
    dropped: int  # tokens beyond the limit of what is kept


class DrafterFit(BaseModel):
    """A checkpoint that may draft for a model."""

    name: str
    method: str  # empty: not known
    checkpoint: str
    loaded: bool
    refusal: str | None  # why it does not fit the model; None: it fits
    warnings: list[str]


class LogLine(BaseModel):
    number: int = Field(description="from 1, since the start of the server")
    time: float
    level: str
    logger: str
    text: str
