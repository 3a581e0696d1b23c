"""The interface of drafters with weights, which need memory, load a checkpoint and use the target's pages."""

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
    """A proposer with weights. The runtime calls `build`, `load` and `bind` once, in this order, and then
    the engine uses it as any other proposer.

    Everything that it computes of a sequence is stored in pages and slots, which are freed with the sequence.
    """

    needs: Needs  # an estimate until `load`, exact afterwards
    # says which layers are fused, and whether forwards are compiled or captured; a plug-in may have none
    runner: Runner
    pages: DraftPages

    @classmethod
    @abstractmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> Self:
        """Reads the config of the checkpoint, and sets `needs`, before any weight is loaded.

        Raises `ConfigError` for a wrong setting, and `ModelError` for a checkpoint that cannot be used.
        """

    @abstractmethod
    def load(self) -> None:
        """Loads the weights, after the memory estimate has granted them, and makes `needs` exact. Called
        once, and not at all if `needs.bytes_fixed` is 0.
        """

    def bind(self, pages: DraftPages) -> None:
        """Takes the pages, after the page pool was sized with the layers of `needs`. Called once, after
        `load`.
        """
        needs, self.pages = self.needs, pages
        self.limits = Limits(
            max_context=needs.max_context,
            max_drafts=needs.max_drafts,
            reads_states=bool(needs.taps),
            branches=not needs.states,
        )

    def unread(self, seq: Sequence) -> int:
        """The number of tokens that it has not computed yet, without the last one."""
        return self.pages.unread(seq)


class DrafterFactory(Protocol):
    """Makes the drafter of a method; usually the `build` of its class."""

    def __call__(self, config: SpeculationConfig, host: DrafterHost) -> WeightedProposer: ...
