"""The class that vLLM makes: its proposer of method `custom_class`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from speculon.speculation.vllm.drafter import VllmDrafter
from speculon.speculation.vllm.settings import VllmSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm.speculon")


class Proposer:
    """Its dotted name is the `model` of vLLM's `speculative_config`, whose `method` is `custom_class`.

    Raises `ConfigError` or `InvalidParameter` for settings that are wrong or that vLLM has no room for: vLLM
    does not start.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = VllmSettings.of(vllm_config)
        # vLLM takes the drafts of one rank and sends them to all: K follows that one's clock
        self._drafter = VllmDrafter(settings) if settings.drafts else None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: lookups have no weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens of each row of a step; none for a row whose prompt is still computed.

        `sampled_token_ids` are the new tokens by row, which `token_ids_cpu` [rows, max_model_len] has
        already; `num_tokens_no_spec` [rows] are the lengths with them. An error costs the drafts, not vLLM's
        step.
        """
        if self._drafter is not None:
            try:
                return self._drafter.step(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:
                log.exception("drafting failed; this engine goes on without drafts")
                self._drafter = None
        return [[] for _ in sampled_token_ids]
