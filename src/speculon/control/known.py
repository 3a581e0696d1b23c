"""What the policy `auto` knows of methods and of texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from speculon.control.estimate import HOPE, Acceptance, Own, ProposalCost, Share, grades_of
from speculon.core import Draft, Sequence

OF_LATE = 0.15  # weight of the last round in what a text adds
OF_ALL = 0.02  # in what texts of its kind do
HOPE_BACK = 0.1  # guess
BACK_TRIES = 10.0
LEAST_SHARE = 1e-3
KEPT_TOKENS = 20.0  # guess: promised to each text of a crowd, after which what came of it weighs as much
FORGIVEN = 0.002  # guess: of what became of promises, forgotten with each round; so what broke them is tried again
WANTED, CAME_FADE = 20.0, 0.95  # guess: drafts after which what came of them weighs as much, and what is left after a text
USUAL = 64.0  # guess: tokens of a text, before one of its kind has ended
BELIEVED = 8  # guess: rounds of a text that weigh as much as what is known of its kind


@dataclass(slots=True)
class Method:
    """One way of drafting."""

    acceptance: Acceptance = field(default_factory=Acceptance)  # of all texts
    costly: bool = False  # so it is not asked where look-ups have something, as fixed modes ask it
    kinds: dict[str, Acceptance] = field(default_factory=dict)  # of texts of one kind, where others chose to draft
    chosen: dict[str, Acceptance] = field(default_factory=dict)  # of texts of one kind, where the policy did
    cost: ProposalCost = field(default_factory=ProposalCost)
    brings: float = 1.0  # tokens that its drafts add of late to a text that asked
    kept: dict[int, Share] = field(default_factory=dict)  # by size of crowd: of the tokens it promised, those that it saved
    came: dict[str, Share] = field(default_factory=dict)  # by kind: of the drafts texts were believed to want, what came
    saved_ms: float = 0.0  # time that may be spent on a probe
    distance: float = 1.0  # between probes, in multiples of what the share of time allows
    probes: int = 0  # so far: texts take turns

    def of(self, kind: str) -> Acceptance:
        """Of the drafts that the policy chose itself; everybody's, where it would have drafted alike."""
        found = self.chosen.get(kind)
        if found is None:
            found = self.chosen[kind] = Acceptance(self.acceptance, self.of_others(kind))
        return found

    def of_others(self, kind: str) -> Acceptance:
        """Of those of fixed modes, which draft where look-ups would have had something, as well."""
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = Acceptance(self.acceptance)
        return found

    def keeps(self, texts: int) -> float:
        """The part of a promise to be believed: of noisy estimates the greatest is taken, which is too great on average."""
        return min(1.0, self._kept(texts).mean(1.0, KEPT_TOKENS * texts))

    def keep(self, texts: int, saved: float, hoped: float) -> None:
        """What became of a promise; more than was hoped for is no credit without end."""
        kept = self._kept(texts)
        kept.add(saved, hoped, 1.0)
        kept.hits = min(kept.hits, kept.tries + KEPT_TOKENS * texts)

    def comes(self, kind: str) -> float:
        """The part of the drafts that a text is believed to want, when it first asks, that it does."""
        found = self.came.get(kind)
        return min(1.0, found.mean(1.0, WANTED)) if found else 1.0

    def ended(self, kind: str, wanted: Share) -> None:
        """A text that asked has ended: of so many drafts that it was believed to want, it did want those."""
        self.came.setdefault(kind, Share()).add(wanted.hits, wanted.tries, CAME_FADE)

    def save(self, texts: int, ms: float) -> None:
        """Time goes by that may be spent on probes, and broken promises are forgiven."""
        self.saved_ms += ms / self.distance
        self._kept(texts).add(0.0, 0.0, 1 - FORGIVEN)

    def _kept(self, texts: int) -> Share:
        return self.kept.setdefault(texts.bit_length(), Share())

    def state(self) -> dict[str, Any]:
        kinds, chosen = ({kind: one.state() for kind, one in found.items()} for found in (self.kinds, self.chosen))
        return {"all": self.acceptance.state(), "kinds": kinds, "chosen": chosen, "cost": self.cost.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.acceptance.restore(state["all"])
        for kind, found in state["kinds"].items():
            self.of_others(kind).restore(found)
        for kind, found in state["chosen"].items():
            self.of(kind).restore(found)
        self.cost.restore(state["cost"])


@dataclass(slots=True)
class Added:
    """Tokens and ms that a text adds to a round, beyond its one token and its one row."""

    tokens: float = 0.0
    ms: float = 0.0
    share: float = 0.0  # of its rounds, in which it had a draft

    def add(self, drafted: bool, tokens: float, ms: float, weight: float = OF_LATE) -> None:
        self.tokens += weight * (tokens - self.tokens)
        self.ms += weight * (ms - self.ms)
        self.share += weight * (drafted - self.share)


@dataclass(slots=True)
class Others:
    """Of texts of one kind: what look-ups do for them, and how long they are."""

    added: Added = field(default_factory=Added)
    worth: dict[str, float] = field(default_factory=dict)  # method -> tokens that it has brought to a round
    usual: float = 0.0  # tokens of those that have ended
    back: Share = field(default_factory=Share)  # how often they had something again, among tokens written since they had nothing

    def asked(self, method: str, gained: float) -> None:
        before = self.worth.get(method, HOPE)
        self.worth[method] = before + OF_ALL * (gained - before)

    def ended(self, tokens: int) -> None:
        """One of them, after so many tokens."""
        self.usual += (OF_LATE if self.usual else 1.0) * (tokens - self.usual)

    def left(self, seq: Sequence) -> float:
        """Tokens that one of them may still write."""
        usual = self.usual or USUAL
        return min(seq.room, max(usual / 2, usual - seq.num_output))

    @property
    def stay(self) -> float:
        """P(they have nothing one token later, either), where they have nothing."""
        return 1 - self.back.mean(HOPE_BACK, BACK_TRIES)

    def worths(self, rate: float, slot_ms: float) -> Iterator[float]:
        """What each next token saves of a text for which look-ups have nothing, in tokens of a crowd that writes `rate` of them
        in a ms: where look-ups would soon have had something again, they would have written it in less time."""
        part, stay = min(1.0, rate / self.rate(slot_ms)), self.stay
        left = 1.0 - part
        while True:
            left *= stay
            yield part + left

    def rate(self, slot_ms: float) -> float:
        """Tokens per ms that they write where they have something, in a crowd in which a text takes `slot_ms` of each round."""
        share = max(self.added.share, LEAST_SHARE)
        return (share + self.added.tokens) / (share * slot_ms + self.added.ms)


@dataclass(slots=True)
class Text:
    """One text."""

    cheap: Added = field(default_factory=Added)  # by look-ups, of late
    ever: Added = field(default_factory=Added)  # the same, since it began
    costly: Added = field(default_factory=Added)
    rounds: int = BELIEVED
    bare: int = 0  # tokens written since its look-ups last had something
    own: dict[str, Own] = field(default_factory=dict)  # by method
    wanted: dict[str, Share] = field(default_factory=dict)  # by method: of the drafts that it was believed to want, those it did

    def of(self, method: str) -> Own:
        found = self.own.get(method)
        if found is None:
            found = self.own[method] = Own()
        return found

    def ask(self, name: str, method: Method, left: float) -> None:
        """It wants a draft of a costly method, while it may still write `left` tokens."""
        if name not in self.wanted:
            self.wanted[name] = Share(0.0, self.wants(method, left))
        self.wanted[name].hits += 1

    def wants(self, method: Method, tokens: float) -> float:
        """How many drafts of a costly method it may want while it writes so many tokens, as far as it is known."""
        bare = 1 - self.ever.share  # of its rounds, those in which look-ups find nothing
        return max(1.0, bare * tokens / (1 + self.ever.tokens + bare * method.brings))


def parts(seq: Sequence, draft: Draft, method: str = "") -> Iterator[tuple[str, int, list[int]]]:
    """(name, drafts before it, classes) of the draft of one method and of what was joined to it: where a look-up goes on
    for another it fares otherwise than alone, so that is learned under a name of its own."""
    name, own, grades = method or draft.sources[0], draft.own(seq.methods), grades_of(draft.confidence, len(draft.tokens))
    yield name, 0, grades[:own]
    if own < len(grades):
        yield f"{name}+{draft.sources[own]}", own, grades[own:]
