"""From measurements to figures: medians of pairs, texts that differ, modes that did not speculate.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

OFF, NOTHING = "off", "nothing"  # plain decoding; a speculative path without a draft
LOOKUP = "ngram:8"


@dataclass(frozen=True, slots=True)
class Record:
    """One group of prompts, in one batch of one engine in one mode."""

    workload: str
    concurrency: int
    repeat: int
    group: int
    engine: str
    mode: str
    seconds: float
    tokens: list[list[int]]  # without stop tokens
    drafted: int | None = None  # None: the engine does not count
    accepted: int | None = None
    calls: int | None = None
    nats: float | None = None  # of sampled texts, under the target

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def speed(self) -> float:
        return self.count / self.seconds


@dataclass(slots=True)
class Row:
    """One engine in one mode, in one workload at one concurrency."""

    workload: str
    concurrency: int
    engine: str
    mode: str
    refused: str | None = None  # why there are no figures
    tokens: int = 0  # of all repeats
    tokens_per_second: float | None = None  # all repeats together
    to_stock: float | None = None  # median over pairs with transformers' plain generate
    to_ours: float | None = None  # the same with speculon, plain
    to_own: float | None = None  # the same with this engine, plain
    drafted: int | None = None
    accepted: int | None = None
    tokens_per_call: float | None = None  # of the target, with all texts in it
    texts: int = 0
    different: int | None = None  # from speculon's plain texts; None: sampled, or nothing to compare with
    nats_per_token: float | None = None  # of sampled texts
    # no draft, or, where only calls are counted, never two tokens in one, though it should speculate
    silent: bool = False
    to_lookup: float | None = None  # median over pairs with the prompt lookup of this engine
    unlike_own: int | None = None  # greedy texts that are not this engine's plain ones


Cell = tuple[str, int]  # workload, concurrency
Label = tuple[str, str]  # engine, mode


def cut(tokens: list[int], eos: Iterable[int]) -> list[int]:
    """The text before its first stop token."""
    stops = set(eos)
    return tokens[: next((i for i, token in enumerate(tokens) if token in stops), len(tokens))]


def row(cell: Cell, label: Label, records: list[Record], greedy: bool, stock: Label, ours: Label) -> Row:
    """The figures of `label`, which has records, among the records of all labels of a cell."""
    found = [one for one in records if (one.engine, one.mode) == label]
    engine, mode = label
    drafted, accepted, calls = (
        total(getattr(one, name) for one in found) for name in ("drafted", "accepted", "calls")
    )
    nats = [one.nats for one in found if one.nats is not None]
    tokens, seconds = sum(one.count for one in found), sum(one.seconds for one in found)
    longest = sum(max(map(len, one.tokens)) for one in found)
    speculates = mode.partition(":")[0] not in (OFF, NOTHING)
    return Row(
        *cell,
        *label,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        to_stock=ratio(found, records, stock),
        to_ours=ratio(found, records, ours),
        to_own=ratio(found, records, (engine, OFF)),
        drafted=drafted if speculates else None,
        accepted=accepted if speculates else None,
        tokens_per_call=tokens / calls if calls else None,
        texts=sum(len(one.tokens) for one in found),
        different=unlike(found, records, ours) if greedy else None,
        nats_per_token=sum(nats) / tokens if nats and tokens else None,
        silent=speculates and (drafted == 0 or drafted is None and calls is not None and calls >= longest),
        to_lookup=ratio(found, records, (engine, LOOKUP)),
        unlike_own=unlike(found, records, (engine, OFF)) if greedy else None,
    )


def total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ratio(found: list[Record], records: list[Record], base: Label) -> float | None:
    """Median over the pairs of one group in one repeat; None where there is no pair."""
    others = {(one.repeat, one.group): one for one in records if (one.engine, one.mode) == base}
    pairs = [(one, others[one.repeat, one.group]) for one in found if (one.repeat, one.group) in others]
    ratios = [one.speed / other.speed for one, other in pairs if one.count and other.count]
    return median(ratios) if ratios else None


def unlike(found: list[Record], records: list[Record], base: Label) -> int | None:
    """Texts that are not those of the base; None where there are none of it."""
    others = {(one.repeat, one.group): one for one in records if (one.engine, one.mode) == base}
    return sum(differences(one, others[one.repeat, one.group]) for one in found) if others else None


def differences(one: Record, other: Record) -> int:
    return sum(mine != theirs for mine, theirs in zip(one.tokens, other.tokens, strict=True))
