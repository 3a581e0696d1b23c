"""Names to runtimes. One is imported when it is first used, for it brings its libraries with it."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError

if TYPE_CHECKING:
    from speculon.runtimes.base import Backend

TORCH, LLAMA = "torch", "llama"
TABLE = {TORCH: "speculon.runtimes.torch.backend", LLAMA: "speculon.runtimes.llama.backend"}

log = logging.getLogger("speculon")


def backend(name: str = TORCH) -> Backend:
    """The module of a runtime."""
    return cast("Backend", import_module(TABLE[name]))


def chosen(config: EngineConfig) -> str:
    """The runtime that is set, or under `auto` the one that suits the model and the other settings.

    Raises `ConfigError` where a setting contradicts it, `ModelNotFound`.
    """
    if config.runtime != "auto":
        if refusal := backend(config.runtime).refusal(config):
            raise ConfigError(f"runtime = {config.runtime!r}: {refusal}")
        return config.runtime
    missing = "llama-cpp-python is not installed"
    why_torch = missing if find_spec("llama_cpp") is None else backend(LLAMA).refusal(config)
    if not why_torch:
        return LLAMA
    if refusal := backend(TORCH).refusal(config):
        raise ConfigError(f"{refusal}, and {why_torch}")
    return TORCH


def for_settings(config: EngineConfig) -> Backend:
    """The module of the runtime that runs these settings."""
    return backend(chosen(config))
