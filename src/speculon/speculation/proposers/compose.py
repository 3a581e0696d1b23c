"""The proposers of one engine: how each is built, asked and told of the round, and what its errors cost."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from speculon.core.config import SpeculationConfig
from speculon.core.errors import MemoryExceeded
from speculon.core.tree import ROOT
from speculon.core.types import Draft, Proposal, Reason, Stop
from speculon.decoding.sequence import Sequence, Span
from speculon.runtimes.torch.needs import Needs
from speculon.speculation.proposers.base import (
    Branching,
    Extending,
    Proposer,
    Remembering,
    States,
    TargetFacts,
)
from speculon.speculation.proposers.registry import (
    AUTO,
    LOOKUPS,
    OF_TARGET,
    OFF,
    WITH_CHECKPOINT,
    check_method,
    find_factory,
)

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.runtimes.torch.budget import MemoryEstimate
    from speculon.runtimes.torch.kv.lease import Lease
    from speculon.runtimes.torch.kv.store import View

log = logging.getLogger("speculon")

Result = TypeVar("Result")


class Proposers:
    """The proposers of one engine.

    Those that own layers are built here, before the page pool is sized; others when asked for.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        target: TargetFacts,
        estimate_memory: Callable[[list[Needs]], MemoryEstimate] | None = None,
    ):
        self._config, self._facts, self._estimate_memory = config, target, estimate_memory
        self._built: dict[str, Proposer] = {}
        # of these; to ask a protocol each time takes as long as a lookup
        self._extending: dict[str, Extending] = {}
        self._lacking: dict[str, Reason] = {}  # methods that were refused for good, and why
        self.refusals: dict[str, str] = {}  # of those that did not fit into memory: the estimate
        self._first_layer: dict[str, int] = {}  # where a method's own layers lie in the page store
        self._admitted: dict[int, dict[str, None]] = defaultdict(dict)  # sequence id -> methods that know it
        self._closed = False
        self.default = check_method(config.method)
        for method in dict.fromkeys([*config.drafts, *self.chain(self.default)]):
            self._build(check_method(method))
        self._closed = True  # the page pool is sized now: what owns layers comes too late

    @property
    def needs(self) -> list[Needs]:
        """Of those that own layers or weights, in the order of their layers."""
        return [self._built[method].needs for method in self._first_layer]

    @property
    def needs_of_states(self) -> dict[str, Needs]:
        """Of those that keep recurrent states, by method."""
        needs = {method: self._built[method].needs for method in self._first_layer}
        return {method: its for method, its in needs.items() if its.states}

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose states any of them reads."""
        return tuple(sorted({layer for needs in self.needs for layer in needs.taps}))

    def keep(self, taps: Mapping[int, Tensor], view: View) -> None:
        """Writes the states [T, D] of a target forward, by layer, to the pages of drafters that read them."""
        for method, first in self._first_layer.items():
            if layers := self._built[method].needs.taps:
                view.keep(first, [taps[layer] for layer in layers])

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
        limit = None if proposer is None else proposer.needs.max_drafts
        return k if limit is None else min(k, limit)

    def max_context(self, methods: Iterable[str]) -> dict[str, int]:
        """Of these methods, the tokens of those whose context is limited."""
        limits = {m: self._built[m].needs.max_context for m in methods if m in self._built}
        return {m: limit for m, limit in limits.items() if limit is not None}

    def branching(self, methods: Iterable[str]) -> frozenset[str]:
        """Of these methods, those that can draft trees: not where a rejected branch would change a state."""
        if self._facts.model is not None and self._facts.model.recurrent:
            return frozenset()
        built = {m: self._built[m] for m in methods if m in self._built}
        return frozenset(m for m, p in built.items() if isinstance(p, Branching) and not p.needs.states)

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
                raise ValueError(f"{name} remembers nothing")
            memory.pools.restore(pool for method, pool in state if method == name)

    def ask(self, method: str, spans: list[Span], lease: Lease | None) -> Proposal:
        """The drafts of one method for these spans, at most `k` of each; returns what its call took.

        Lookups continue those drafts whose decision allows it, and their time counts as the method's: without
        its drafts nobody would have asked them. A method that fails leaves no draft; its sequences are marked
        as failed and go on plainly.
        """
        seqs, ks = [span.seq for span in spans], [span.k for span in spans]
        proposer, reads = self._built[method], method in self._first_layer
        unread = sum(len(seq.tokens) - seq.begin(method) - 1 for seq in seqs) if reads else 0
        share: Any = None if lease is None else lease.of(self._first_layer.get(method, 0), method)

        def propose() -> list[Draft]:
            for seq in seqs:
                self._admit(method, seq)
            drafts = self._proposed(proposer, spans, share)
            for span, draft in zip(spans, drafts, strict=True):
                check_tree(method, draft, span.depth)
            return [self._checked(method, d, k, seq) for d, k, seq in zip(drafts, ks, seqs, strict=True)]

        began = perf_counter()
        drafts: list[Draft] = guarded(method, seqs, propose, [])
        for span, draft in zip(spans, drafts, strict=False):  # none where the method has failed
            span.proposals.append((method, span.k, draft))
            chained = span.decision.chained and draft.parents is None
            span.draft = self._chained(method, draft, span) if chained else draft
        positions = max(span.depth or span.k for span in spans)
        return Proposal(len(seqs), positions, (perf_counter() - began) * 1e3, unread)

    def _proposed(self, proposer: Proposer, spans: list[Span], lease: Any) -> list[Draft]:
        """Trees for the spans that may have one, chains for the others: two calls where there are both."""
        drafts = dict[Span, Draft]()
        trees = [span for span in spans if span.depth]
        if trees:
            assert isinstance(proposer, Branching)
            seqs, ks = [span.seq for span in trees], [span.k for span in trees]
            found = proposer.propose_trees(seqs, ks, [span.depth for span in trees], lease)
            drafts |= zip(trees, found, strict=True)
        if chains := [span for span in spans if not span.depth]:
            found = proposer.propose([span.seq for span in chains], [span.k for span in chains], lease)
            drafts |= zip(chains, found, strict=True)
        return [drafts[span] for span in spans]

    def _chained(self, method: str, draft: Draft, span: Span) -> Draft:
        """The draft of a method, continued at its end by the first other lookup of the sequence that can."""
        seq, room = span.seq, min(span.decision.chained, span.reserved) - len(draft.tokens)
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

    def observe(self, spans: list[Span], taps: States) -> None:
        """Reports the round to each method that knows the sequences for which any was asked."""
        known: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.asked and not span.seq.failed:
                for method in self._admitted[span.seq.id]:
                    known[method].append(span)
        for method, group in known.items():
            seqs, verdicts = [span.seq for span in group], [span.verdict for span in group]
            guarded(method, seqs, partial(self._built[method].observe, seqs, verdicts, taps), None)

    def release(self, seq: Sequence) -> None:
        for method in self._admitted.pop(seq.id, ()):
            guarded(method, [seq], partial(self._built[method].release, seq), None)

    def _build(self, method: str) -> None:
        if method in self._built or method in self._lacking:
            return
        missing = method in WITH_CHECKPOINT and method not in self._config.drafts
        if missing or (self._closed and method in OF_TARGET):
            self._lacking[method] = Reason.NO_DRAFTER
            return
        proposer = find_factory(method)(self._config, self._facts)
        if proposer.needs.layers or proposer.needs.bytes_fixed or proposer.needs.states:
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
        if self._estimate_memory is None:
            return True
        memory = self._estimate_memory([*self.needs, proposer.needs])
        if memory.action == "refuse":
            raise MemoryExceeded(method, memory)
        if memory.action == "plain":
            self.refusals[method] = str(memory)
        log.log(logging.INFO if memory.fits else logging.WARNING, "%s: %s", method, memory)
        return memory.action == "use"

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
            raise ValueError(f"{method} drafted a token outside the vocabulary of {self._facts.vocab_size}")
        match, stopped = draft.match, draft.stop
        if type(match) is not int or match < 0 or not (stopped is None or type(stopped) is Stop):
            raise ValueError(
                f"{method}: match = {match!r} is a number of tokens, stop = {stopped!r} a core.Stop"
            )
        return draft


def check_tree(method: str, draft: Draft, depth: int) -> None:
    """Raises `ValueError` for a tree that was not asked for, or that is none."""
    if draft.parents is None:
        return
    if not all(ROOT <= parent < node for node, parent in enumerate(draft.parents)):
        raise ValueError(f"{method}: parents = {draft.parents}: a node's parent comes before it")
    if draft.depth > depth:
        raise ValueError(f"{method} drafted {draft.depth} tokens in a row in a tree, {depth} are its limit")


def guarded(method: str, seqs: list[Sequence], call: Callable[[], Result], otherwise: Result) -> Result:
    """Calls a proposer. An error costs these sequences their drafts (reason `error`), and nothing else."""
    try:
        return call()
    except Exception as error:
        log.error("proposer %s failed; its sequences go on plainly", method, exc_info=error)
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
    return draft.cut(len(tokens), stop)
