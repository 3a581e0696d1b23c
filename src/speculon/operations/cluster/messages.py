"""What a replica sends to the ingress, beside the messages of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from speculon.core.errors import NotReady
from speculon.core.telemetry import EngineCounters
from speculon.core.types import Load
from speculon.engine.messages import Add, Admitted, Outputs, Ready, Refused


@dataclass(frozen=True, slots=True)
class Taken:
    """The first message of a stream: which replica has the request."""

    replica: str


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """One replica, a few times a second. The metrics read it as they read an engine."""

    replica: str
    facts: Ready
    counters: EngineCounters
    load: Load
    age: float  # seconds since it read what others have kept
    costs: dict[int, float] = field(default_factory=dict)  # sequences -> ms of a plain step
    restarts: int = 0
    resumed: int = 0
    open_requests: int = 0


FromReplica = Taken | Admitted | Outputs | Refused


class ReplicaLost(NotReady):
    """The replica that has a request is gone, or its engine is; another one may continue the request."""


def pool_of(add: Add) -> str | None:
    """The user whose earlier answers a request may draft from, if it names one."""
    options = add.speculation
    if options is None or not options.pool:
        return None
    return f"{options.tenant} {options.pool}" + f" {add.adapter}" * bool(add.adapter)
