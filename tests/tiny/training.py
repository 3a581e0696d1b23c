"""Helpers for tests of training: a small target, data in a folder, and a silent progress report."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculon.train.settings import TrainSettings
from tests.tiny.folders import make_folder

QUICK: dict[str, Any] = {
    "length": 48,
    "rows": 2,
    "steps": 12,
    "precision": "fp32",
    "eval_every": 6,
    "eval_rows": 4,
    "eval_prompts": 0,
    "eval_tokens": 12,
    "device": "cpu",
}
WORDS = "def class return value name self left right for in if not None raise items list".split()


class Silent:
    def tell(self, stage: str) -> None:
        """Nothing is shown."""

    @contextmanager
    def counting(self, what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        yield lambda n: None

    @contextmanager
    def training(self) -> Iterator[Callable[[float, Mapping[str, Any]], None]]:
        yield lambda share, entry: None


def make_texts(folder: Path, count: int = 30) -> Path:
    folder.mkdir()
    chance = random.Random(0)
    for number in range(count):
        (folder / f"{number:03}.py").write_text(" ".join(chance.choices(WORDS, k=40)) + "\n")
    return folder


def make_world(folder: Path) -> Path:
    """`folder/target` and `folder/texts`."""
    make_folder(folder / "target")
    make_texts(folder / "texts")
    return folder


def settings(world: Path, name: str, **changes: Any) -> TrainSettings:
    """Of a short run in fp32 that writes to `world/name`."""
    return TrainSettings(
        **{
            **QUICK,
            "target": str(world / "target"),
            "data": (world / "texts",),
            "out": world / name,
            **changes,
        }
    )
