"""One flat row of T tokens for a whole step. Positions are made here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculon.core.images import ImageInput
from speculon.decoding.sequence import Span

Runs = tuple[tuple[int, int], ...]  # rows from one up to another, in order


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
    spans: list[Span]
    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T], or [axes, 1, T] where a prompt has positions on several axes
    score_rows: Tensor  # [R] rows of the flat batch whose logits are wanted
    prompts: Runs = ()  # its rows that belong to prompts; the others are those of generated tokens and drafts
    adapters: AdapterRows = NO_ADAPTERS
    images: tuple[ImageRows, ...] = ()

    @property
    def sees_images(self) -> bool:
        """Whether a row takes a feature, or has a position on several axes."""
        return bool(self.images) or self.position_ids.dim() == 3

    @classmethod
    def pack(cls, spans: list[Span], device: torch.device) -> Batch:
        """Lays the spans end to end and gives each its `row` and its `score` range.

        Those of one adapter are beside each other, after those of the base.
        A span that reaches its sequence's last token is scored from that token on: K + 1 rows.
        A prompt chunk is scored nowhere, or everywhere when the request wants prompt log-probabilities.
        """
        row = scored = 0
        ids: list[int] = []
        positions: list[int] = []
        score_rows: list[int] = []
        prompts: list[tuple[int, int]] = []
        adapted = any(span.seq.request.adapter for span in spans)
        if adapted:
            spans = sorted(spans, key=lambda span: span.seq.request.adapter)
        for span in spans:
            first = 0 if span.scores_prompt else span.length - 1 if span.samples else span.rows
            span.row, span.score = row, range(scored, scored + span.rows - first)
            ids.extend(span.seq.tokens[span.start : span.start + span.length])
            ids.extend(span.draft.tokens)
            positions.extend(span.positions)
            score_rows.extend(range(row + first, row + span.rows))
            if span.start < span.seq.request.prompt_len:
                prompts.append((row, row + min(span.rows, span.seq.request.prompt_len - span.start)))
            row, scored = row + span.rows, scored + len(span.score)
        batch = cls.of(spans, ids, positions, score_rows, device, joined(prompts))
        if adapted:
            batch = replace(batch, adapters=adapter_rows(spans, row))
        if not any(span.seq.request.images.images for span in spans):
            return batch
        rows = tuple(rows for span in spans for rows in image_rows(span))
        return replace(batch, position_ids=on_axes(spans, device), images=rows)

    @classmethod
    def of(
        cls,
        spans: list[Span],
        ids: list[int],
        positions: list[int],
        scored: list[int],
        device: torch.device,
        prompts: Runs = (),
    ) -> Batch:
        """The same from plain numbers: as parts of one tensor, since a call costs more than its numbers."""
        rows, packed = len(ids), as_tensor([*ids, *positions, *scored], device)
        return cls(spans, packed[None, :rows], packed[None, rows : 2 * rows], packed[2 * rows :], prompts)


def image_rows(span: Span) -> Iterator[ImageRows]:
    """The placeholders of each image in a span."""
    for image in span.seq.request.images.images:
        if which := image.within(span.start, span.start + span.length):
            yield ImageRows(image, which, [span.row + image.rows[i] - span.start for i in which])


def on_axes(spans: list[Span], device: torch.device) -> Tensor:
    """Positions of all rows, [axes, 1, T] where a prompt has several axes, else [1, T]."""
    tables = [span.seq.request.images.positions for span in spans]
    axes = max((len(table) for table in tables if table is not None), default=1)
    parts = [
        [list(span.positions)] * axes if table is None else span.seq.request.images.axes_of(span.positions)
        for span, table in zip(spans, tables, strict=True)
    ]
    rows = [as_tensor([p for part in parts for p in part[axis]], device)[None] for axis in range(axes)]
    return rows[0] if axes == 1 else torch.stack(rows)


def adapter_rows(spans: list[Span], total: int) -> AdapterRows:
    """The rows of each adapter, of spans that are ordered by it."""
    runs: dict[str, tuple[str, int, int]] = {}
    for span in spans:
        if adapter := span.seq.request.adapter:
            _, first, _ = runs.get(adapter, ("", span.row, 0))
            runs[adapter] = (adapter, first, span.row + span.rows)
    return AdapterRows(total, tuple(runs.values()))


def joined(runs: list[tuple[int, int]]) -> Runs:
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
