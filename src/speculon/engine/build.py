"""From settings to an engine that is ready to take requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from speculon.checkpoints.headers import read_checkpoint, refuse_unsafe
from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config import EngineConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.engine.state import hold
from speculon.engine.warm_up import warm_up
from speculon.runtimes.torch.budget import held_memory
from speculon.runtimes.torch.drafters.choose import check_drafts, with_drafts
from speculon.runtimes.torch.loading.ends import add_ends
from speculon.runtimes.torch.loading.load import load_target

log = logging.getLogger("speculon")


def build_engine(
    config: EngineConfig, progress: Callable[[str], None] | None = None, *, texts: bool = True
) -> Engine:
    """Loads target and tokenizer, restores the kept state, warms up; `progress` is told each stage.

    Without `texts` no tokenizer is loaded, and the engine takes token ids alone.
    """
    lock = None if config.state is None else hold(config.state, config.model)  # refused before a model loads
    config = with_drafts(config)
    check_drafts(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    permissions = {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}
    # what is wrong with a model is said before what is wrong with its tokenizer
    refuse_unsafe(read_checkpoint(locate(config.model, **permissions)), allow_pickle=config.allow_pickle)
    tokenizer = None
    if texts:  # first: then the weights need no memory beside what reading a tokenizer takes
        tokenizer = Tokenizer(load_tokenizer(config.model, trust_remote_code=config.trust_remote_code))
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=config.device,
        **permissions,
        max_context=config.max_context,
        fused=config.fuse,
        compile=config.compile,
        batch_invariant=config.batch_invariant,
        quantization=config.quantization,
        adapters=config.adapters,
        progress=progress,
    )
    add_ends(target, tokenizer)
    if config.dtype == "float16" and target.device.type == "cpu":
        log.warning("dtype float16 on a CPU: most compute float32 faster, and numbers beyond 65504 overflow")
    engine = Engine(target, tokenizer, config)
    if note := engine.facts().note:
        log.warning(note)
    engine.keep_state(lock)
    warms_up = engine.policy.default.state() is not None if config.warmup is None else config.warmup
    if warms_up and not engine.policy.costs.known:  # else they are those of an earlier process
        warm_up(engine)
    engine.memory = replace(engine.memory, measured=held_memory(target.device))
    log.info("memory: %s; %d bytes are held now", engine.memory, engine.memory.measured)
    return engine
