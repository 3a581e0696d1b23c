"""What a grammar leaves no choice about: keys, brackets, separators.

Drafted by the token, and never wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft, Needs, Stop, Verdict, no_draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import States, TargetFacts

if TYPE_CHECKING:
    from speculon.decoding.kv.lease import DraftLease

NAME = "grammar"
NO_MATCH, CHOICE = no_draft(Stop.NO_MATCH), no_draft(Stop.CHOICE)


class Forced:
    """Drafts the tokens that must follow in `Sequence.grammar`."""

    def __init__(self) -> None:
        self.needs = Needs()

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> Forced:
        return cls()

    def admit(self, seq: Sequence) -> None:
        """Nothing to prepare: the grammar stands where the text stands."""

    def propose(self, seqs: list[Sequence], budgets: list[int], lease: DraftLease) -> list[Draft]:
        return [self._draft(seq, k) for seq, k in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[Sequence], verdicts: list[Verdict], taps: States) -> None:
        """Nothing to learn."""

    def release(self, seq: Sequence) -> None:
        """Nothing was kept."""

    def _draft(self, seq: Sequence, k: int) -> Draft:
        return self.extend(seq, (), k)

    def extend(self, seq: Sequence, ahead: tuple[int, ...], k: int) -> Draft:
        grammar = seq.grammar
        if grammar is None:
            return NO_MATCH
        if ahead:
            grammar = grammar.fork()
            grammar.consume(ahead)
        tokens = grammar.forced()[:k]
        stop = Stop.LIMIT if len(tokens) == k else Stop.CHOICE
        return Draft(tokens, (NAME,) * len(tokens), stop=stop) if tokens else CHOICE
