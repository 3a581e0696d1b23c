"""What all drafters with weights have in common: they ask for memory, load, and read the target's pages."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol, Self

from speculon.core.config import SpeculationConfig
from speculon.core.types import Limits
from speculon.runtimes.torch.needs import Needs
from speculon.speculation.proposers.base import Proposer

if TYPE_CHECKING:
    from speculon.decoding.sequence import Sequence
    from speculon.runtimes.torch.drafters.host import DrafterHost
    from speculon.runtimes.torch.kv.draft_pages import DraftPages
    from speculon.runtimes.torch.model.target import Runner


class WeightedProposer(Proposer):
    """A proposer with weights: build -> load -> bind, then as any other.

    What it knows of a sequence lies in pages and slots, which end with the sequence.
    """

    needs: Needs  # a forecast until `load`
    # which of its layers are fused, and whether forwards are compiled or captured; a plug-in may have none
    runner: Runner
    pages: DraftPages

    @classmethod
    @abstractmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> Self:
        """Reads what the checkpoint is, and sets `needs`. Raises `ConfigError` or `ModelError`."""

    @abstractmethod
    def load(self) -> None:
        """Called once, where `needs.bytes_fixed` is not 0: memory is granted, `needs` becomes exact."""

    def bind(self, pages: DraftPages) -> None:
        """Called once, after `load`: the page pool is sized, and has the layers of `needs`."""
        needs, self.pages = self.needs, pages
        self.limits = Limits(
            max_context=needs.max_context,
            max_drafts=needs.max_drafts,
            reads_states=bool(needs.taps),
            branches=not needs.states,
        )

    def unread(self, seq: Sequence) -> int:
        """As `ReadsTokens` says."""
        return self.pages.unread(seq)


class DrafterFactory(Protocol):
    def __call__(self, config: SpeculationConfig, host: DrafterHost) -> WeightedProposer: ...
