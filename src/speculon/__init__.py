"""speculon: lossless speculative decoding. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculon.core.config import SamplingParams, SpeculationConfig

if TYPE_CHECKING:
    from speculon.engine.decoder import SpeculativeDecoder
    from speculon.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "SpeculationConfig", "SpeculativeDecoder", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from speculon.engine.llm import LLM

        return LLM
    if name == "SpeculativeDecoder":
        from speculon.engine.decoder import SpeculativeDecoder

        return SpeculativeDecoder
    raise AttributeError(f"module 'speculon' has no attribute {name!r}")
