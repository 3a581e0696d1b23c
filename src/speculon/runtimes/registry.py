"""Names to runtimes. One is imported when it is first used, for it brings its libraries with it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from speculon.runtimes.base import Backend

TABLE = {"torch": "speculon.runtimes.torch.backend"}


def backend(name: str = "torch") -> Backend:
    """The module of a runtime."""
    return cast("Backend", import_module(TABLE[name]))
