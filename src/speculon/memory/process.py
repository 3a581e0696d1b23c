"""Memory that an engine's process will take, drafters and pages included, before it is started."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from speculon.checkpoints.choose import with_drafts
from speculon.checkpoints.draft_check import check_drafts
from speculon.checkpoints.families import DRAFT_MODEL, PARD
from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.locate import locate
from speculon.checkpoints.mtp import MTP, mtp_of
from speculon.config import MAX_DRAFTS, EngineConfig
from speculon.core import Needs
from speculon.errors import ModelError
from speculon.kv.slots import PER_SEQUENCE
from speculon.kv.states import slot_bytes
from speculon.memory.budget import Budget, MemoryEstimate
from speculon.memory.needs import model_needs, weight_bytes
from speculon.models.footprint import program_bytes
from speculon.models.load import pick_device, pick_dtype

# of a process: 0.37 GB after imports, 0.50 with the demo's target (torch for CPU, 2026-11-23)
LIBRARIES = 2**30
LANGUAGE_MODELS = (DRAFT_MODEL, PARD)


class ProcessMemory(NamedTuple):
    estimate: MemoryEstimate
    pool: int  # of that, bytes of the page pool


def process_memory(config: EngineConfig, total: int) -> ProcessMemory:
    """The estimate of an engine that may take `total` bytes, instead of what happens to be free.

    Raises `ModelError` or `ConfigError` where loading would.
    """
    config = with_drafts(config)
    check_drafts(config)
    device = pick_device(config.device)
    allowed = {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}
    checkpoint = read_checkpoint(locate(config.model, **allowed))
    dtype = pick_dtype(config.dtype, checkpoint.dtype, device)
    drafts = max(config.max_num_seqs * config.speculation.most(), MAX_DRAFTS)
    rows, scored = config.max_batch_tokens + drafts, config.max_num_seqs + drafts
    target = model_needs(config.model, dtype, device, rows, scored, config.fuse, config.compile, **allowed)
    each = slot_bytes(target.states)
    target = replace(target, bytes_states=PER_SEQUENCE * config.max_num_seqs * each, bytes_snapshot=each)
    drafters = []
    for method, path in config.speculation.drafts.items():
        assert isinstance(path, str), "a server has no model objects"
        if method in LANGUAGE_MODELS:
            drafters.append(model_needs(path, dtype, device, rows, scored, config.fuse, config.compile))
        elif method == MTP:
            drafters.append(Needs(bytes_fixed=mtp_of(locate(path)).num_parameters * dtype.itemsize))
        else:
            weights = weight_bytes(read_checkpoint(locate(path)), dtype)
            programs = program_bytes(weights, dtype, device, drafter=True) if config.compile else 0
            drafters.append(Needs(bytes_fixed=weights + programs))
    if target.max_context is None and config.max_context is None:
        raise ModelError(f"{config.model}: its config names no longest context; set max_context")
    limits = [limit for limit in (target.max_context, config.max_context) if limit is not None]
    held = LIBRARIES + target.bytes_fixed
    budget = Budget(config, target, min(limits), device, held=held, free=max(0, total - held))
    return ProcessMemory(budget.estimate(drafters), budget.pool_bytes(drafters))
