"""The plug: what a way of drafting has to offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft, Verdict
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.needs import Needs

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.decoding.text.tokenizer import Tokenizer
    from speculon.runtimes.torch.kv.lease import DraftLease
    from speculon.runtimes.torch.model.target import Runner, Target
    from speculon.speculation.proposers.pools import Pools


States = Mapping[int, "Tensor"] | None


class Proposer(Protocol):
    """admit -> (propose -> observe)* -> release, for each sequence that uses it.

    One instance serves all sequences of an engine. It may raise: the sequence then goes on plainly, with
    reason `error`. One without weights needs no `load`.
    """

    needs: Needs

    def load(self) -> None:
        """Called once, before everything else, where `needs.bytes_fixed` is not 0: memory is granted, `needs`
        becomes exact.
        """

    def admit(self, seq: Sequence) -> None:
        """Called once, before the first round of `seq`."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        """One draft per sequence, of at most its budget of tokens; an empty one where it has none."""
        ...

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: States) -> None:
        """What became of the round; `seqs` hold the committed tokens already.

        `taps` are the states of all T rows of the target's forward, by layer [T, D], where anybody reads
        them.
        """

    def release(self, seq: Sequence) -> None:
        """Called once, when `seq` has ended or was aborted."""


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

    def propose_trees(
        self, seqs: list[Sequence], budgets: list[int], depths: list[int], lease: DraftLease
    ) -> list[Draft]:
        """As `propose`: one tree per sequence, of at most its budget of tokens, the best first and each after
        its parent, and at most its depth in a row; without q.
        """
        ...


class Lookup(Proposer):
    """A proposer without weights whose drafts continue what is committed, or drafts of other methods."""

    needs = Needs()

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        return [self.extend(seq, (), k) for seq, k in zip(seqs, budgets, strict=True)]

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        """As `Extending` says."""
        raise NotImplementedError


@runtime_checkable
class RunsModel(Protocol):
    """A drafter with a network of its own."""

    @property
    def runner(self) -> Runner:
        """Which of its layers are fused, and whether its forwards are compiled or captured."""
        ...


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a proposer may know of the target and its engine before it is built."""

    vocab_size: int
    max_context: int
    num_layers: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    tokenizer: Tokenizer | None = None
    rows: int = 0  # T and R of the engine's largest forward
    scored: int = 0
    sequences: int = 0  # that run at a time
    fuse: bool = True  # whether models are fused, and compiled then
    compile: bool = False
    batch_invariant: bool = False
    quantization: str = "auto"
    model: Target | None = None  # for drafters that share its weights or are tried on it


class Factory(Protocol):
    def __call__(self, config: SpeculationConfig, target: TargetFacts) -> Proposer: ...
