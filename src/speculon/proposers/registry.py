"""Names to proposers, and the dispatcher that runs those a round asks for."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from operator import index
from typing import TYPE_CHECKING

from speculon.config import SpeculationConfig
from speculon.core import NO_DRAFT, Decision, Draft, Reason, Sequence, Span, Verdict
from speculon.errors import UnknownMethod
from speculon.proposers.base import Factory, Proposer, TargetFacts

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.lease import Lease

log = logging.getLogger("speculon")

OFF, AUTO = "off", "auto"
ENTRY_POINTS = "speculon.proposers"

# name -> module:factory, imported when first used
TABLE: dict[str, str] = {
    "ngram": "speculon.proposers.ngram:NGram.build",
    "synthetic": "speculon.proposers.synthetic:Synthetic.build",
}
AUTO_ORDER = ("ngram",)  # what `auto` tries, first to last
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Adds a drafting method for this process; a package does the same with an entry point."""
    _registered[name] = factory


def known_methods() -> list[str]:
    plugins = {point.name for point in entry_points(group=ENTRY_POINTS)}
    return [OFF, AUTO, *sorted({*TABLE, *plugins, *_registered})]


def check_method(name: str) -> str:
    """The name itself, or `UnknownMethod` with the names there are."""
    if name not in known_methods():
        raise UnknownMethod(f"method = {name!r}: known are {', '.join(known_methods())}")
    return name


def find_factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in TABLE:
        module, _, path = TABLE[name].partition(":")
        target = import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        return target
    return next(iter(entry_points(group=ENTRY_POINTS, name=name))).load()


class Proposers:
    """The proposers of one engine, built when first asked for."""

    def __init__(self, config: SpeculationConfig, target: TargetFacts):
        self._config, self._facts = config, target
        self._built: dict[str, Proposer] = {}
        self._admitted: dict[int, set[str]] = defaultdict(set)  # sequence id -> methods that know it

    def resolve(self, name: str) -> str | None:
        """The method that `name` stands for; None for plain decoding. Builds it, so that a bad setting fails here."""
        check_method(name)
        if name == OFF:
            return None
        method = AUTO_ORDER[0] if name == AUTO else name
        if method not in self._built:
            self._built[method] = find_factory(method)(self._config, self._facts)
        return method

    def propose(self, spans: list[Span], decisions: list[Decision], lease: Lease) -> tuple[list[Draft], list[Decision]]:
        """A draft for each span, and the decisions as they turned out; one call per method."""
        drafts, outcome = [NO_DRAFT] * len(spans), list(decisions)
        for method, chosen in by_method(decisions).items():
            seqs = [spans[i].seq for i in chosen]
            with self._fault_of(method, seqs) as fault:
                guesses = self._ask(method, seqs, [decisions[i].k for i in chosen], lease)
                for i, guess in zip(chosen, guesses, strict=True):
                    drafts[i] = guess
                    k = len(guess.tokens)
                    outcome[i] = Decision(method, k) if k else Decision(method, 0, Reason.NO_MATCH)
            if fault:
                for i in chosen:
                    outcome[i] = Decision(None, 0, Reason.ERROR)
        return drafts, outcome

    def observe(self, spans: list[Span], decisions: list[Decision], verdicts: dict[int, Verdict], taps: Tensor | None) -> None:
        """Tells each method what became of its sequences; `verdicts` by sequence id."""
        for method, chosen in by_method(decisions).items():
            seqs = [spans[i].seq for i in chosen]
            with self._fault_of(method, seqs):
                self._built[method].observe(seqs, [verdicts[seq.id] for seq in seqs], taps)

    def release(self, seq: Sequence) -> None:
        for method in self._admitted.pop(seq.id, ()):
            with self._fault_of(method, [seq]):
                self._built[method].release(seq)

    def _ask(self, method: str, seqs: list[Sequence], budgets: list[int], lease: Lease) -> list[Draft]:
        proposer = self._built[method]
        for seq in seqs:
            if method not in self._admitted[seq.id]:
                proposer.admit(seq)
                self._admitted[seq.id].add(method)
        drafts = [d.cut(k) for d, k in zip(proposer.propose(seqs, budgets, lease), budgets, strict=True)]
        if not all(0 <= index(token) < self._facts.vocab_size for draft in drafts for token in draft.tokens):
            raise ValueError(f"{method} drafted a token outside the vocabulary of {self._facts.vocab_size}")
        return drafts

    @contextmanager
    def _fault_of(self, method: str, seqs: list[Sequence]) -> Iterator[list[Exception]]:
        """A proposer's error costs its sequences their speculation, with reason `error`, and nothing else."""
        fault: list[Exception] = []
        try:
            yield fault
        except Exception as error:
            log.exception("proposer %s failed; its sequences go on plainly", method)
            fault.append(error)
            for seq in seqs:
                seq.method, seq.off = None, Reason.ERROR


def by_method(decisions: list[Decision]) -> dict[str, list[int]]:
    """Which decisions ask which method for a draft."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, decision in enumerate(decisions):
        if decision.method and decision.k:
            groups[decision.method].append(i)
    return groups
