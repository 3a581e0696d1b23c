"""Engines over targets that a test has made."""

from __future__ import annotations

from speculon.core.config import EngineConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.runtime import TorchRuntime


def engine_on(target: Target, tokenizer: Tokenizer | None, config: EngineConfig) -> Engine:
    return Engine(TorchRuntime(target, tokenizer, config), tokenizer, config)


def torch_runtime(engine: Engine) -> TorchRuntime:
    """The runtime of an engine, whose insides a test looks at."""
    assert isinstance(engine.runtime, TorchRuntime)
    return engine.runtime
