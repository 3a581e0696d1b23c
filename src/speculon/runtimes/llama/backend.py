"""How this runtime is found, sized and loaded: the module that `runtimes.registry` names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from speculon.checkpoints.gguf.header import is_gguf, read_split
from speculon.checkpoints.locate import locate, named
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.config.engine import changed
from speculon.core.config.speculation import AUTO, OFF
from speculon.core.errors import ConfigError, ModelNotFound
from speculon.core.memory import free_bytes as free_memory
from speculon.core.types import Reason
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.runtimes.base import Fit
from speculon.runtimes.llama.library import library
from speculon.runtimes.llama.memory import MemoryPlan, plan_memory
from speculon.runtimes.llama.servers import of_this_machine
from speculon.speculation.proposers.compose import Refusal
from speculon.speculation.proposers.registry import has_weights

if TYPE_CHECKING:
    from speculon.runtimes.llama.runtime import LlamaRuntime

# settings of runtime torch
TORCH_ALONE = (
    "dtype",
    "quantization",
    "fuse",
    "compile",
    "batch_invariant",
    "block_size",
    "num_blocks",
    "snapshot_memory_gb",
)
DRAFT_MODEL = "draft_model"
NEEDS_STATES = (
    "drafts from hidden states, or several tokens at once, which llama.cpp's stable interface does not give"
)
ROLLBACK = 8  # guess: drafts after which a recurrent state is kept; each takes the memory of one

log = logging.getLogger("speculon")


def refusal(config: EngineConfig) -> str | None:
    """As `Backend` says."""
    if not is_gguf(path := named(config.model) or config.model):
        return f"llama.cpp runs GGUF files, and {path} is none"
    if folder := next((file for file in config.adapters.values() if not is_gguf(file)), None):
        return f"adapter {folder!r} needs runtime torch: llama.cpp reads adapters in GGUF files"
    if other := changed(config, TORCH_ALONE):
        return f"{other} is a setting of runtime torch"
    if config.device == "cpu" and config.gpu_layers:
        return f"gpu_layers = {config.gpu_layers}: device = 'cpu' leaves none for a GPU"
    if config.device not in ("auto", "cpu"):
        return f"device = {config.device!r} is a setting of runtime torch (gpu_layers is that of llama)"
    return draft_refusal(config.speculation)


def draft_refusal(config: SpeculationConfig) -> str | None:
    """Why the drafters of the settings cannot run here; None where they can, or there are none."""
    if config.drafts and config.draft_quantization != SpeculationConfig().draft_quantization:
        return f"draft_quantization = {config.draft_quantization!r} is a setting of runtime torch"
    if config.method != DRAFT_MODEL and config.method not in (AUTO, OFF) and has_weights(config.method):
        return f"method = {config.method!r} needs runtime torch: it {NEEDS_STATES}"
    for method, draft in config.drafts.items():
        if method != DRAFT_MODEL:
            return f"draft = {draft!r} ({method}) needs runtime torch: it {NEEDS_STATES}"
        try:
            path = locate(draft, fetch=False) if isinstance(draft, str) else None
        except ModelNotFound:
            path = None
        if path is None or not is_gguf(path):
            return f"draft = {draft!r} needs runtime torch: llama.cpp takes another GGUF file as draft model"
    return None


def tokenizer(config: EngineConfig) -> Tokenizer:
    """As `Backend` says."""
    from speculon.runtimes.llama.vocabulary import Vocabulary

    return Tokenizer(Vocabulary(locate(config.model), config))


def end_ids(config: EngineConfig, own: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a text by the file's metadata and by its tokenizer."""
    named = frozenset(read_split(locate(config.model)).end_ids)
    return named if own is None else named | own.end_ids


def prepare(config: EngineConfig) -> EngineConfig:
    """As `Backend` says."""
    library()
    reach = read_split(locate(config.model)).number("context_length")
    if reach and config.max_context is not None and config.max_context > reach:
        raise ConfigError(f"max_context = {config.max_context}: {config.model} reaches {reach}")
    if config.speculation.method == DRAFT_MODEL and DRAFT_MODEL not in config.speculation.drafts:
        raise ConfigError(f"method = {DRAFT_MODEL!r} needs a drafter: set draft (--draft FILE.gguf)")
    return config.model_copy(update={"gpu_layers": 0}) if config.device == "cpu" else config


