"""An image of a prompt, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """What a processor made of one image: where its features go, and what the vision tower reads."""

    rows: tuple[int, ...]  # positions of its placeholder tokens in the prompt, ascending
    digest: str  # of its pixels: images of one digest are the same
    inputs: Mapping[str, ndarray]  # by argument of the model: pixel_values, image_grid_thw, ...
