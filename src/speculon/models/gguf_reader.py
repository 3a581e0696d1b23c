"""How transformers reads a GGUF file; importing this makes it read the header three times as fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from speculon.checkpoints.gguf import is_gguf


class Reader(gguf.GGUFReader):
    """Reads through a plain view of the file: slices of `np.memmap` take five times as long, and a header has
    300,000 of them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


def put(reader: Callable[..., Reader]) -> None:
    gguf.GGUFReader = reader  # type: ignore[assignment,misc]  # transformers looks it up at each reading


put(Reader)


@contextmanager
def reading_once() -> Iterator[None]:
    """Within, transformers' readings of one file (config, weights, tokenizer) parse its header once."""
    put(lru_cache(maxsize=1)(Reader))
    try:
        yield
    finally:
        put(Reader)


def from_file(path: Path) -> tuple[Path, dict[str, str]]:
    """The folder and the options with which transformers reads this checkpoint."""
    return (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
