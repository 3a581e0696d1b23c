"""Messages between the server's process and the engine's process: plain data, both ways."""

from __future__ import annotations

from dataclasses import dataclass, field

from speculon.core.config import RequestSpeculation, SamplingParams
from speculon.core.errors import SpeculonError
from speculon.core.images import ImageInput
from speculon.core.telemetry import EngineCounters
from speculon.core.types import Capabilities, Load
from speculon.decoding.sequence import Event


@dataclass(frozen=True, slots=True)
class Add:
    """One prompt to continue, `params.n` times; with `written` only these samples, after these tokens."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    speculation: RequestSpeculation | None = None
    written: dict[int, list[int]] | None = None
    images: tuple[ImageInput, ...] = ()
    adapter: str = ""  # of the target, by name


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class ForgetPools:
    """Delete the earlier answers of one pool, or of all of a tenant; the reply has the same `number`."""

    number: int
    tenant: str
    pool: str | None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last message."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage that loading has reached."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; what the server has to know of it."""

    vocab_size: int
    max_context: int
    max_num_seqs: int
    pages: int
    page_tokens: int
    method: str  # that drafts for a request which names none
    drafters: dict[str, str] = field(default_factory=dict)  # checkpoints by method
    holds_context: bool = False  # whether the pages of its windows hold a sequence of `max_context`
    capabilities: Capabilities = field(default_factory=dict, repr=False)
    memory: dict[str, int] = field(default_factory=dict)  # bytes by part, as estimated

    @property
    def note(self) -> str:
        """Says that the pages hold less than the context; empty where they hold one context."""
        room = self.pages * self.page_tokens
        if self.holds_context or room >= self.max_context:
            return ""
        return f"only {room} tokens fit into the {self.pages} KV pages, of a context of {self.max_context}"


@dataclass(frozen=True, slots=True)
class Admitted:
    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not admitted, or ended by a fault. With an empty id: the model could not be loaded."""

    request_id: str
    error: SpeculonError


@dataclass(frozen=True, slots=True)
class PoolsForgotten:
    number: int
    pools: int  # deleted


@dataclass(frozen=True, slots=True)
class Outputs:
    """The events of one step, of all requests."""

    events: list[Event]


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The engine's counters, those of running sequences included, and its load, a few times a second while
    it has work; also its heartbeat.
    """

    counters: EngineCounters
    load: Load
    read: int  # messages of the server so far
    costs: dict[int, float] = field(default_factory=dict)  # sequences -> ms of a plain step
    capabilities: Capabilities | None = field(default=None, repr=False)  # once, while it has no work


FromServer = Add | Abort | ForgetPools | Shutdown
FromWorker = Stage | Ready | Admitted | Refused | PoolsForgotten | Outputs | EngineStatistics
