"""The T rows of one call, end to end: the spans of a step with their drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculon.core.images import ImageInput
from speculon.decoding.rounds import Drafted, Span

RowRanges = tuple[tuple[int, int], ...]  # rows from one up to another, in order


class PlacedSpan(NamedTuple):
    """A span with its draft in the flat batch."""

    drafted: Drafted
    row: int  # the first of its rows

    @property
    def last(self) -> int:
        """The row after its last one."""
        return self.row + self.drafted.rows


class ImageRows(NamedTuple):
    """Rows of the flat batch that take features of an image in the place of embeddings."""

    image: ImageInput
    features: range  # which of its features
    rows: list[int]  # one for each


class AdapterRows(NamedTuple):
    """Which of T rows belong to which adapter; the others are those of the base."""

    total: int
    runs: tuple[tuple[str, int, int], ...]  # adapter, from one row up to another; each adapter once


NO_ADAPTERS = AdapterRows(0, ())


@dataclass(frozen=True, slots=True)
class Batch:
    placed: list[PlacedSpan]  # in the order of its rows
    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], or [axes, 1, T] where a prompt has positions on several axes
    score_rows: Tensor  # [R] rows of the flat batch whose logits are wanted
    # its rows that belong to prompts; the others are those of generated tokens and drafts
    prompts: RowRanges = ()
    adapters: AdapterRows = NO_ADAPTERS
    images: tuple[ImageRows, ...] = ()
    scored: list[range] = field(default_factory=list)  # of each span as given: its rows among the R

    @property
    def sees_images(self) -> bool:
        """Whether a row takes a feature, or has a position on several axes."""
        return bool(self.images) or self.position_ids.dim() == 3

    @classmethod
    def pack(cls, drafted: list[Drafted], device: torch.device) -> Batch:
        """Lays the spans end to end. Those of one adapter are beside each other, after those of the base.

        A span that reaches its sequence's last token is scored from that token on: K + 1 rows.
        A prompt chunk is scored nowhere, or everywhere when the request wants prompt log-probabilities.
        """
        row = 0
        ids: list[int] = []
        positions: list[int] = []
        score_rows: list[int] = []
        prompts: list[tuple[int, int]] = []
        placed: list[PlacedSpan] = []
        scored: dict[Drafted, range] = {}
        adapted = any(one.seq.request.adapter for one in drafted)
        for one in sorted(drafted, key=lambda one: one.seq.request.adapter) if adapted else drafted:
            span, rows, prompt_len = one.span, one.rows, one.seq.request.prompt_len
            first = 0 if span.scores_prompt else span.length - 1 if span.samples else rows
            placed.append(PlacedSpan(one, row))
            scored[one] = range(len(score_rows), len(score_rows) + rows - first)
            ids.extend(one.seq.tokens[span.start : span.end])
            ids.extend(one.draft.tokens)
            positions.extend(one.positions)
            score_rows.extend(range(row + first, row + rows))
            if span.start < prompt_len:
                prompts.append((row, row + min(rows, prompt_len - span.start)))
            row += rows
        batch = cls.of(placed, ids, positions, score_rows, device, joined(prompts))
        batch = replace(batch, scored=[scored[one] for one in drafted])
        if adapted:
            batch = replace(batch, adapters=adapter_rows(placed, row))
        if not any(one.seq.request.images.images for one in drafted):
            return batch
        images = tuple(rows for place in placed for rows in image_rows(place))
        return replace(batch, position_ids=on_axes(placed, device), images=images)

    @classmethod
    def of(
        cls,
        placed: list[PlacedSpan],
        ids: list[int],
        positions: list[int],
        scored: list[int],
        device: torch.device,
        prompts: RowRanges = (),
    ) -> Batch:
        """The same from plain numbers: as parts of one tensor, since a call costs more than its numbers."""
        rows, packed = len(ids), as_tensor([*ids, *positions, *scored], device)
        return cls(placed, packed[None, :rows], packed[None, rows : 2 * rows], packed[2 * rows :], prompts)


def image_rows(place: PlacedSpan) -> Iterator[ImageRows]:
    """The placeholders of each image in a span."""
    span: Span = place.drafted.span
    for image in span.seq.request.images.images:
        if which := image.within(span.start, span.end):
            yield ImageRows(image, which, [place.row + image.rows[i] - span.start for i in which])


def on_axes(placed: list[PlacedSpan], device: torch.device) -> Tensor:
    """Positions of all rows, [axes, 1, T] where a prompt has several axes, else [1, T]."""
    drafted = [place.drafted for place in placed]
    tables = [one.seq.request.images.positions for one in drafted]
    axes = max((len(table) for table in tables if table is not None), default=1)
    parts = [
        [list(one.positions)] * axes if table is None else one.seq.request.images.axes_of(one.positions)
        for one, table in zip(drafted, tables, strict=True)
    ]
    rows = [as_tensor([p for part in parts for p in part[axis]], device)[None] for axis in range(axes)]
    return rows[0] if axes == 1 else torch.stack(rows)


def adapter_rows(placed: list[PlacedSpan], total: int) -> AdapterRows:
    """The rows of each adapter, of spans that are ordered by it."""
    runs: dict[str, tuple[str, int, int]] = {}
    for place in placed:
        if adapter := place.drafted.seq.request.adapter:
            _, first, _ = runs.get(adapter, ("", place.row, 0))
            runs[adapter] = (adapter, first, place.last)
    return AdapterRows(total, tuple(runs.values()))


def joined(runs: list[tuple[int, int]]) -> RowRanges:
    """The same rows in as few runs as possible."""
    merged: list[tuple[int, int]] = []
    for first, last in runs:
        if merged and merged[-1][1] == first:
            first, _ = merged.pop()
        merged.append((first, last))
    return tuple(merged)


def as_tensor(numbers: list[int], device: torch.device) -> Tensor:
    """As int64; by way of numpy, which takes a fifth of the time of `torch.tensor`."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(device)
