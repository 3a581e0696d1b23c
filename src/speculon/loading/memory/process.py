"""Memory that an engine's process will take, drafters and pages included, before it is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from speculon.core.config import MAX_DRAFTS, EngineConfig
from speculon.core.errors import ModelError
from speculon.core.types import Needs
from speculon.decoding.kv.slots import PER_SEQUENCE
from speculon.decoding.kv.states import slot_bytes
from speculon.loading.adapter_config import read_adapters
from speculon.loading.headers import read_checkpoint
from speculon.loading.load import dtype_of, load_config, pick_device
from speculon.loading.locate import locate
from speculon.loading.memory.needs import model_needs
from speculon.loading.reading import quiet
from speculon.target.budget import Budget, MemoryEstimate

# of a process: 0.37 GB after imports, 0.50 with the demo's target (torch for CPU, 2026-11-23)
LIBRARIES = 2**30

# the factors of layers with one input are joined, with zeros between: 1.5 times as large for Llama's layers
OF_ADAPTERS = 2


class ProcessMemory(NamedTuple):
    estimate: MemoryEstimate
    pool: int  # of that, bytes of the page pool


class Step(NamedTuple):
    """The largest forward of an engine: T = `rows` and R = `scored`."""

    dtype: torch.dtype
    device: torch.device
    rows: int
    scored: int


def largest_step(config: EngineConfig) -> Step:
    """Raises `ModelError` or `ConfigError` where loading would."""
    device = pick_device(config.device)
    folder = locate(
        config.model, trust_remote_code=config.trust_remote_code, allow_pickle=config.allow_pickle
    )
    checkpoint = read_checkpoint(folder)
    drafts = max(config.max_num_seqs * config.speculation.most(), MAX_DRAFTS)
    with quiet():
        model_config = load_config(checkpoint, config.trust_remote_code)
    dtype = dtype_of(checkpoint, model_config, config.dtype, config.quantization, device)
    return Step(dtype, device, config.max_batch_tokens + drafts, config.max_num_seqs + drafts)


def adapter_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """The LoRA adapters of the target. Raises `ModelError` for what loading would refuse."""
    parameters = sum(adapter.num_parameters for adapter in read_adapters(config.adapters))
    return OF_ADAPTERS * parameters * dtype.itemsize


def process_memory(config: EngineConfig, step: Step, drafters: Sequence[Needs], total: int) -> ProcessMemory:
    """The estimate of an engine that may take `total` bytes, instead of what happens to be free.

    Raises `ModelError` or `ConfigError` where loading would.
    """
    target = model_needs(
        config.model,
        *step,
        config.fuse,
        config.compile,
        config.quantization,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
    )
    each, weights = slot_bytes(target.states), target.bytes_fixed + adapter_bytes(config, step.dtype)
    target = replace(
        target,
        bytes_fixed=weights,
        bytes_states=PER_SEQUENCE * config.max_num_seqs * each,
        bytes_snapshot=each,
    )
    if target.max_context is None and config.max_context is None:
        raise ModelError(f"{config.model}: its config names no longest context; set max_context")
    limits = [limit for limit in (target.max_context, config.max_context) if limit is not None]
    held = LIBRARIES + target.bytes_fixed
    budget = Budget(config, target, min(limits), step.device, held=held, free=max(0, total - held))
    return ProcessMemory(budget.estimate(drafters), budget.pool_bytes(drafters))
