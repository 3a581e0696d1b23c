"""The proposers of one engine: who is asked in a round, in which order, and what a fault costs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import index
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from speculon.cascade import ask_in_turn
from speculon.config import SpeculationConfig
from speculon.core import (
    NO_DRAFT,
    Decision,
    Draft,
    Needs,
    Proposal,
    Proposed,
    Reason,
    Sequence,
    Span,
    Stop,
    Verdict,
)
from speculon.errors import MemoryExceeded
from speculon.proposers.base import Extending, Proposer, Remembering, States, TargetFacts
from speculon.proposers.registry import AUTO, LOOKUPS, OFF, WITH_CHECKPOINT, check_method, find_factory

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.kv.budget import MemoryEstimate
    from speculon.kv.lease import Lease
    from speculon.kv.store import View

log = logging.getLogger("speculon")

Trim = Callable[[Sequence, str, Draft], Draft]
Confirm = Callable[[str, list[Sequence], list[int]], list[int]]


class Proposers:
    """The proposers of one engine.

    Those that own layers are built here, before the page pool is sized; others when asked for.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        target: TargetFacts,
        promise: Callable[[list[Needs]], MemoryEstimate] | None = None,
    ):
        self._config, self._facts, self._promise = config, target, promise
        self._built: dict[str, Proposer] = {}
        # of these; to ask a protocol each time takes as long as a look-up
        self._extending: dict[str, Extending] = {}
        self._lacking: dict[str, Reason] = {}  # methods that were refused for good, and why
        self._first_layer: dict[str, int] = {}  # where a method's own layers lie in the page store
        self._admitted: dict[int, set[str]] = defaultdict(set)  # sequence id -> methods that know it
        self._closed = False
        self.timings: dict[str, Proposal] = {}  # of the last round, by method
        self.proposed: list[Proposed] = []  # in the last round, empty drafts too
        self.default = check_method(config.method)
        for method in dict.fromkeys([*config.drafts, *self.chain(self.default)]):
            self._build(check_method(method))
        self._closed = True  # the page pool is sized now: what owns layers comes too late

    @property
    def needs(self) -> list[Needs]:
        """Of those that own layers or weights, in the order of their layers."""
        return [self._built[method].needs for method in self._first_layer]

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose states any of them reads."""
        return tuple(sorted({layer for needs in self.needs for layer in needs.taps}))

    def keep(self, taps: Mapping[int, Tensor], view: View) -> None:
        """Puts the states [T, D] of one forward of the target, by layer, into the pages of those who read
        them.
        """
        for method, first in self._first_layer.items():
            if wanted := self._built[method].needs.taps:
                view.keep(first, [taps[layer] for layer in wanted])

    def chain(self, name: str) -> tuple[str, ...]:
        """The methods behind a name, asked one after the other until one has a draft; none for plain
        decoding.
        """
        if name == AUTO:
            return (*LOOKUPS, *(method for method in self._config.drafts if method not in LOOKUPS))
        return () if name == OFF else (name,)

    def methods_of(self, given: tuple[str, ...], name: str | None) -> tuple[str, ...]:
        """Who can be asked for a sequence, in order: what its request brought along, then what its method
        stands for.
        """
        own = (method for method in self.chain(name or OFF) if method not in self._lacking)
        return tuple(dict.fromkeys([*given, *own]))

    def lookups(self, methods: tuple[str, ...]) -> frozenset[str]:
        """Of these methods, those that are built and have no weights."""
        return frozenset(m for m in methods if m in self._built and m not in self._first_layer)

    def lacking(self, name: str) -> Reason | None:
        """Why nothing can draft under this name; None when something can."""
        chain = self.chain(check_method(name))
        for method in chain:
            self._build(method)
        reasons = [self._lacking[method] for method in chain if method in self._lacking]
        return reasons[0] if reasons and len(reasons) == len(chain) else None

    def find(self, method: str) -> Proposer | None:
        """The proposer of a method, where one is built; what it remembers may be asked for and deleted."""
        return self._built.get(method)

    @property
    def _memories(self) -> dict[str, Remembering]:
        return {
            method: proposer for method, proposer in self._built.items() if isinstance(proposer, Remembering)
        }

    @property
    def remembered(self) -> tuple[int, int]:
        """Pools of earlier answers, and tokens in them."""
        sizes = [size for memory in self._memories.values() for size in memory.pools.sizes.values()]
        return len(sizes), sum(sizes)

    def forget(self, tenant: str, pool: str | None) -> int:
        """Deletes the earlier answers of one pool, or of all of a tenant; returns how many pools there were."""
        return sum(memory.pools.forget(tenant, pool) for memory in self._memories.values())

    def state(self) -> list[tuple[str, Any]]:
        """(method, pool), one after the other."""
        return [(method, pool) for method, memory in self._memories.items() for pool in memory.pools.state()]

    def restore(self, state: list[tuple[str, Any]]) -> None:
        """Adds what `state` told. Raises `ValueError` or `UnknownMethod` for what is not to be read."""
        for name in dict.fromkeys(name for name, _ in state):
            self._build(check_method(name))
            memory = self._memories.get(name)
            if memory is None:
                raise ValueError(f"{name} remembers nothing")
            memory.pools.restore(pool for method, pool in state if method == name)

    def propose(
        self,
        spans: list[Span],
        decisions: list[Decision],
        lease: Lease,
        trim: Trim | None = None,
        confirm: Confirm | None = None,
    ) -> tuple[list[Draft], list[Decision]]:
        """A draft for each span, and the decisions as they turned out; one call per method.

        Where a decision reaches further than a draft, look-ups go on at its end. `trim` keeps of each draft
        what pays; where that is nothing the next method is asked. `confirm` says for how much, now that it is
        known who wants it.
        """
        self.timings, self.proposed = {}, []
        drafts = [NO_DRAFT] * len(spans)
        # until a method is asked
        outcome = [replace(d, k=0, reason=Reason.CONTEXT_LIMIT) if d.k else d for d in decisions]

        def ask(method: str, rooms: dict[int, int]) -> list[int]:
            rooms = {i: min(k, decisions[i].k) for i, k in rooms.items()}
            asked = rooms
            if confirm:
                ks = dict(
                    zip(
                        rooms,
                        confirm(method, [spans[i].seq for i in rooms], list(rooms.values())),
                        strict=True,
                    )
                )
                for i in (i for i, k in ks.items() if not k):
                    outcome[i] = replace(outcome[i], reason=Reason.COST)
                rooms = {i: min(k, rooms[i]) for i, k in ks.items() if k}
            found = self._ask(method, rooms, spans, lease)
            self._join(method, found, spans, decisions)
            for i, draft in found.items():
                drafts[i] = trim(spans[i].seq, method, draft) if trim and draft.tokens else draft
                unused = decisions[i].unused
                if len(drafts[i].tokens) < len(draft.tokens):
                    outcome[i] = replace(outcome[i], reason=unused)
                elif outcome[i].reason is not unused:  # else there was a draft, if not this one
                    outcome[i] = replace(outcome[i], reason=why_none(draft))
            return [i for i in asked if drafts[i].tokens or spans[i].seq.plain]

        ask_in_turn({i: decision.asks for i, decision in enumerate(decisions) if decision.k}, ask)
        for i, draft in enumerate(drafts):
            if draft.tokens:
                outcome[i] = Decision(decisions[i].method, len(draft.tokens), None, decisions[i].asks)
            elif spans[i].seq.plain and not decisions[i].reason:
                outcome[i] = Decision(None, 0, spans[i].seq.off)
        return drafts, outcome

    def observe(
        self, spans: list[Span], decisions: list[Decision], verdicts: dict[int, Verdict], taps: States
    ) -> None:
        """Tells each method that was asked what became of its sequences; `verdicts` by sequence id."""
        asked: dict[str, list[Sequence]] = defaultdict(list)
        for span, decision in zip(spans, decisions, strict=True):
            for method in span.seq.methods if decision.method else ():
                if method in self._admitted[span.seq.id]:
                    asked[method].append(span.seq)
        for method, seqs in asked.items():
            with Guard(method, seqs):
                self._built[method].observe(seqs, [verdicts[seq.id] for seq in seqs], taps)

    def release(self, seq: Sequence) -> None:
        for method in self._admitted.pop(seq.id, ()):
            with Guard(method, [seq]):
                self._built[method].release(seq)

    def _build(self, method: str) -> None:
        if method in self._built or method in self._lacking:
            return
        if method in WITH_CHECKPOINT and method not in self._config.drafts:
            self._lacking[method] = Reason.NO_DRAFTER
            return
        proposer = find_factory(method)(self._config, self._facts)
        if proposer.needs.layers or proposer.needs.bytes_fixed:
            if self._closed or not self._has_room(method, proposer):
                self._lacking[method] = Reason.NO_DRAFTER if self._closed else Reason.MEMORY
                return
            self._first_layer[method] = self._facts.num_layers + sum(
                len(needs.layers) for needs in self.needs
            )
        self._built[method] = proposer
        if isinstance(proposer, Extending):
            self._extending[method] = proposer

    def _has_room(self, method: str, proposer: Proposer) -> bool:
        """Judged by the forecast before anything of it is loaded, and again by what was loaded."""
        if not self._granted(method, proposer):
            return False
        if proposer.needs.bytes_fixed:
            proposer.load()
        return self._granted(method, proposer)

    def _granted(self, method: str, proposer: Proposer) -> bool:
        if self._promise is None:
            return True
        promise = self._promise([*self.needs, proposer.needs])
        if promise.action == "refuse":
            raise MemoryExceeded(method, promise)
        log.log(logging.INFO if promise.fits else logging.WARNING, "%s: %s", method, promise)
        return promise.action == "use"

    def _ask(self, method: str, rooms: dict[int, int], spans: list[Span], lease: Lease) -> dict[int, Draft]:
        """The drafts of one method, by index; none where it fails, or where a sequence is beyond its context."""
        proposer = self._built[method]
        reach = proposer.needs.max_context
        if reach is not None:
            rooms = {i: min(room, reach - spans[i].end) for i, room in rooms.items()}
        able = [i for i, room in rooms.items() if room > 0]
        seqs, budgets = [spans[i].seq for i in able], [rooms[i] for i in able]
        drafts: list[Draft] = []
        reads = method in self._first_layer
        unread = sum(len(seq.tokens) - seq.drafted.get(method, 0) - 1 for seq in seqs) if reads else 0
        began = perf_counter()
        with Guard(method, seqs):
            for seq in seqs:
                self._admit(method, seq)
            guesses = (
                proposer.propose(seqs, budgets, lease.of(self._first_layer.get(method, 0))) if seqs else []
            )
            drafts = [
                self._checked(method, guess, k, seq)
                for guess, k, seq in zip(guesses, budgets, seqs, strict=True)
            ]
            self.proposed.append((method, seqs, drafts))
        if budgets:
            self.timings[method] = Proposal(len(seqs), max(budgets), (perf_counter() - began) * 1e3, unread)
        return dict(zip(able, drafts, strict=False))

    def _join(
        self, method: str, drafts: dict[int, Draft], spans: list[Span], decisions: list[Decision]
    ) -> None:
        """Lets the first other method of a text that can (`Extending`) go on at the end of its draft, as far
        as is reserved.

        The time of it is the method's: without its drafts nobody would look there.
        """
        if not any(decisions[i].reach for i in drafts):
            return
        began = perf_counter()
        for i, draft in drafts.items():
            seq, room = spans[i].seq, min(decisions[i].reach, decisions[i].k) - len(draft.tokens)
            others = seq.methods if draft.tokens and room > 0 else ()
            for name in others:
                if name == method or name not in self._extending:
                    continue
                with Guard(name, [seq]):
                    self._admit(name, seq)
                    tail = self._checked(name, self._extending[name].extend(seq, draft.tokens, room), room)
                    drafts[i] = fit(draft.join(tail), seq) if tail.tokens else draft
                if len(drafts[i].tokens) > len(draft.tokens) or seq.plain:
                    break
        call = self.timings[method]
        self.timings[method] = call._replace(ms=call.ms + (perf_counter() - began) * 1e3)

    def _admit(self, method: str, seq: Sequence) -> None:
        if method not in self._admitted[seq.id]:
            self._built[method].admit(seq)
            self._admitted[seq.id].add(method)

    def _checked(self, method: str, guess: Draft, k: int, seq: Sequence | None = None) -> Draft:
        """The guess as far as it may be verified. Raises `ValueError` for what no draft can hold."""
        draft = guess.cut(k, Stop.LIMIT)
        if seq is not None and seq.grammar is not None:
            draft = fit(draft, seq)
        ids = [*map(index, draft.tokens)]
        if ids and not 0 <= min(ids) <= max(ids) < self._facts.vocab_size:
            raise ValueError(f"{method} drafted a token outside the vocabulary of {self._facts.vocab_size}")
        if (
            type(draft.match) is not int
            or draft.match < 0
            or not (draft.stop is None or type(draft.stop) is Stop)
        ):
            raise ValueError(
                f"{method}: match = {draft.match!r} is a number of tokens, stop = {draft.stop!r} a core.Stop"
            )
        return draft


@dataclass(slots=True, eq=False)
class Guard:
    """A proposer's error costs its sequences their speculation, with reason `error`, and nothing else."""

    method: str
    seqs: list[Sequence]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("proposer %s failed; its sequences go on plainly", self.method, exc_info=error)
        for seq in self.seqs:
            seq.method, seq.given, seq.methods, seq.off = None, (), (), Reason.ERROR
        return True


def fit(draft: Draft, seq: Sequence) -> Draft:
    """What the sequence's grammar allows of a draft: the target would refuse the rest."""
    return draft if seq.grammar is None else draft.cut(seq.grammar.allows(draft.tokens), Stop.GRAMMAR)


def why_none(draft: Draft) -> Reason:
    """Why the round of a sequence has no draft, where this proposal is empty."""
    return Reason.NOT_READY if draft.stop is Stop.NOT_READY else Reason.NO_MATCH
