"""What passes between the process that serves and the one that owns the device: plain data, both ways."""

from __future__ import annotations

from dataclasses import dataclass

from speculon.config import RequestSpeculation, SamplingParams
from speculon.core import Event, Load
from speculon.errors import SpeculonError
from speculon.telemetry import EngineCounters


@dataclass(frozen=True, slots=True)
class Add:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    speculation: RequestSpeculation | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class ForgetPools:
    """The earlier answers of one pool, or of all of a tenant, are to be deleted; `number` finds the answer."""

    number: int
    tenant: str
    pool: str | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing more will be asked."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What loading is busy with."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; what the serving side has to know of it."""

    vocab_size: int
    max_context: int
    max_num_seqs: int
    pages: int
    page_tokens: int
    method: str  # what drafts for a request that does not say


@dataclass(frozen=True, slots=True)
class Began:
    """The request was admitted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not admitted, or ended by a fault; with an empty id: the model could not be loaded."""

    request_id: str
    error: SpeculonError


@dataclass(frozen=True, slots=True)
class PoolsForgotten:
    number: int
    pools: int  # how many there were


@dataclass(frozen=True, slots=True)
class News:
    """What one step brought to everybody."""

    events: list[Event]


@dataclass(frozen=True, slots=True)
class Pulse:
    """The engine's counters and load, a few times a second."""

    counters: EngineCounters
    load: Load


FromServer = Add | Abort | ForgetPools | Stop
FromWorker = Stage | Ready | Began | Refused | PoolsForgotten | News | Pulse
