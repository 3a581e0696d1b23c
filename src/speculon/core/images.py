"""Images of a prompt, as plain data."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """What a processor made of one image: where its features go, and what the vision tower reads."""

    rows: tuple[int, ...]  # positions of its placeholder tokens in the prompt, ascending
    digest: str  # of its pixels, hexadecimal: images of one digest are the same
    inputs: Mapping[str, ndarray]  # by argument of the model: pixel_values, image_grid_thw, ...

    def within(self, start: int, end: int) -> range:
        """Which of its placeholders lie at positions from `start` to `end`."""
        return range(bisect_left(self.rows, start), bisect_left(self.rows, end))


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt, and what the target needs to know of their places."""

    images: tuple[ImageInput, ...] = ()
    # of each prompt token on each axis of the rotary embedding, [axes, n] int64; None: its place
    positions: ndarray | None = None
    blocks: tuple[range, ...] = ()  # prompt positions that see each other in both directions
    shift: int = field(init=False)  # from a place after the prompt to its position on every axis
    contents: Mapping[int, int] = field(init=False)  # position of a placeholder -> a number of its image

    def __post_init__(self) -> None:
        features = {row: f"{image.digest} {i}" for image in self.images for i, row in enumerate(image.rows)}
        for block in self.blocks:  # each of its rows sees all of them
            features |= dict.fromkeys(block, " ".join(features[row] for row in block))
        table = self.positions
        object.__setattr__(self, "shift", 0 if table is None else int(table.max()) + 1 - table.shape[1])
        object.__setattr__(self, "contents", {row: mark(text) for row, text in features.items()})

    def within(self, start: int, end: int) -> list[ImageInput]:
        """Those with a placeholder at a position from `start` to `end`."""
        return [image for image in self.images if image.within(start, end)]

    def axes_of(self, places: Seq[int]) -> list[list[int]]:
        """Positions on each axis of these places in the sequence; after the prompt all axes go on as one."""
        assert self.positions is not None
        size = self.positions.shape[1]
        return [[int(axis[p]) if p < size else p + self.shift for p in places] for axis in self.positions]

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The positions from `start` to `end` in parts [begin, stop) with the end of the context that the
        rows of each see: of a block its own end, also where that lies behind `end`; else 0.
        """
        at = start
        for block in self.blocks:
            if block.stop <= at or block.start >= end:
                continue
            if block.start > at:
                yield at, block.start, 0
                at = block.start
            stop = min(block.stop, end)
            yield at, stop, block.stop
            at = stop
        if at < end:
            yield at, end, 0

    def whole_blocks(self, start: int, rows: int) -> int:
        """As many of `rows` rows from `start` on as end outside of a block; 0 where a block takes more."""
        end = start + rows
        for block in self.blocks:
            if block.start < end < block.stop:
                return max(0, block.start - start)
        return rows


@lru_cache(4096)
def mark(features: str) -> int:
    """A number for the content of a row; negative, as no token is."""
    return -1 - int.from_bytes(hashlib.sha256(features.encode()).digest())


NO_IMAGES = PromptImages()
