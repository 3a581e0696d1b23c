"""Drafts of a wanted acceptance, for capacity tests.

It remembers the texts that the engine has written. When the same prompt comes again (greedy, or with the same
seed) it drafts the remembered text, and lies at each position with probability 1 - acceptance. So: run the
load twice.
"""

from __future__ import annotations

import random

from speculon.core.config import SpeculationConfig
from speculon.core.types import Draft, Stop, no_draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import Proposer, TargetFacts

TextKey = tuple[tuple[int, ...], int, int]


class Synthetic(Proposer):
    """Tells the remembered truth with probability `acceptance` per position, given that the position before
    was true.
    """

    def __init__(self, acceptance: float, vocab_size: int, max_texts: int = 4096):
        self.acceptance, self.vocab_size, self.max_texts = acceptance, vocab_size, max_texts
        self.truth: dict[TextKey, tuple[int, ...]] = {}
        self.keys: dict[int, TextKey] = {}  # sequence id -> what its text is a function of
        self._chance = random.Random(0)

    @classmethod
    def build(cls, config: SpeculationConfig, target: TargetFacts) -> Synthetic:
        return cls(config.synthetic_acceptance, target.vocab_size)

    def admit(self, seq: Sequence) -> None:
        prompt = tuple(seq.tokens[: seq.request.prompt_len])
        self.keys[seq.id] = prompt, 0 if seq.request.params.greedy else seq.request.seed, seq.sample

    def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        return [self._draft(seq, k) for seq, k in zip(seqs, ks, strict=True)]

    def release(self, seq: Sequence) -> None:
        key, text = self.keys.pop(seq.id), tuple(seq.tokens[seq.request.prompt_len :])
        if key not in self.truth and len(self.truth) >= self.max_texts:
            self.truth.pop(next(iter(self.truth)))
        if len(text) >= len(self.truth.get(key, ())):
            self.truth[key] = text

    def _draft(self, seq: Sequence, k: int) -> Draft:
        at = seq.num_output
        truth = self.truth.get(self.keys[seq.id])
        if truth is None:
            return no_draft(Stop.NO_MATCH)
        drafts = [
            self._lie(token) if self._chance.random() >= self.acceptance else token
            for token in truth[at : at + k]
        ]
        stop = Stop.LIMIT if len(drafts) == k else Stop.SOURCE_END
        return Draft(tuple(drafts), ("synthetic",) * len(drafts), stop=stop)

    def _lie(self, token: int) -> int:
        return (token + 1 + self._chance.randrange(self.vocab_size - 1)) % self.vocab_size
