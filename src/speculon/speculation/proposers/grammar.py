"""What a grammar leaves no choice about: keys, brackets, separators.

Drafted by the token, and never wrong.
"""

from __future__ import annotations

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft, Stop, no_draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import Lookup, TargetFacts

NAME = "grammar"
NO_MATCH, CHOICE = no_draft(Stop.NO_MATCH), no_draft(Stop.CHOICE)


class Forced(Lookup):
    """Drafts the tokens that must follow in `Sequence.grammar`."""

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> Forced:
        return cls()

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
