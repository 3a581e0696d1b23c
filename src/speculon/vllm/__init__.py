"""Our lookups and policies inside vLLM: `speculon.vllm.Proposer` is its proposer of method `custom_class`."""

from speculon.vllm.proposer import Proposer

__all__ = ["Proposer"]
