"""The training methods, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from speculon.train.data import Rows
from speculon.train.dflash import DFlashTraining, DSparkTraining
from speculon.train.draft_model import DraftModelTraining
from speculon.train.eagle3 import Eagle3Training
from speculon.train.mtp import MtpTraining
from speculon.train.teacher import Taps, Teacher


class TrainingMethod(Protocol):
    """What the commands of `speculon train` differ in."""

    method: str

    @property
    def taps(self) -> Taps: ...
    @property
    def settings(self) -> Any: ...
    @property
    def spare(self) -> int: ...
    def check(self, teacher: Teacher) -> None: ...  # raises InvalidParameter
    def drafter(self, teacher: Teacher, rows: Rows) -> nn.Module: ...
    def write(self, drafter: Any, teacher: Teacher, target: str, folder: Path) -> None: ...
    def speculation(self, folder: Path) -> Mapping[str, Any]: ...


METHODS: Mapping[str, Callable[[Any], TrainingMethod]] = {
    "eagle3": Eagle3Training,
    "draft": DraftModelTraining,
    "dflash": DFlashTraining,
    "dspark": DSparkTraining,
    "mtp": MtpTraining,
}
