"""The interface of proposers: what a way of drafting must and may implement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from speculon.core.config import SpeculationConfig
from speculon.core.types import NO_LIMITS, Draft, Limits, Verdict
from speculon.decoding.sequence import Sequence

if TYPE_CHECKING:
    from speculon.speculation.proposers.pools import Pools


class Proposer(Protocol):
    """A way of drafting. One instance serves all sequences of an engine.

    For each sequence the engine calls `admit` once, then `propose` and `observe` in each round, and `release`
    at the end. If a method raises, its sequences continue without drafts, with reason `error`. Proposers with
    weights are made by the runtime, which feeds them (`speculon.runtimes.torch.drafters.base`).
    """

    limits: Limits = NO_LIMITS

    def admit(self, seq: Sequence) -> None:
        """Called once, before the method is first asked for a draft of `seq`, which may run already."""

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        """Drafts for sequences whose committed tokens are `seq.tokens`.

        Returns one draft per sequence with at most as many tokens as its entry in `ks`. A draft may be empty
        (`no_draft(stop)` says why).
        """
        ...

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict]) -> None:
        """Tells what the target accepted. `seq.tokens` already has the committed tokens of the round."""

    def release(self, seq: Sequence) -> None:
        """Called once, when `seq` has ended or was aborted."""


@runtime_checkable
class ReadsTokens(Protocol):
    """A proposer that has to compute the tokens of a sequence before it can draft, as every model does."""

    def unread(self, seq: Sequence) -> int:
        """The number of tokens that it has not computed yet, without the last one. Policies add their cost to
        the price of a draft.
        """
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that keeps answers after their sequences have ended. The engine counts, saves and deletes
    them by the key of their pool.
    """

    pools: Pools


@runtime_checkable
class Extending(Protocol):
    """A lookup that can continue the draft of another method, and takes only microseconds for it."""

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        """A draft of at most `k` tokens, without q, that follows `seq.tokens` and then `ahead`.

        It must keep nothing of `ahead`, because the target may reject these tokens.
        """
        ...


@runtime_checkable
class Branching(Protocol):
    """A proposer that can draft trees."""

    def propose_trees(self, seqs: list[Sequence], ks: list[int], depths: list[int]) -> list[Draft]:
        """Drafts trees, where `propose` drafts chains.

        Returns one tree per sequence, without q, with at most as many tokens as its entry in `ks` and at most
        as many on one path as its entry in `depths`. The best tokens come first, and each after its parent.
        """
        ...


class Lookup(Proposer):
    """Base of lookups: proposers without weights, which can also continue drafts of other methods.

    A subclass implements `extend`; `propose` follows from it.
    """

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        return [self.extend(seq, (), k) for seq, k in zip(seqs, ks, strict=True)]

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        """A draft of at most `k` tokens, without q, that follows `seq.tokens` and then `ahead`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the factory of a proposer gets to know of the target."""

    vocab_size: int
    max_context: int
    branches: bool = True  # whether a rejected branch of a tree leaves no trace in the target


class ProposerFactory(Protocol):
    """Makes the proposer of an engine from its settings; called at the first request that needs it."""

    def __call__(self, config: SpeculationConfig, target: TargetFacts) -> Proposer: ...
