"""What a model of the pool is made of: its engine, its tokenizer, and its share of the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from speculon.checkpoints.processors import images_of
from speculon.core.config import EngineConfig
from speculon.core.errors import SpeculonError
from speculon.core.media.prompts import Images
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.async_engine import AsyncEngine
from speculon.engine.client import EngineClient
from speculon.runtimes.registry import for_settings

if TYPE_CHECKING:
    from speculon.runtimes.base import Fit

GB = 2**30


class Share(NamedTuple):
    """What one model may take of the server's memory, and the settings that hold it to that."""

    bytes: int
    settings: dict[str, Any]


class ModelLoader:
    """Makes the parts of a model. What imports torch is called in a thread."""

    def engine(self, settings: dict[str, Any], on_stage: Callable[[str], None]) -> EngineClient:
        return AsyncEngine(settings, on_stage)

    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        return for_settings(config).tokenizer(config)

    def images(self, config: EngineConfig) -> Images:
        """The images of requests, which come by URL alone."""
        return images_of(config, files=False)

    def sampling(self, config: EngineConfig) -> dict[str, Any]:
        """Defaults of requests that the checkpoint brings."""
        from speculon.checkpoints.generation import sampling_defaults

        return sampling_defaults(config)

    def drafters(self, config: EngineConfig, drafts: Iterable[str]) -> list[Fit]:
        """What fits around a model, then each of `drafts`; none of a model that is not there."""
        try:
            return for_settings(config).fits(config, drafts)
        except SpeculonError:
            return []

    def device(self, config: EngineConfig) -> str:
        """Whose memory an engine of these settings takes. Raises `ConfigError` for a missing device."""
        return for_settings(config).device_name(config)

    def free_memory(self, config: EngineConfig) -> int:
        """Free bytes of the device of these settings."""
        return for_settings(config).free_bytes(config)

    def share(self, settings: dict[str, Any], total: int) -> Share:
        """What the model of `settings` takes, if it may take `total` bytes. Raises what loading would."""
        config, memory, pool = for_settings(EngineConfig(**settings)).memory_needed(settings, total)
        limit = config.speculation.memory_limit_gb
        size = memory.total if limit is None else int(limit * GB)
        limits: dict[str, Any] = {}
        if pool and config.kv_memory_gb is None and config.num_blocks is None:
            limits["kv_memory_gb"] = pool / GB
        if config.snapshot_memory_gb is None and memory.snapshots:
            limits["snapshot_memory_gb"] = memory.snapshots / GB
        # the limit is that of the whole process
        limits["speculation"] = {**settings.get("speculation", {}), "memory_limit_gb": size / GB}
        return Share(size, {**settings, **limits})
