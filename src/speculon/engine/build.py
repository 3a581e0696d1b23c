"""From settings to an engine that is ready to take requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from speculon.core.config import EngineConfig
from speculon.engine.engine import Engine
from speculon.engine.state import hold
from speculon.engine.warm_up import warm_up
from speculon.runtimes.registry import backend, chosen

log = logging.getLogger("speculon")


def build_engine(
    config: EngineConfig, progress: Callable[[str], None] | None = None, *, texts: bool = True
) -> Engine:
    """Loads target and tokenizer, restores what is kept, warms up; `progress` is told each stage.

    Without `texts` no tokenizer is loaded, and the engine takes token ids alone.
    """
    lock = None if config.state is None else hold(config.state, config.model)  # refused before a model loads
    name = chosen(config)
    if progress is not None:
        progress(f"{config.model} runs on {name}")
    runs = backend(name)
    # what is wrong with a model is said before what is wrong with its tokenizer
    config = runs.prepare(config)
    # first: then the weights need no memory beside what reading a tokenizer takes
    tokenizer = runs.tokenizer(config) if texts else None
    engine = Engine(runs.load(config, tokenizer, progress), tokenizer, config)
    if note := engine.facts().note:
        log.warning(note)
    engine.keep_state(lock)
    costs = engine.keep_costs()
    warms_up = engine.policy.default.state() is not None if config.warmup is None else config.warmup
    if warms_up and not costs.warm:  # else they are those of an earlier process
        warm_up(engine)
        costs.warm = True
        costs.save()
    engine.runtime.loading_ended()
    return engine
