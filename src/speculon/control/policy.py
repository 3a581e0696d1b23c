"""How far to speculate. A policy sees numbers only: no model, no proposer, no tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from speculon.config import SpeculationConfig
from speculon.control.adaptive import Adaptive
from speculon.control.auto import Auto
from speculon.control.fixed import Fixed, Solo
from speculon.control.shadow import ShadowPolicy
from speculon.control.timing import Timing
from speculon.core import Decision, Draft, Load, Sequence, Span, Verdict


class Policy(Protocol):
    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        """Who drafts how much for each decoding sequence, or the reason for nobody."""
        ...

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        """The most drafts for each of the texts that a method is about to be asked for together; 0: it is not, after all."""
        ...

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        """Drops positions that would cost more than they bring; an empty draft lets the next method be asked."""
        ...

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        """Learns from the round."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""


@runtime_checkable
class Learning(Protocol):
    """A policy whose beliefs outlive a process."""

    def state(self) -> dict[str, Any]:
        """As JSON knows it."""
        ...

    def restore(self, state: Any) -> None:
        """Raises `ValueError` for what `state` cannot have told."""

    def costs_alone(self) -> None:
        """Keeps what it knows of costs, and nothing that texts have taught it."""


# name -> how it is made from the settings; `config.USUAL_DRAFTS` has the same names
POLICIES: Mapping[str, Callable[[SpeculationConfig], Policy]] = {
    "fixed": lambda config: Fixed(),
    "adaptive": lambda config: Adaptive(config.adaptive),
    "solo": lambda config: Solo(),
    "shadow": lambda config: ShadowPolicy(),
    "auto": lambda config: Auto(),
}


class Policies:
    """The policies of one engine: each sequence is decided for by its own."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._made: dict[str, Policy] = {}

    def decide(self, seqs: list[Sequence], load: Load) -> list[Decision]:
        names = dict.fromkeys(seq.policy for seq in seqs)
        if len(names) == 1:
            return self.of(*names).decide(seqs, load)
        decided: dict[int, Decision] = {}
        for name in names:
            mine = [seq for seq in seqs if seq.policy == name]
            decided.update(zip((seq.id for seq in mine), self.of(name).decide(mine, load), strict=True))
        return [decided[seq.id] for seq in seqs]

    def confirm(self, method: str, seqs: list[Sequence], ks: list[int]) -> list[int]:
        found: dict[int, int] = {}
        for name in dict.fromkeys(seq.policy for seq in seqs):
            mine = [(seq, k) for seq, k in zip(seqs, ks, strict=True) if seq.policy == name]
            kept = self.of(name).confirm(method, [seq for seq, _ in mine], [k for _, k in mine])
            found.update(zip((seq.id for seq, _ in mine), kept, strict=True))
        return [found[seq.id] for seq in seqs]

    def trim(self, seq: Sequence, method: str, draft: Draft) -> Draft:
        return self.of(seq.policy).trim(seq, method, draft)

    def observe(self, spans: list[Span], verdicts: list[Verdict], timing: Timing) -> None:
        for policy in self._made.values():
            policy.observe(spans, verdicts, timing)

    def forget(self, seq: Sequence) -> None:
        for policy in self._made.values():  # each has seen what became of every sequence
            policy.forget(seq)

    def state(self) -> list[tuple[str, Any]]:
        """(policy, what it believes) of those that believe anything."""
        return [(name, policy.state()) for name, policy in self._made.items() if isinstance(policy, Learning)]

    def restore(self, state: list[tuple[str, Any]]) -> None:
        """Raises `ValueError` for what `state` cannot have told."""
        for name, said in state:
            if name not in POLICIES or not isinstance(policy := self.of(name), Learning):
                raise ValueError(f"{name!r:.80} is no policy that learns")
            policy.restore(said)

    def of(self, name: str) -> Policy:
        """The policy of this name, made when it is first wanted."""
        if name not in self._made:
            self._made[name] = POLICIES[name](self._config)
        return self._made[name]
