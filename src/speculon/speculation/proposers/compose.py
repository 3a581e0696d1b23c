"""The proposers of one engine: how each is built, asked and told of the round, and what its errors cost."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import index
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from speculon.core.config import SpeculationConfig
from speculon.core.tree import ROOT
from speculon.core.types import NO_DRAFT, CallCost, Draft, Reason, Stop
from speculon.decoding.rounds import Judged
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import (
    Branching,
    Extending,
    Proposer,
    ReadsTokens,
    Remembering,
    TargetFacts,
)
from speculon.speculation.proposers.registry import (
    AUTO,
    LOOKUPS,
    OFF,
    check_method,
    find_factory,
    has_weights,
)

log = logging.getLogger("speculon")

Result = TypeVar("Result")


class DraftRequest(NamedTuple):
    """What a method is asked for: at most `k` tokens, as a tree at most `depth` deep (0: as a chain)."""

    seq: Sequence
    k: int
    depth: int = 0
    chained: int = 0  # drafts in all, where a lookup may continue a chain of this method; 0: none may


class DraftCall(NamedTuple):
    """One call of a method for several sequences."""

    proposed: list[Draft]  # of each sequence; empty where the method has failed
    drafts: list[Draft]  # the same, as lookups continue them
    took: CallCost


class Refusal(NamedTuple):
    """Why a method with weights was not loaded."""

    reason: Reason
    why: str


class Proposers:
    """The proposers of one engine: those with weights, which its runtime has loaded, and lookups, which are
    made when they are first asked for.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        target: TargetFacts,
        with_weights: Mapping[str, Proposer] | None = None,
        refusals: Mapping[str, Refusal] | None = None,
    ):
        self._config, self._facts = config, target
        self._with_weights, self.refusals = dict(with_weights or {}), dict(refusals or {})
        self._built: dict[str, Proposer] = {}
        # of these; to ask a protocol each time takes as long as a lookup
        self._extending: dict[str, Extending] = {}
        self._reading = {m: each for m, each in self._with_weights.items() if isinstance(each, ReadsTokens)}
        self._lacking: dict[str, Reason] = {}  # methods that were refused for good, and why
        self._admitted: dict[int, dict[str, None]] = defaultdict(dict)  # sequence id -> methods that know it
        self.default = check_method(config.method)
        for method in dict.fromkeys([*config.drafts, *self.chain(self.default)]):
            self._build(check_method(method))

    def chain(self, name: str) -> tuple[str, ...]:
        """The methods behind a name, asked in turn until one has a draft; none for plain decoding."""
        if name == AUTO:
            return (*LOOKUPS, *(method for method in self._config.drafts if method not in LOOKUPS))
        return () if name == OFF else (name,)

    def methods_of(self, from_request: tuple[str, ...], name: str | None) -> tuple[str, ...]:
        """Those that can be asked, in order: what came with a request, then those behind its method."""
        own = (method for method in self.chain(name or OFF) if method not in self._lacking)
        return tuple(dict.fromkeys([*from_request, *own]))

    def max_drafts(self, method: str, k: int) -> int:
        """`k`, or the most drafts that the method can make in a round, where that is fewer."""
        proposer = self._built.get(method)
        limit = None if proposer is None else proposer.limits.max_drafts
        return k if limit is None else min(k, limit)

    def max_context(self, methods: Iterable[str]) -> dict[str, int]:
        """Of these methods, the tokens of those whose context is limited."""
        limits = {m: self._built[m].limits.max_context for m in methods if m in self._built}
        return {m: limit for m, limit in limits.items() if limit is not None}

    def branching(self, methods: Iterable[str]) -> frozenset[str]:
        """Of these methods, those that can draft trees: not where a rejected branch would change a state."""
        if not self._facts.branches:
            return frozenset()
        built = {m: self._built[m] for m in methods if m in self._built}
        return frozenset(m for m, p in built.items() if isinstance(p, Branching) and p.limits.branches)

    def lookups(self, methods: tuple[str, ...]) -> frozenset[str]:
        """Of these methods, those that are built and have no weights."""
        return frozenset(m for m in methods if m in self._built and m not in self._with_weights)

    def unread(self, seq: Sequence) -> dict[str, int]:
        """Of its methods that compute its tokens themselves: how many these have not read, but the last."""
        return {m: self._reading[m].unread(seq) for m in seq.methods if m in self._reading}

    @property
    def reads_states(self) -> bool:
        """Whether any drafts from the target's states."""
        return any(proposer.limits.reads_states for proposer in self._with_weights.values())

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
        """Deletes the earlier answers of one pool, or of all of a tenant; returns the number of pools."""
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
                raise ValueError(f"{name} keeps nothing between requests")
            memory.pools.restore(pool for method, pool in state if method == name)

    def ask(self, method: str, requests: list[DraftRequest]) -> DraftCall:
        """The drafts of one method for some sequences, in one call.

        The time of lookups that continue them counts as the method's: without its drafts nobody would have
        asked them. A method that fails leaves no draft; its sequences are marked as failed and go on plainly.
        """
        seqs, reading = [request.seq for request in requests], self._reading.get(method)
        unread = sum(map(reading.unread, seqs)) if reading is not None else 0
        began = perf_counter()
        proposed: list[Draft] = guarded(method, seqs, partial(self._proposed, method, requests), [])
        drafts = [
            self._chained(method, draft, request) if request.chained and draft.parents is None else draft
            for request, draft in zip(requests, proposed, strict=False)
        ]
        positions = max(request.depth or request.k for request in requests)
        took = CallCost(len(seqs), positions, (perf_counter() - began) * 1e3, unread)
        return DraftCall(proposed, drafts or [NO_DRAFT] * len(seqs), took)

    def _proposed(self, method: str, requests: list[DraftRequest]) -> list[Draft]:
        """Trees for the sequences that may have one, chains for the others: two calls if there are both."""
        proposer, drafts = self._built[method], dict[int, Draft]()
        for request in requests:
            self._admit(method, request.seq)
        if trees := [request for request in requests if request.depth]:
            assert isinstance(proposer, Branching)
            seqs, ks, depths = ([getattr(x, name) for x in trees] for name in ("seq", "k", "depth"))
            found = proposer.propose_trees(seqs, ks, depths)
            drafts |= {x.seq.id: draft for x, draft in zip(trees, found, strict=True)}
        if chains := [request for request in requests if not request.depth]:
            found = proposer.propose([x.seq for x in chains], [x.k for x in chains])
            drafts |= {x.seq.id: draft for x, draft in zip(chains, found, strict=True)}
        for request in requests:
            check_tree(method, drafts[request.seq.id], request.depth)
        return [self._checked(method, drafts[x.seq.id], x.k, x.seq) for x in requests]

    def _chained(self, method: str, draft: Draft, request: DraftRequest) -> Draft:
        """The draft of a method, continued at its end by the first other lookup of the sequence that can."""
        seq, room = request.seq, request.chained - len(draft.tokens)
        for name in seq.methods if draft.tokens and room > 0 else ():
            if name == method or name not in self._extending:
                continue
            longer = guarded(name, [seq], partial(self._extended, name, draft, room, seq), draft)
            if len(longer.tokens) > len(draft.tokens) or seq.failed:
                return longer
        return draft

    def _extended(self, name: str, draft: Draft, room: int, seq: Sequence) -> Draft:
        self._admit(name, seq)
        tail = self._extending[name].extend(seq, draft.tokens, room)
        tail = self._checked(name, tail, room, seq, draft.tokens)
        return draft.chain(tail) if tail.tokens else draft

    def observe(self, judged: list[Judged]) -> None:
        """Reports the round to each method that knows the sequences for which any was asked."""
        known: dict[str, list[Judged]] = defaultdict(list)
        for one in judged:
            if one.drafted.asked and not one.seq.failed:
                for method in self._admitted[one.seq.id]:
                    known[method].append(one)
        for method, group in known.items():
            seqs, verdicts = [one.seq for one in group], [one.verdict for one in group]
            guarded(method, seqs, partial(self._built[method].observe, seqs, verdicts), None)

    def release(self, seq: Sequence) -> None:
        for method in self._admitted.pop(seq.id, ()):
            guarded(method, [seq], partial(self._built[method].release, seq), None)

    def _build(self, method: str) -> None:
        if method in self._built or method in self._lacking:
            return
        if method in self.refusals:
            self._lacking[method] = self.refusals[method].reason
        elif method in self._with_weights:
            self._built[method] = self._with_weights[method]
        elif has_weights(method):
            self._lacking[method] = Reason.NO_DRAFTER
        else:
            proposer = self._built[method] = find_factory(method)(self._config, self._facts)
            if isinstance(proposer, Extending):
                self._extending[method] = proposer

    def _admit(self, method: str, seq: Sequence) -> None:
        if method not in self._admitted[seq.id]:
            self._built[method].admit(seq)
            self._admitted[seq.id][method] = None

    def _checked(
        self, method: str, draft: Draft, k: int, seq: Sequence, ahead: tuple[int, ...] = ()
    ) -> Draft:
        """The draft as far as it may be verified. Raises `ValueError` for what no draft can hold."""
        draft = fit(draft, k, seq, ahead)
        ids = [*map(index, draft.tokens)]
        if ids and not 0 <= min(ids) <= max(ids) < self._facts.vocab_size:
            raise ValueError(
                f"{method} drafted a token outside of the target's vocabulary of {self._facts.vocab_size}"
            )
        match, stopped = draft.match, draft.stop
        if type(match) is not int or match < 0 or not (stopped is None or type(stopped) is Stop):
            raise ValueError(
                f"{method}: match = {match!r} must be a number of tokens, and stop = {stopped!r} a Stop or "
                "None"
            )
        return draft


