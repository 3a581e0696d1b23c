"""From settings to an engine that is ready to take requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from speculon.checkpoints.choose import with_drafts
from speculon.config import EngineConfig
from speculon.engine.engine import Engine
from speculon.engine.warm_up import warm_up
from speculon.models.load import load_target, load_tokenizer
from speculon.text import Tokenizer


def build_engine(config: EngineConfig, progress: Callable[[str], None] | None = None) -> Engine:
    """Loads target and tokenizer, restores the kept state, warms up; `progress` is told each stage."""
    config = with_drafts(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
        max_context=config.max_context,
        fused=config.fuse,
        compile=config.compile,
        progress=progress,
    )
    tokenizer = Tokenizer(load_tokenizer(config.model, trust_remote_code=config.trust_remote_code))
    engine = Engine(target, tokenizer, config)
    engine.keep_state()
    wanted = engine.policy.default.state() is not None if config.rehearse is None else config.rehearse
    if wanted and not engine.policy.costs.known:  # else they are those of an earlier process
        warm_up(engine)
    return engine
