"""The plug: what a way of drafting has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from speculon.core.config import SpeculationConfig
from speculon.core.types import NO_LIMITS, Draft, Limits, Verdict
from speculon.decoding.sequence import Sequence

if TYPE_CHECKING:
    from speculon.speculation.proposers.pools import Pools


class Proposer(Protocol):
    """admit -> (propose -> observe)* -> release, for each sequence that uses it.

    One instance serves all sequences of an engine. It may raise: the sequence then goes on plainly, with
    reason `error`. Those with weights are made by the runtime that feeds them.
    """

    limits: Limits = NO_LIMITS

    def admit(self, seq: Sequence) -> None:
        """Called once, before the first round of `seq`."""

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        """One draft per sequence, of at most its k tokens; an empty one where it has none."""
        ...

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict]) -> None:
        """What became of the round; `seqs` hold the committed tokens already."""

    def release(self, seq: Sequence) -> None:
        """Called once, when `seq` has ended or was aborted."""


@runtime_checkable
class ReadsTokens(Protocol):
    """A proposer that computes the tokens of a sequence itself before it drafts: a model of any kind."""

    def unread(self, seq: Sequence) -> int:
        """Tokens that it has not computed yet, without the last one."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that keeps answers beyond their sequences: they are counted, saved and deleted by key."""

    pools: Pools


@runtime_checkable
class Extending(Protocol):
    """A lookup that can continue another method's draft, in microseconds."""

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        """What would follow `seq.tokens` and then `ahead`: at most `k` tokens, without q.

        Nothing of `ahead` may be kept.
        """
        ...


@runtime_checkable
class Branching(Protocol):
    """A proposer that can draft trees."""

    def propose_trees(self, seqs: list[Sequence], ks: list[int], depths: list[int]) -> list[Draft]:
        """As `propose`: one tree per sequence, of at most its k tokens, the best first and each after
        its parent, and at most its depth in a row; without q.
        """
        ...


class Lookup(Proposer):
    """A proposer without weights whose drafts continue what is committed, or drafts of other methods."""

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        return [self.extend(seq, (), k) for seq, k in zip(seqs, ks, strict=True)]

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        """As `Extending` says."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a proposer may know of the target before it is made."""

    vocab_size: int
    max_context: int
    branches: bool = True  # whether a rejected branch of a tree leaves no trace in the target


class ProposerFactory(Protocol):
    def __call__(self, config: SpeculationConfig, target: TargetFacts) -> Proposer: ...
