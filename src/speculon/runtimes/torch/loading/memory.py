"""The memory that a model and the process of its engine will take, before anything is loaded.

Weights follow from the sizes in the headers of their files, keys and values and recurrent states from the
config, and working memory from the rows of the largest step and the widths of the architecture. What was
loaded is measured (`runtimes.torch.budget`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from speculon.checkpoints.adapter_config import read_adapters
from speculon.checkpoints.headers import Checkpoint, read_checkpoint, refuse_unsafe
from speculon.checkpoints.locate import locate
from speculon.checkpoints.reading import quiet
from speculon.core.config import MAX_DRAFTS, EngineConfig
from speculon.core.config.speculation import Quantization
from speculon.core.errors import ModelError
from speculon.runtimes.torch.budget import MemoryBudget, MemoryEstimate, scratch_bytes
from speculon.runtimes.torch.kv.slots import PER_SEQUENCE
from speculon.runtimes.torch.kv.states import slot_bytes
from speculon.runtimes.torch.loading.load import dtype_of, load_config, pick_device
from speculon.runtimes.torch.loading.probe import RECURRENT_LAYERS, expected_states
from speculon.runtimes.torch.loading.quantization import packed_bytes
from speculon.runtimes.torch.model.captured import RECORDERS, CaptureSizes
from speculon.runtimes.torch.model.linear import head_is_packed
from speculon.runtimes.torch.needs import LayerSpec, Needs, StateSpec

WITHOUT_ATTENTION = RECURRENT_LAYERS - {"hybrid", "hybrid_sliding"}  # layers that keep nothing in pages

MADE_NUMBERS = ("fp8",)  # methods whose weights transformers makes numbers of, on a CPU

# of a process: 0.37 GB after imports, 0.50 with the demo's target (torch for CPU, 2026-11-23)
LIBRARIES = 2**30

# the factors of layers with one input are joined, with zeros between: 1.5 times as large for Llama's layers
OF_ADAPTERS = 2

log = logging.getLogger("speculon")


# a model


def model_needs(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    scored: int,
    fused: bool = True,
    compile: bool = False,
    quantization: Quantization = "auto",
    *,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Needs:
    """The needs of a model that is not loaded; T = `rows` and R = `scored` in its largest forward.

    Raises `ModelError` for a checkpoint that loading would refuse.
    """
    folder = locate(path, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    checkpoint = read_checkpoint(folder)
    refuse_unsafe(checkpoint, allow_pickle=allow_pickle)
    with quiet():
        whole = load_config(checkpoint, trust_remote_code)
    config = whole.get_text_config()
    weights = packed_bytes(quantization, checkpoint, whole, dtype, device)
    if weights is None:
        weights = weight_bytes(checkpoint, dtype) + (fused_bytes(config, dtype, device) if fused else 0)
    scratch = scratch_bytes(config, dtype, device, rows, scored)
    if fused and compile and device.type in RECORDERS:
        weights += CaptureSizes.of_target(config, expected_layers(config, dtype)).num_bytes(dtype)
    return Needs(
        layers=expected_layers(config, dtype),
        max_context=getattr(config, "max_position_embeddings", None),
        bytes_fixed=weights,
        bytes_scratch=scratch,
        states=recurrent_states(config, dtype),
    )


def recurrent_states(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[tuple[StateSpec, ...], ...]:
    """The recurrent states of each mixer, where the config names recurrent layers."""
    if not RECURRENT_LAYERS & set(getattr(config, "layer_types", None) or ()):
        return ()
    try:
        with quiet():
            return expected_states(config, dtype)
    except Exception as error:  # of any model code; the engine judges again what was loaded
        log.info("the states of %s are unknown before it is loaded: %s", type(config).__name__, error)
        return ()


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """The weights in `dtype`; as they are stored those of pickles, and quantised ones that stay so."""
    if checkpoint.num_parameters is None or checkpoint.quantization not in (None, *MADE_NUMBERS):
        return checkpoint.num_bytes
    return checkpoint.num_parameters * dtype.itemsize


def fused_bytes(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """What fusing adds: a packed copy of a head that is tied to the embedding."""
    head: int = config.vocab_size * config.hidden_size * dtype.itemsize
    return head if config.tie_word_embeddings and head_is_packed(dtype, device) else 0


def expected_layers(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    """The shapes of the K and V of each layer that attends, as the config implies."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # purely recurrent
        return ()
    if getattr(config, "kv_lora_rank", None):  # latent attention: pages hold the expanded heads
        k_dim, v_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or heads
        k_dim = v_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or ()
    silent = sum(kind in WITHOUT_ATTENTION for kind in types)
    return (LayerSpec("attention", heads, k_dim, v_dim, dtype),) * (int(config.num_hidden_layers) - silent)


# a process


class ProcessMemory(NamedTuple):
    estimate: MemoryEstimate
    pool: int  # of that, bytes of the page pool


class LargestStep(NamedTuple):
    """The largest forward of an engine: T = `rows` and R = `scored`."""

    dtype: torch.dtype
    device: torch.device
    rows: int
    scored: int


def largest_step(config: EngineConfig) -> LargestStep:
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
    return LargestStep(dtype, device, config.max_batch_tokens + drafts, config.max_num_seqs + drafts)


def adapter_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """The LoRA adapters of the target. Raises `ModelError` for what loading would refuse."""
    parameters = sum(adapter.num_parameters for adapter in read_adapters(config.adapters))
    return OF_ADAPTERS * parameters * dtype.itemsize


def process_memory(
    config: EngineConfig, step: LargestStep, drafters: Sequence[Needs], total: int
) -> ProcessMemory:
    """The estimate of an engine that may take `total` bytes, instead of what happens to be free.

    Raises `ModelError` or `ConfigError` where loading would.
    """
    target = model_needs(
        config.model,
        *step,
        config.fuse,
        config.compile == "now",
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
    budget = MemoryBudget(config, target, min(limits), step.device, held=held, free=max(0, total - held))
    return ProcessMemory(budget.estimate(drafters), budget.pool_bytes(drafters))
