"""Loads the drafters with weights of an engine, as far as they fit into its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speculon.core.config import SpeculationConfig
from speculon.core.errors import MemoryExceeded
from speculon.core.types import Reason
from speculon.runtimes.torch.drafters.base import WeightedProposer
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.drafters.table import find
from speculon.runtimes.torch.needs import Needs
from speculon.speculation.proposers.compose import Refusal
from speculon.speculation.proposers.registry import WITH_CHECKPOINT, has_weights

if TYPE_CHECKING:
    from speculon.runtimes.torch.budget import MemoryEstimate

log = logging.getLogger("speculon")


@dataclass(slots=True)
class LoadedDrafters:
    """The loaded drafters of an engine, in the order of their layers in the page store."""

    proposers: dict[str, WeightedProposer] = field(default_factory=dict)  # by method
    first_layer: dict[str, int] = field(default_factory=dict)  # of each in the store
    refusals: dict[str, Refusal] = field(default_factory=dict)  # of those that did not fit: the estimate

    @property
    def needs(self) -> list[Needs]:
        return [drafter.needs for drafter in self.proposers.values()]

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose states any of them reads."""
        return tuple(sorted({layer for needs in self.needs for layer in needs.taps}))


def load_drafters(
    config: SpeculationConfig, host: DrafterHost, estimate: Callable[[list[Needs]], MemoryEstimate]
) -> LoadedDrafters:
    """Builds and loads the drafters of the settings. Each is judged by its forecast before anything of it is
    loaded, and again by what was loaded.

    Raises `MemoryExceeded` where one does not fit and the memory policy is to refuse.
    """
    drafters = LoadedDrafters()
    for method in dict.fromkeys([*config.drafts, config.method]):
        missing = method in WITH_CHECKPOINT and method not in config.drafts
        if missing or not has_weights(method):
            continue
        drafter = find(method)(config, host)
        if not fits(drafters, method, drafter, estimate):
            continue
        if drafter.needs.bytes_fixed:
            drafter.load()
            if not fits(drafters, method, drafter, estimate):
                continue
        drafters.first_layer[method] = len(host.model.layers) + sum(
            len(needs.layers) for needs in drafters.needs
        )
        drafters.proposers[method] = drafter
    return drafters


def fits(
    drafters: LoadedDrafters,
    method: str,
    drafter: WeightedProposer,
    estimate: Callable[[list[Needs]], MemoryEstimate],
) -> bool:
    """Whether another drafter has room beside those that are loaded; else its refusal is noted."""
    memory = estimate([*drafters.needs, drafter.needs])
    if memory.action == "refuse":
        raise MemoryExceeded(method, memory)
    if memory.action == "plain":
        drafters.refusals[method] = Refusal(Reason.MEMORY, str(memory))
    log.log(logging.INFO if memory.fits else logging.WARNING, "%s: %s", method, memory)
    return memory.action == "use"