def check_tree(method: str, draft: Draft, depth: int) -> None:
    """Raises `ValueError` for a tree that was not asked for, or that is none."""
    if draft.parents is None:
        return
    if not all(ROOT <= parent < node for node, parent in enumerate(draft.parents)):
        raise ValueError(f"{method}: parents = {draft.parents}: each node must come after its parent")
    if draft.depth > depth:
        raise ValueError(f"{method} drafted a tree of depth {draft.depth}, but was asked for at most {depth}")


def guarded(method: str, seqs: list[Sequence], call: Callable[[], Result], otherwise: Result) -> Result:
    """Calls a proposer. An error costs these sequences their drafts (reason `error`), and nothing else."""
    try:
        return call()
    except Exception as error:
        log.error(
            "proposer %s raised an error; its sequences continue without drafts", method, exc_info=error
        )
        for seq in seqs:
            seq.failed = True
        return otherwise


def fit(draft: Draft, k: int, seq: Sequence, ahead: tuple[int, ...] = ()) -> Draft:
    """At most `k` tokens of a draft, which follows the drafts `ahead`, as the sequence's grammar allows them.

    The target would refuse the rest. The grammar cuts no draft with q: cut by its token ids, it would change
    the distribution of the output.
    """
    tokens, stop = draft.tokens[:k], Stop.LIMIT
    if seq.grammar is not None and draft.probs is None:
        allowed = max(0, seq.grammar.allows(ahead + tokens) - len(ahead))
        if allowed < len(tokens):
            tokens, stop = tokens[:allowed], Stop.GRAMMAR
    return draft.truncated(len(tokens), stop)
