"""The capability table of one engine: what it does, and what a request may ask of it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# on: as asked. changed: served, and speculation works otherwise. off: served without it.
# refused: an error whose `feature` is the row's key
Status = Literal["on", "changed", "off", "refused"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One row: its status, the reason, and its limits by name."""

    status: Status
    reason: str
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def denied(self) -> bool:
        """Whether a request for it is refused, or served without it."""
        return self.status in ("off", "refused")


Capabilities = Mapping[str, Capability]  # by feature


def as_json(table: Capabilities) -> dict[str, dict[str, Any]]:
    return {feature: asdict(row) for feature, row in table.items()}
