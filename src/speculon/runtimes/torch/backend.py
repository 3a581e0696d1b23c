"""How this runtime is found, sized and loaded: the module that `runtimes.registry` names.

Torch is imported where it is used: a server looks for drafters in its own process, which holds no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from speculon.checkpoints.headers import read_checkpoint, refuse_unsafe
from speculon.checkpoints.locate import locate
from speculon.core.config import EngineConfig, ModelObject
from speculon.core.config.engine import changed
from speculon.core.errors import ConfigError
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.torch.drafters.choose import by_method, check_drafts, with_drafts
from speculon.runtimes.torch.drafters.choose import fits as fits
from speculon.runtimes.torch.drafters.pairing import is_search

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from speculon.runtimes.torch.budget import MemoryEstimate
    from speculon.runtimes.torch.runtime import TorchRuntime

log = logging.getLogger("speculon")


# settings of runtime llama
LLAMA_ALONE = ("gpu_layers", "kv_cache_type", "flash_attention", "mmap", "tensor_split", "rpc", "repack")


def refusal(config: EngineConfig) -> str | None:
    """As `Backend` says."""
    other = changed(config, LLAMA_ALONE)
    return other and f"{other} is a setting of runtime llama"


def tokenizer(config: EngineConfig) -> Tokenizer:
    """As `Backend` says."""
    from speculon.checkpoints.reading import load_tokenizer  # with transformers, which takes seconds

    return Tokenizer(load_tokenizer(config.model, trust_remote_code=config.trust_remote_code))


def prepare(config: EngineConfig) -> EngineConfig:
    """As `Backend` says."""
    config = prepare_drafts(config)
    permissions = {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}
    refuse_unsafe(read_checkpoint(locate(config.model, **permissions)), allow_pickle=config.allow_pickle)
    return config


def load(
    config: EngineConfig, tokenizer: Tokenizer | None, progress: Callable[[str], None] | None = None
) -> TorchRuntime:
    """As `Backend` says."""
    import torch

    from speculon.runtimes.torch.loading.ends import add_ends
    from speculon.runtimes.torch.loading.load import load_target
    from speculon.runtimes.torch.runtime import TorchRuntime

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
        compile=config.compile == "now",
        batch_invariant=config.batch_invariant,
        quantization=config.quantization,
        adapters=config.adapters,
        progress=progress,
    )
    add_ends(target, tokenizer)
    if config.dtype == "float16" and target.device.type == "cpu":
        log.warning("dtype float16 on a CPU: most compute float32 faster, and numbers beyond 65504 overflow")
    return TorchRuntime(target, tokenizer, config)


def wrap(model: PreTrainedModel, tokenizer: Tokenizer | None, config: EngineConfig) -> TorchRuntime:
    """A runtime of a model in memory, which is not modified."""
    import torch

    from speculon.runtimes.torch.loading.ends import add_ends
    from speculon.runtimes.torch.loading.load import wrap_model
    from speculon.runtimes.torch.runtime import TorchRuntime

    if config.threads:
        torch.set_num_threads(config.threads)
    form = config.model_dump(include={"max_context", "batch_invariant"})
    target = wrap_model(model, fused=config.fuse, compile=config.compile == "now", **form)
    add_ends(target, tokenizer)
    target.prompts_apart = False  # what is one round's prompt was generated in another
    return TorchRuntime(target, tokenizer, config)


def drafts_of(draft: str) -> str | dict[str, str | ModelObject]:
    """The drafter at a path, under its method. Raises `ConfigError` for a search, which needs a folder."""
    if is_search(draft):
        why = "a model object lies in no folder to look around in; name the drafter's"
        raise ConfigError(f"draft = {draft!r}: {why}")
    return by_method(draft)


# before an engine is started


def device_name(config: EngineConfig) -> str:
    """Whose memory an engine of these settings takes. Raises `ConfigError` for a missing device."""
    from speculon.runtimes.torch.loading.load import pick_device

    device = pick_device(config.device)
    return f"cuda:{device.index or 0}" if device.type == "cuda" else device.type


def free_bytes(config: EngineConfig) -> int:
    """Free bytes of the device of these settings."""
    from speculon.runtimes.torch.budget import free_memory
    from speculon.runtimes.torch.loading.load import pick_device

    device = pick_device(config.device)
    if device.type == "cpu":
        return free_memory(device)
    # in a process of its own: a look at an accelerator takes hundreds of its megabytes until the end
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        return other.submit(free_memory, device).result()


def memory_needed(settings: dict[str, Any], total: int) -> tuple[EngineConfig, MemoryEstimate, int]:
    """The settings with their drafters, what the process of their engine takes of `total` bytes, and how much
    of that are pages. Raises what loading would.
    """
    from speculon.runtimes.torch.drafters.needs import drafter_needs
    from speculon.runtimes.torch.loading.memory import largest_step, process_memory

    config = prepare_drafts(EngineConfig(**settings))
    step = largest_step(config)
    memory, pool = process_memory(config, step, drafter_needs(config, step), total)
    return config, memory, pool


def describe_alone(model: str, form: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """As `Backend` says."""
    from speculon.runtimes.torch import inspection

    return inspection.describe_alone(model, form, tell)


def prepare_drafts(config: EngineConfig) -> EngineConfig:
    """The settings with each drafter under its method, checked against the model's files."""
    config = with_drafts(config)
    check_drafts(config)
    return config
