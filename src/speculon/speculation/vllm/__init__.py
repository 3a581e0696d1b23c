"""Our lookups and policies inside vLLM: `Proposer` is its proposer of method `custom_class`."""

from speculon.speculation.vllm.proposer import Proposer

__all__ = ["Proposer"]
