"""What the policy `auto` believes of the round that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from speculon.control.known import Text
from speculon.control.plan import Promise
from speculon.core import Ask, Draft, Reason, Sequence

Group = list[tuple[Sequence, Text]]


@dataclass(slots=True)
class Round:
    """What is believed of the round that runs."""

    number: int = 0
    age: int = 0  # rounds for which it has been kept
    texts: int = 0
    tokens: float = 0.0
    ms: float = 1.0
    plain_ms: float = 1.0
    kept_tokens: float = 0.0  # that the drafts kept so far are believed to add
    kept_ms: float = 0.0
    first_ms: float = 0.0  # of a text's first draft beyond a draft's row
    row_ms: float = 0.0  # of each draft
    cheap: dict[str, float] = field(default_factory=dict)  # method -> tokens that could be written while it looks
    costly: dict[str, Group] = field(default_factory=dict)  # method -> texts it may draft for
    promise: dict[int, Promise] = field(default_factory=dict)  # text -> what the method that gains most would add
    refused: Reason = Reason.COOLDOWN  # why nothing costly is asked: where nothing is, look-ups rest
    awake: float = 0.0  # tokens for each text that could be written while look-ups alone keep the policy awake
    # text -> the method it asked, the tokens it was promised, and what it is held against: tokens per ms, ms of its slot
    hoped: dict[int, tuple[str, float, float, float]] = field(default_factory=dict)
    seldom: int = 1  # rounds at most between two look-ups of a text
    passed: set[int] = field(default_factory=set)  # texts for which a look-up's draft was held against a promise
    tails: dict[int, Draft] = field(default_factory=dict)  # text -> what was joined to its draft, and not worth its rows
    probes: dict[int, Ask] = field(default_factory=dict)  # text -> what it tries; kept whole, to learn from it
    new: dict[str, int] = field(default_factory=dict)  # method whose cost is not known -> the text that tries it
    busy: bool = False  # whether any text asks, or will before the next round in which all look
    steady: bool = True  # whether the next one would ask alike
    longest: int = 0  # the most drafts that any asks for
    able: Group = field(default_factory=list)  # the texts that may draft

    def again(self, texts: Iterable[Text]) -> None:
        """The next one asks alike; what its texts add may be different."""
        self.age += 1
        self.kept_tokens = self.kept_ms = 0.0
        self.hoped.clear()
        self.passed.clear()
        self.tails.clear()  # of a step that failed
        self.add(texts)

    def add(self, texts: Iterable[Text]) -> None:
        """What the round writes and takes, if it goes on as of late."""
        self.tokens, self.ms = float(self.texts), self.plain_ms
        for text in texts:
            self.tokens += text.cheap.tokens + text.costly.tokens
            self.ms += text.cheap.ms + text.costly.ms
