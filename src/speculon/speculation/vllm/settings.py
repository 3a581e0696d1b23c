"""What the plug-in may know of vLLM and of our settings, checked when vLLM starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from speculon.core.checked import Checked
from speculon.core.config import MAX_DRAFTS, SpeculationConfig
from speculon.core.config.engine import EngineConfig
from speculon.core.errors import ConfigError, InvalidParameter
from speculon.speculation.proposers.registry import AUTO, OFF

LOOKUPS = ("suffix", "ngram")
METHODS = (AUTO, OFF, *LOOKUPS)
EXTERNAL = "external_launcher"


class VllmOptions(Checked):
    """`[speculation.options]` inside vLLM."""

    lookups: tuple[str, ...] = Field(
        LOOKUPS, min_length=1, description="what method `auto` asks, in turn until one has a draft"
    )
    pool: str | None = Field(
        None, description="one pool of earlier answers for all requests; None: one per prompt; empty: none"
    )
    log_seconds: float = Field(60.0, gt=0, allow_inf_nan=False, description="between two lines of the log")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    speculation: SpeculationConfig
    options: VllmOptions
    methods: tuple[str, ...]  # asked in turn
    most: int  # drafts of a round
    max_len: int  # tokens of a request
    max_rows: int  # of a step
    vocab_size: int
    eos_ids: frozenset[int]
    stages: int  # of the pipeline: a request is in every so many-th step
    drafts: bool  # whether vLLM takes the drafts of this rank

    @classmethod
    def of(cls, vllm: Any) -> VllmSettings:
        """Of a `VllmConfig`, the settings file and the environment. Raises `ConfigError`."""
        config = EngineConfig().speculation
        options = options_of(config)
        ranks, model = vllm.parallel_config, vllm.model_config
        if ranks.distributed_executor_backend == EXTERNAL and ranks.world_size > 1:
            # each of its ranks schedules by itself, and K follows each one's own clock
            raise ConfigError(
                f"distributed_executor_backend = {EXTERNAL!r}: not supported, because each of its ranks "
                "would draft by itself"
            )
        methods = methods_of(config, options)
        if methods == LOOKUPS:  # suffix lookup finds all matches of two tokens and more
            config = config.model_copy(update={"prompt_lookup_min": 1, "prompt_lookup_max": 1})
        return cls(
            config,
            options,
            methods,
            most_of(config, vllm.speculative_config.num_speculative_tokens),
            model.max_model_len,
            vllm.scheduler_config.max_num_batched_tokens,
            model.get_vocab_size(),
            eos_ids_of(model.hf_text_config),
            ranks.pipeline_parallel_size,
            drafts=ranks.rank % ranks.tensor_parallel_size == 0,
        )


def options_of(config: SpeculationConfig) -> VllmOptions:
    try:
        return VllmOptions(**config.options)
    except InvalidParameter as error:
        raise InvalidParameter(f"speculation.options.{error.name}", error.value, error.limit) from None


def methods_of(config: SpeculationConfig, options: VllmOptions) -> tuple[str, ...]:
    if config.draft is not None:
        raise InvalidParameter(
            "speculation.draft", config.draft, "must be None: inside vLLM only lookups draft"
        )
    if config.method not in METHODS:
        raise InvalidParameter(
            "speculation.method", config.method, f"inside vLLM it must be one of {', '.join(METHODS)}"
        )
    unknown = [name for name in options.lookups if name not in LOOKUPS]
    if unknown:
        raise InvalidParameter(
            "speculation.options.lookups", unknown[0], f"must be among {', '.join(LOOKUPS)}"
        )
    named = () if config.method == OFF else (config.method,)
    return tuple(dict.fromkeys(options.lookups)) if config.method == AUTO else named


def most_of(config: SpeculationConfig, limit: int) -> int:
    """K: ours, as far as vLLM has room for it."""
    own = config.num_speculative_tokens
    if own is not None and own > limit:
        raise InvalidParameter(
            "speculation.num_speculative_tokens", own, f"must be at most {limit}, with which vLLM was started"
        )
    return min(config.most(), limit, MAX_DRAFTS)


def eos_ids_of(model: Any) -> frozenset[int]:
    ids = getattr(model, "eos_token_id", None)
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
