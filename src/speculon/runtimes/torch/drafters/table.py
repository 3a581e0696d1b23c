"""The drafters with weights by method: built in, registered in this process, and from installed packages."""

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
    """Makes a drafter with weights known in this process, or replaces the one of this name.

    >>> register("my_head", MyHead.build)

    A package does the same for all processes with an entry point in the group `speculon.drafters`.
    """
    registered[name] = factory
    registry.register(name, None)


def find(name: str) -> DrafterFactory:
    """The factory of a method with weights."""
    factory: DrafterFactory
    if name in registered:
        return registered[name]
    if name in TABLE:
        module, _, drafter = TABLE[name].partition(":")
        factory = getattr(import_module(module), drafter).build
    else:
        factory = next(iter(entry_points(group=registry.DRAFTERS, name=name))).load()
    return factory
