"""The interface through which a training run reports its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

Advance = Callable[[float, Mapping[str, Any]], None]  # share of the run that is done, and figures to show


class Progress(Protocol):
    """Where a run reports its stages and its figures."""

    def tell(self, stage: str) -> None: ...
    def counting(self, what: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]: ...
    def training(self) -> AbstractContextManager[Advance]: ...
