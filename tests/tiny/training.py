"""Helpers for tests of training: a small target, data in a folder, and a silent progress report."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from speculon.train.settings import TrainSettings
from tests.tiny.folders import make_folder
from tests.tiny.mtp_forms import FORMS, write_mtp

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


class Interrupted(Silent):
    """Ends the process, so to say, after some steps."""

    def __init__(self, steps: int):
        self.left = steps

    @contextmanager
    def training(self) -> Iterator[Callable[[float, Mapping[str, Any]], None]]:
        yield self.advance

    def advance(self, share: float, entry: Mapping[str, Any]) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


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


def make_mtp_world(folder: Path, name: str) -> Path:
    """The same with a target that has prediction modules of a form, whose texts are as easy to draft."""
    make_world(folder)
    sizes = json.loads((folder / "target" / "config.json").read_text())
    kept = {key: sizes[key] for key in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    form = FORMS[name]
    write_mtp(folder / "target", replace(form, settings={**form.settings, **kept}))
    file = folder / "target" / "model.safetensors"
    tensors = load_file(file)
    own = form.path(0)
    for key, value in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")) and not key.startswith(own):
            value.mul_(0.1)
        if key.endswith("head.weight"):
            value.mul_(4)
    save_file(tensors, file, {"format": "pt"})
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