def load(
    config: EngineConfig, tokenizer: Tokenizer | None, progress: Callable[[str], None] | None = None
) -> LlamaRuntime:
    """As `Backend` says."""
    import torch

    from speculon.runtimes.llama.drafter import LlamaDraftModel
    from speculon.runtimes.llama.runtime import LlamaRuntime
    from speculon.runtimes.llama.trial import may_repack

    tell = progress or (lambda stage: None)
    config = config.model_copy(update={"threads": config.threads or usual_threads()})
    # torch's own threads would spin on the cores that llama.cpp computes on, and double the time of a row
    torch.set_num_threads(1)
    path, draft = locate(config.model), config.speculation.drafts.get(DRAFT_MODEL)
    plan = plan_memory(read_split(path), config, free_memory(), rollback_of(config))
    tell(f"loading {path.name} with llama.cpp")
    repack, ends = may_repack(path, config, tell), end_ids(config, tokenizer)
    runtime = LlamaRuntime(path, config, plan, repack, rollback_of(config), ends)
    if draft is not None:
        tell(f"loading {draft}")
        draft_path = locate(str(draft))
        try:
            repack = may_repack(draft_path, config, tell)
            model = LlamaDraftModel.load(draft_path, config, runtime, tokenizer, repack)
            runtime.drafters[DRAFT_MODEL] = model
        except ConfigError as error:  # of its memory
            if config.speculation.memory_policy == "fail":
                raise
            log.warning("%s", error)
            runtime.refusals[DRAFT_MODEL] = Refusal(Reason.MEMORY, str(error))
    return runtime


@cache
def usual_threads() -> int:
    """Torch's choice, before it is left with one thread here."""
    import torch

    return torch.get_num_threads()


def rollback_of(config: EngineConfig) -> int:
    """Rows by which a recurrent state can go back."""
    return ROLLBACK if config.speculation.most() else 0


def wrap(model: Any, tokenizer: Tokenizer | None, config: EngineConfig) -> NoReturn:
    raise ConfigError("a model object of torch runs on runtime torch alone")


def drafts_of(draft: str) -> NoReturn:
    raise ConfigError("a model object of torch runs on runtime torch alone")


# before an engine is started


def fits(config: EngineConfig, drafts: Iterable[str]) -> list[Fit]:
    """Each of `drafts`; nothing is searched for: whether a GGUF file has enough of the target's
    tokens is known once both are loaded.
    """
    refusals = {draft: draft_refusal(SpeculationConfig(draft=draft)) for draft in drafts}
    return [Fit(draft, "" if why else DRAFT_MODEL, refusal=why) for draft, why in refusals.items()]


def device_name(config: EngineConfig) -> str:
    """As `Backend` says."""
    return "gpu" if config.device != "cpu" and config.gpu_layers != 0 and of_this_machine() else "cpu"


def free_bytes(config: EngineConfig) -> int:
    """Free bytes of the machine: llama.cpp itself divides a model between it and its GPUs."""
    return free_memory()


def memory_needed(settings: dict[str, Any], total: int) -> tuple[EngineConfig, MemoryPlan, int]:
    """As `Backend` says."""
    config = prepare(EngineConfig(**settings))
    plan = plan_memory(read_split(locate(config.model)), config, total, rollback_of(config))
    if draft := config.speculation.drafts.get(DRAFT_MODEL):
        own = config.model_copy(update={"max_context": plan.length, "kv_memory_gb": None})
        beside = plan_memory(read_split(locate(str(draft))), own, total - plan.total)
        plan = replace(plan, weights=plan.weights + beside.total)
    return config, plan, plan.kv


def describe_alone(model: str, form: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """As `Backend` says."""
    return load(prepare(EngineConfig(model=model, **form)), None, tell).describe()
