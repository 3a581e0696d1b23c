"""Recurrent and convolution states: one tensor per mixer and state, with a slot for each sequence.

A step reads the committed state of each sequence and writes the state after its span to the sequence's other
slot. Where drafts are rejected, `StateStep.roll_back` replaces it by the state after the accepted rows
(`runtimes.torch.model.recurrent.restore`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speculon.runtimes.torch.batch import as_tensor
from speculon.runtimes.torch.needs import StateSpec

KEPT_BYTES = 256 << 20  # guess: of states after single rows, kept within a step


class StateStore:
    """The states of all mixers in all slots.

    `restore` is called for spans of which rows are rejected: `restore` of `model/recurrent.py`, or None for
    the states of a draft model.
    """

    def __init__(
        self,
        mixers: tuple[tuple[StateSpec, ...], ...],
        slots: int,
        device: torch.device | str,
        restore: Callable[[StateStep, list[Rejected]], None] | None = None,
    ):
        self.device, self.restore = torch.device(device), restore
        self.slot_bytes = slot_bytes(mixers)
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


def slot_bytes(mixers: tuple[tuple[StateSpec, ...], ...]) -> int:
    """Of the states of all mixers after one sequence."""
    return sum(spec.num_bytes for specs in mixers for spec in specs)


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One span's rows in the flat batch, and the slots of its sequence."""

    first: int
    last: int
    read: int
    write: int
    fresh: bool = False  # whether it begins its sequence, so that there is no state to read
    drafted: bool = False
    cut: tuple[int, int] | None = None  # (rows, slot): the state after so many rows goes to this slot, too

    @property
    def rows(self) -> int:
        return self.last - self.first

    def split(self) -> tuple[StateSpan, StateSpan]:
        """Its rows before and after the cut."""
        assert self.cut is not None and 0 < self.cut[0] < self.rows and not self.drafted, self
        (rows, slot), uncut = self.cut, replace(self, cut=None)
        before = replace(uncut, last=self.first + rows, write=slot)
        return before, replace(uncut, first=before.last, read=slot, fresh=False)


class Rejected(NamedTuple):
    """A span of which only the first rows were accepted."""

    span: StateSpan
    accepted: int  # rows
    recorded_at: int  # its first row among those that were recorded


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Spans of one sort that a mixer takes together, the longest first."""

    fresh: bool
    spans: list[StateSpan]
    lengths: tuple[int, ...]  # rows of each of the B spans
    rows: Tensor  # [sum of lengths] in the flat batch, span by span
    read: Tensor  # [B]
    write: Tensor  # [B]
    first: bool = False  # whether these are the first rows of the batch, in order

    @property
    def drafted(self) -> bool:
        """Whether rows of it may be rejected."""
        return any(span.drafted for span in self.spans)


@dataclass(frozen=True, slots=True)
class RowStates:
    """The states of a mixer after each row of a group."""

    group: Group
    after: list[list[Tensor]]  # of each row: [B, ...] each, of the spans that are long enough


@dataclass(slots=True)
class StateStep:
    """The states as one forward sees them. Mixers are known by their numbers."""

    store: StateStore
    spans: list[StateSpan]
    recorded: dict[int, Any] = field(default_factory=dict)  # the inputs of a mixer at drafted rows
    row_states: dict[int, RowStates] = field(default_factory=dict)  # of the drafted spans it took row by row
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def drafted(self) -> Tensor | None:
        """The rows [T] of all drafted spans, span by span; None where there are none."""
        if "drafted" not in self.memo:
            rows = [row for span in self.spans if span.drafted for row in range(span.first, span.last)]
            self.memo["drafted"] = as_tensor(rows, self.store.device) if rows else None
        drafted: Tensor | None = self.memo["drafted"]
        return drafted

    def groups(self, ragged: int) -> list[Group]:
        """Groups of equal length; spans of up to `ragged` rows that continue a sequence form one together.

        The rows before a cut are a group's, and come first.
        """
        if ragged not in self.memo:
            sorts: defaultdict[tuple[bool, bool, int], list[StateSpan]] = defaultdict(list)
            pieces = [span.split() if span.cut else (None, span) for span in self.spans]
            before = [(False, span) for span, _ in pieces if span is not None]
            for last, span in [*before, *((True, span) for _, span in pieces)]:
                together = not span.fresh and span.rows <= ragged
                sorts[last, span.fresh, 0 if together else span.rows].append(span)
            self.memo[ragged] = [self._group(fresh, spans) for (_, fresh, _), spans in sorts.items()]
        groups: list[Group] = self.memo[ragged]
        return groups

    def _group(self, fresh: bool, spans: list[StateSpan]) -> Group:
        spans, device = sorted(spans, key=lambda span: -span.rows), self.store.device
        rows = [row for span in spans for row in range(span.first, span.last)]
        return Group(
            fresh,
            spans,
            tuple(span.rows for span in spans),
            as_tensor(rows, device),
            as_tensor([span.read for span in spans], device),
            as_tensor([span.write for span in spans], device),
            rows == list(range(len(rows))),
        )

    def roll_back(self, accepted: list[int]) -> bool:
        """Makes the written states those after the accepted rows of each span; whether any was another.

        Only drafted spans may have rows that are not accepted.
        """
        rejected, recorded_at = [], 0
        for span, rows in zip(self.spans, accepted, strict=True):
            assert 0 < rows <= span.rows and (span.drafted or rows == span.rows), (span, rows)
            if rows < span.rows:
                rejected.append(Rejected(span, rows, recorded_at))
            recorded_at += span.rows if span.drafted else 0
        if rejected:
            assert self.store.restore is not None
            self.store.restore(self, rejected)
        return bool(rejected)
