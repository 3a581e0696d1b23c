"""What policy `goodput` knows of each sequence, and of each class of prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from speculon.core.types import UNDECIDED, Decision, Draft
from speculon.decoding.rounds import Budget
from speculon.decoding.sequence import Request, Sequence
from speculon.speculation.control.acceptance import POSITIONS, PRIOR, Acceptance, SequenceAcceptance
from speculon.speculation.control.cost import OF_LATE
from speculon.speculation.control.trees import judged_nodes, node_values


@dataclass(slots=True)
class Added:
    """What drafting adds to a round for one sequence: of late, or on average."""

    tokens: float = 0.0
    ms: float = 0.0
    copied: float = 0.0  # tokens of a round, its correction or bonus too, where a lookup drafted; else 0
    gain: float = PRIOR  # tokens that a lookup's drafts are expected to bring, less their price; 0 of none

    def move(self, to: Added, weight: float = OF_LATE) -> None:
        self.tokens += weight * (to.tokens - self.tokens)
        self.ms += weight * (to.ms - self.ms)
        self.copied += weight * (to.copied - self.copied)
        self.gain += weight * (to.gain - self.gain)


class PromptClass:
    """Statistics of one class of prompts: acceptance by method, with that of all classes as prior."""

    def __init__(self, wider: defaultdict[str, Acceptance]) -> None:
        # tokens of those that ended
        self.added, self.ended, self.length, self._wider = Added(), 0, 0.0, wider
        self.acceptance: dict[str, Acceptance] = {}

    def of(self, method: str) -> Acceptance:
        if method not in self.acceptance:
            self.acceptance[method] = Acceptance(self._wider[method])
        return self.acceptance[method]


@dataclass(slots=True)
class Running:
    """Statistics of one sequence."""

    budget: Budget  # of its latest round
    cls: PromptClass
    added: Added
    decision: Decision = UNDECIDED  # of this round
    # by method
    own: defaultdict[str, SequenceAcceptance] = field(default_factory=lambda: defaultdict(SequenceAcceptance))
    mean: Added = field(default_factory=lambda: Added(gain=0.0))  # of its rounds
    rounds: int = 0
    looked: bool = False  # whether lookups were asked in this round
    rejected: set[str] = field(default_factory=set)  # methods that had a draft rejected

    @property
    def seq(self) -> Sequence:
        return self.budget.seq

    def unread(self, method: str) -> int:
        return self.budget.unread.get(method, 0)

    def left(self) -> float:
        """Tokens that it may yet generate without lookups."""
        usual = self.cls.length if self.cls.ended else self.seq.tokens_left
        share = 1 - self.added.copied / (1 + self.added.tokens)  # of tokens that lookups have no part in
        return max(1.0, share * min(self.seq.tokens_left, max(usual / 2, usual - self.seq.num_output)))

    def book(self, added: Added) -> None:
        self.rounds += 1
        self.added.move(added)
        self.mean.move(added, 1 / self.rounds)

    def learn(self, method: str, judged: int, accepted: int, match: int = 0) -> None:
        if not judged:
            return
        acceptance = self.cls.of(method)
        self.own[method].observe(acceptance.chances(judged, match), accepted)
        acceptance.observe(judged, accepted, match)

    def learn_tree(self, method: str, draft: Draft, tokens: tuple[int, ...]) -> None:
        for depth, rank, accepted in judged_nodes(draft, tokens):
            if rank:
                self.cls.of(method).observe_later(rank, accepted)
            else:
                self.learn(method, 1, int(accepted), depth)

    def depth(self, method: str) -> int:
        """The most drafts in a row where a method may draft a tree for it; else 0."""
        request = self.seq.request
        if method not in self.seq.branching or request.depth == 0:
            return 0
        return min(POSITIONS, request.depth or POSITIONS)

    def curve(self, method: str, draft: Draft) -> list[float]:
        """The chance of each token of a draft that all up to it are accepted."""
        if draft.parents is not None:
            acceptance, shift = self.cls.of(method), self.own[method].shift
            chances = acceptance.chances(len(draft.tokens), shift=shift)
            return node_values(draft.parents, chances, acceptance.later)
        chances = [
            chance
            for name, _, count, match in parts(self.seq, draft, method)
            for chance in self.cls.of(name).chances(count, match, self.own[name].shift)
        ]
        return [*accumulate(chances, mul)]


def class_of(request: Request) -> str:
    """Of a request's prompt; under an adapter the target writes other texts, so its classes are others."""
    return f"{request.shape.name}, adapter {request.adapter}" if request.adapter else request.shape.name


def parts(seq: Sequence, draft: Draft, method: str) -> Iterator[tuple[str, int, int, int]]:
    """(name, drafts before it, drafts, match) of a proposal and of what was chained to it, under its name."""
    own, count = draft.unchained(seq.methods), len(draft.tokens)
    yield method, 0, own, draft.match
    if own < count:
        yield f"{method}+{draft.sources[own]}", own, count - own, 0
