"""How far to speculate. A policy sees numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from speculon.control.auto import Auto
from speculon.control.timing import Timing
from speculon.core import Ask, Decision, Draft, Load, Reason, Sequence, Span, Verdict


class Policy(Protocol):
    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        """Who drafts how much for each decoding sequence, or the reason for nobody."""
        ...

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """Drops positions that would cost more than they bring; an empty draft lets the next method be asked."""
        ...

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """Learns from the round."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""


class Fixed:
    """The same K in every round, as far as max_tokens lets it."""

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        return [self._one(seq) for seq in seqs]

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        return draft

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """A fixed policy does not learn."""

    def forget(self, seq: Sequence) -> None:
        """It knows none."""

    def _one(self, seq: Sequence) -> Decision:
        if seq.plain:
            return Decision(None, 0, seq.off)
        if seq.room <= 1:  # the last token needs no draft: the target's own one is enough
            return Decision(None, 0, Reason.MAX_TOKENS)
        return Decision.of(Ask(method, min(seq.most(method), seq.room - 1)) for method in seq.methods)


POLICIES: dict[str, Callable[[], Policy]] = {"fixed": Fixed, "auto": Auto}


class Policies:
    """The policies of one engine: each sequence is decided for by its own."""

    def __init__(self) -> None:
        self._made: dict[str, Policy] = {}

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        decided: dict[int, Decision] = {}
        for name in dict.fromkeys(seq.policy for seq in seqs):
            mine = [seq for seq in seqs if seq.policy == name]
            decided.update(zip((seq.id for seq in mine), self._of(name).decide(mine, load), strict=True))
        return [decided[seq.id] for seq in seqs]

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        return self._of(seq.policy).trim(seq, method, draft)

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        for policy in self._made.values():
            policy.observe(spans, verdicts, timing)

    def forget(self, seq: Sequence) -> None:
        for policy in self._made.values():  # each has seen what became of every sequence
            policy.forget(seq)

    def _of(self, name: str) -> Policy:
        if name not in self._made:
            self._made[name] = POLICIES[name]()
        return self._made[name]
