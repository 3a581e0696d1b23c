"""Recurrent and convolution states: one tensor per mixer and state, with a slot for each sequence.

A step reads the committed state of each sequence and writes the state after its span to the sequence's other
slot. Where not all drafts are accepted, the accepted rows run through the mixers once more from the committed
state, and overwrite what was written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speculon.batch import as_tensor
from speculon.core import StateSpec

Replay = Callable[["StateStep", Mapping[int, Any]], None]


class StateStore:
    """The states of all mixers in all slots. `replay` runs recorded rows through the mixers again."""

    def __init__(
        self,
        mixers: tuple[tuple[StateSpec, ...], ...],
        slots: int,
        device: torch.device | str,
        replay: Replay,
    ):
        self.device, self.replay = torch.device(device), replay
        # of each mixer: its states [slots, ...]
        self.states = [
            [torch.zeros(slots, *spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
            for specs in mixers
        ]

    def read(self, mixer: int, slots: Tensor) -> list[Tensor]:  # [B, ...] each
        """Copies of a mixer's states in these slots [B]."""
        return [state.index_select(0, slots) for state in self.states[mixer]]

    def write(self, mixer: int, slots: Tensor, states: list[Tensor]) -> None:  # [B, ...] each
        """Puts a mixer's states into these slots [B]."""
        for state, new in zip(self.states[mixer], states, strict=True):
            state.index_copy_(0, slots, new.to(state.dtype))


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One span's rows in the flat batch, and the slots of its sequence."""

    first: int
    last: int
    read: int
    write: int
    fresh: bool = False  # whether it begins its sequence, so that there is no state to read
    drafted: bool = False

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Group:
    """Spans of one kind that a mixer takes together, the longest first."""

    fresh: bool
    lengths: tuple[int, ...]  # rows of each of the B spans
    rows: Tensor  # [sum of lengths] in the flat batch, span by span
    read: Tensor  # [B]
    write: Tensor  # [B]
    first: bool = False  # whether these are the first rows of the batch, in order


@dataclass(slots=True)
class StateStep:
    """The states as one forward sees them. `recorded` keeps what each mixer was given at drafted spans."""

    store: StateStore
    spans: list[StateSpan]
    recorded: dict[int, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def drafted(self) -> Tensor | None:
        """The rows [T] of all drafted spans, span by span; None where there are none."""
        if "drafted" not in self.memo:
            rows = [row for span in self.spans if span.drafted for row in range(span.first, span.last)]
            self.memo["drafted"] = as_tensor(rows, self.store.device) if rows else None
        found: Tensor | None = self.memo["drafted"]
        return found

    def groups(self, ragged: bool) -> list[Group]:
        """The spans in groups of equal length; where `ragged`, all that continue a sequence form one."""
        if ragged not in self.memo:
            kinds: defaultdict[tuple[bool, int], list[StateSpan]] = defaultdict(list)
            for span in self.spans:
                kinds[span.fresh, 0 if ragged and not span.fresh else span.rows].append(span)
            self.memo[ragged] = [self._group(fresh, spans) for (fresh, _), spans in kinds.items()]
        found: list[Group] = self.memo[ragged]
        return found

    def _group(self, fresh: bool, spans: list[StateSpan]) -> Group:
        spans, device = sorted(spans, key=lambda span: -span.rows), self.store.device
        rows = [row for span in spans for row in range(span.first, span.last)]
        return Group(
            fresh,
            tuple(span.rows for span in spans),
            as_tensor(rows, device),
            as_tensor([span.read for span in spans], device),
            as_tensor([span.write for span in spans], device),
            rows == list(range(len(rows))),
        )

    def keep(self, kept: list[int]) -> None:
        """Makes the written states those after the first `kept` rows of each span.

        Spans of which all rows are kept have them already; the others must be drafted ones.
        """
        again, row = [], 0
        for span, rows in zip(self.spans, kept, strict=True):
            assert 0 < rows <= span.rows and (span.drafted or rows == span.rows), (span, rows)
            if rows < span.rows:
                again.append(replace(span, first=row, last=row + rows, drafted=False))
            row += span.rows if span.drafted else 0
        if again:
            self.store.replay(StateStep(self.store, again), self.recorded)


# What the mixers of the forward that runs now read and write; None outside of one.
STEP: ContextVar[StateStep | None] = ContextVar("speculon_states", default=None)


@contextmanager
def stepping(step: StateStep | None) -> Iterator[None]:
    token = STEP.set(step)
    try:
        yield
    finally:
        STEP.reset(token)
