"""Names to drafters with weights: the table of methods, this process, installed packages."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from speculon.speculation.proposers import registry

if TYPE_CHECKING:
    from speculon.runtimes.torch.drafters.base import DrafterFactory

# name -> module:class, whose `build` makes it; imported when first used
TABLE: dict[str, str] = {
    "draft_model": "speculon.runtimes.torch.drafters.draft_model.proposer:DraftModel",
    "pard": "speculon.runtimes.torch.drafters.draft_model.pard:Pard",
    "eagle3": "speculon.runtimes.torch.drafters.eagle3.proposer:Eagle3Drafter",
    "dflash": "speculon.runtimes.torch.drafters.dflash.proposer:DFlashDrafter",
    "mtp": "speculon.runtimes.torch.drafters.mtp.proposer:Mtp",
    "gemma4_assistant": "speculon.runtimes.torch.drafters.gemma4_assistant.proposer:Gemma4Assistant",
}
registered: dict[str, DrafterFactory] = {}


def register(name: str, factory: DrafterFactory) -> None:
    """Adds a drafter with weights for this process, or replaces the one of this name; a package does the same
    with an entry point.
    """
    registered[name] = factory
    registry.register(name, None)


def find(name: str) -> DrafterFactory:
    factory: DrafterFactory
    if name in registered:
        return registered[name]
    if name in TABLE:
        module, _, drafter = TABLE[name].partition(":")
        factory = getattr(import_module(module), drafter).build
    else:
        factory = next(iter(entry_points(group=registry.DRAFTERS, name=name))).load()
    return factory
