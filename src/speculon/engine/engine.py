"""The loop: plan, decide, reserve, ask lookups, ask models, pack, forward, verify, cut, commit, observe,
account, free what has ended.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from speculon.core.config import MAX_DRAFTS, EngineConfig, RequestSpeculation, SamplingParams
from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.core.images import ImageInput
from speculon.core.telemetry import EngineCounters, RequestStats, Stopwatch, log_line
from speculon.core.types import Capability, Finish, Load
from speculon.decoding.sequence import Event, Round, Span
from speculon.decoding.text.grammar import Grammars
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.decoding.verify import cut, verify
from speculon.engine.admission import Admission
from speculon.engine.capabilities import capability_table
from speculon.engine.messages import Ready
from speculon.engine.scheduler import Ended, Scheduler
from speculon.engine.state import State
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.budget import Budget
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.runtimes.torch.kv.draft_slots import DraftSlots
from speculon.runtimes.torch.kv.lease import Lease, Leases
from speculon.runtimes.torch.kv.reach import joint_reach
from speculon.runtimes.torch.kv.slots import StateSlots
from speculon.runtimes.torch.kv.states import StateStore
from speculon.runtimes.torch.kv.store import PageStore
from speculon.runtimes.torch.needs import Needs
from speculon.speculation.control.policies import Policies
from speculon.speculation.drafting import Drafting
from speculon.speculation.events import Events
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.compose import Proposers

if TYPE_CHECKING:
    from filelock import FileLock

    from speculon.runtimes.torch.model.target import Output, Target
    from speculon.speculation.control.cost import Costs

log = logging.getLogger("speculon")


@dataclass(slots=True)
class _Request:
    """Bookkeeping of one request until all of its samples have ended."""

    began: float
    open: int
    stats: RequestStats = field(default_factory=RequestStats)


class Engine:
    """Serves many sequences at once with one target. One thread may use it at a time (`Stepper`).

    Without a tokenizer it takes token ids alone, and refuses stop strings and bad words.
    """

    def __init__(self, target: Target, tokenizer: Tokenizer | None, config: EngineConfig):
        self.target, self.tokenizer, self.config = target, tokenizer, config
        self.max_context = min(target.max_context, config.max_context or target.max_context)
        drafts = max(config.max_num_seqs * config.speculation.most(), MAX_DRAFTS)  # of a step, whoever asks
        facts = TargetFacts(
            target.vocab_size,
            self.max_context,
            num_layers=len(target.layers),
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            tokenizer=tokenizer,
            rows=config.max_batch_tokens + drafts,
            scored=config.max_num_seqs + drafts,
            sequences=config.max_num_seqs,
            fuse=config.fuse,
            compile=config.compile,
            batch_invariant=target.batch_invariant,
            quantization=config.quantization,
            model=target,
        )
        budget = Budget(
            config,
            target.needs(facts.rows, facts.scored, config.max_num_seqs),
            self.max_context,
            target.device,
        )
        self.proposers = Proposers(config.speculation, facts, budget.estimate)
        drafters = self.proposers.needs
        self.memory = budget.estimate(drafters)
        target.capture(self.proposers.taps)
        own = tuple(layer for needs in drafters for layer in needs.layers)
        snapshots, pages = budget.snapshots(drafters), budget.pages(drafters)
        self.pool = make_pool(target, config, pages, snapshots, joint_reach(target.layers, drafters))
        store = PageStore((*target.layers, *own), pages, config.block_size, target.device)
        draft_states = self._draft_states(self.proposers.needs_of_states)
        states = target.states(self.pool.slots.count)
        self.leases = Leases(self.pool, store, drafts, states, draft_states)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_batch_tokens)
        self.policy = Policies(config.speculation)
        self.grammars = Grammars(tokenizer, target.vocab_size, target.eos_ids, config.threads)
        self.admission = Admission(
            config.speculation,
            self.proposers,
            self.grammars,
            tokenizer,
            self.pool,
            target,
            self.max_context,
            config.max_batch_tokens,
            config.max_batch_tokens - config.max_num_seqs,
        )
        self.counters = EngineCounters()  # `totals`: of ended sequences; `current_counters` has all
        self.events = Events.of(
            config, device=facts.device, dtype=facts.dtype, max_context=self.max_context, pages=pages
        )
        self.state: State | None = None  # what is kept across restarts
        self._facts = facts
        self._requests: dict[str, _Request] = {}
        self._names = itertools.count()

    def _draft_states(self, needs_of_states: dict[str, Needs]) -> dict[str, StateStore]:
        """The states of drafters that have any, by method; their slots are the pool's."""
        stores = {}
        for method, needs in needs_of_states.items():
            slots = DraftSlots(method, self.config.max_num_seqs, needs.spare_states)
            self.pool.draft_slots[method] = slots
            stores[method] = StateStore(needs.states, slots.count, self.target.device)
        return stores

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def load(self) -> Load:
        return self.scheduler.load

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that run; where none does, of those that wait."""
        seqs = self.scheduler.running or self.scheduler.waiting
        return list(dict.fromkeys(seq.request.id for seq in seqs))

    def facts(self) -> Ready:
        """What a server has to know of it."""
        return Ready(
            vocab_size=self.target.vocab_size,
            max_context=self.max_context,
            max_num_seqs=self.config.max_num_seqs,
            pages=self.pool.num_blocks,
            page_tokens=self.pool.block_size,
            method=self.proposers.default,
            drafters={m: path for m, path in self.config.speculation.drafts.items() if isinstance(path, str)},
            holds_context=self.pool.max_pages(self.max_context, self.config.max_batch_tokens)
            <= self.pool.num_blocks,
            memory=self.memory.parts(),
        )

    def plain_costs(self) -> dict[int, float]:
        """Sequences -> ms of a plain step, for the batch sizes that were measured."""
        return self.policy.costs.plain_steps()

    def current_counters(self) -> EngineCounters:
        """The counters as of now: `totals` with what sequences have so far that have not ended.

        Summed up when asked for: to record each round twice would double what its account takes.
        """
        totals = RequestStats()
        totals.add(self.counters.totals)
        for seq in self.scheduler.begun:
            totals.add(seq.stats)
        return replace(self.counters, totals=totals)

    def capabilities(self) -> dict[str, Capability]:
        """What it does and what a request may ask of it, by feature, with the reasons."""
        return capability_table(self)

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        written: Mapping[int, Seq[int]] | None = None,
        images: Seq[ImageInput] = (),
        adapter: str = "",
    ) -> str:
        """Admits a request or refuses it by name; nothing is started before every check has passed.

        `written` asks for some samples only, and has the output that each of them begins with. `images` are
        those of the prompt, which has their placeholder tokens. `adapter` is one of the target's by name.
        """
        if request_id is None:
            request_id = next(name for i in self._names if (name := f"r-{i}") not in self._requests)
        if request_id in self._requests:
            raise InvalidParameter("request_id", request_id, "is in use")
        fixed = request_id, prompt, params, speculation
        admit = partial(self.admission.admit, *fixed, images=images, adapter=adapter)
        if written is None:
            samples = admit()
        else:
            samples = [admit(tokens)[sample] for sample, tokens in written.items()]
        self._requests[request_id] = _Request(perf_counter(), len(samples))
        self.counters.requests += 1
        self.counters.prompt_tokens += len(prompt)
        self.scheduler.add(samples)
        return request_id

    def step(self) -> list[Event]:
        """One round for everybody who can run. An error leaves every sequence as it was before."""
        watch = Stopwatch(self.counters.profile)
        spans, events = self._with_features(self.scheduler.plan())
        if not spans:
            return events
        self.round(spans, watch)
        new, ended = self.scheduler.free_ended(spans)
        self._forget(ended)
        watch.lap("settle")
        return [*events, *new]

    def _with_features(self, spans: list[Span]) -> tuple[list[Span], list[Event]]:
        """Spans whose images have features now. A request with an image that has none ends here, alone."""
        faults, events = dict[str, SpeculonError](), list[Event]()
        for span in spans:
            for image in span.seq.request.images.within(span.start, span.start + span.length):
                if self.target.vision is not None and (fault := self.target.vision.fault(image)):
                    faults[span.seq.request.id] = fault
        for request_id, fault in faults.items():
            new, ended = self.scheduler.abort(request_id, Finish("error", error=fault))
            self._forget(ended)
            events += new
        return [span for span in spans if span.seq.request.id not in faults], events

    @torch.inference_mode()
    def round(self, spans: list[Span], watch: Stopwatch | None = None, counted: bool = True) -> None:
        """Drafts, verifies and commits one plan; each span has its verdict then.

        An error leaves every sequence as it was before. One that is not `counted` is in no counter and in no
        record; its sequences, the drafters and the policy learn from it all the same.
        """
        watch = watch or Stopwatch(self.counters.profile if counted else None)
        load, decoding = self.scheduler.load, [span for span in spans if span.decodes]
        watch.lap("prepare")
        self.policy.decide(decoding, load)
        watch.lap("decide")
        with self.leases.reserve(spans) as lease:
            drafting = Drafting(self.proposers, self.policy, lease, decoding)
            watch.lap("prepare")
            drafting.ask_lookups()
            drafting.ask_models()
            draft_ms = watch.lap("propose")
            out = self.ask_target(spans, lease, watch)
            lease.commit()
        for span in spans:
            if span.seq.grammar is not None:
                span.seq.grammar.consume(span.verdict.tokens)
        watch.lap("commit")
        self.proposers.observe(decoding, out.taps)
        watch.lap("settle")
        done = Round(load, spans, drafting.calls, draft_ms, watch.ms - draft_ms, lease.repair_ms)
        self._learn(done, counted, watch)

    def _learn(self, done: Round, counted: bool, watch: Stopwatch) -> None:
        """Reports a committed round to the policy, the counters and the record.

        An error costs what they would have kept of it: raised, it would lose the round's tokens.
        """
        try:
            self.policy.observe(done.decoding, done.timing)
            watch.lap("decide")
            if counted:
                account(self.counters, self.policy.costs, done)
                if self.events is not None:
                    self.events.round(done, self.counters.profile)
        except Exception:
            log.exception("a round is not in the statistics; its output is kept")

    def ask_target(self, spans: list[Span], lease: Lease, watch: Stopwatch) -> Output:
        """One target call for all spans and their drafts: pack, forward, verify, cut. Commits nothing."""
        batch = Batch.pack(spans, self.target.device)
        view = lease.view(batch)
        watch.lap("prepare")
        out = self.target.forward(batch, view)
        if out.taps is not None:
            self.proposers.keep(out.taps, view)
        watch.lap("forward")
        verify(batch, out.logits)
        cut(spans)
        watch.lap("verify")
        return out

    def abort(self, request_id: str) -> list[Event]:
        """Ends a request now; its pages are free at once."""
        events, ended = self.scheduler.abort(request_id)
        self._forget(ended)
        return events

    def keep_state(self, lock: FileLock | None = None) -> None:
        """Begins with what an engine like this one learned before, and keeps it, where the settings name a
        folder for that; `lock` is the one of the folder, where the caller holds it.
        """
        self.state = State.of(
            self.config,
            self.proposers,
            self.policy,
            self._facts,
            parameters=self.target.num_parameters,
            threads=torch.get_num_threads(),
            adapters={name: adapter.digest for name, adapter in self.target.adapters.items()},
            lock=lock,
        )
        if self.state is not None:
            self.counters.restored.update(self.state.load())
            self.state.save_at_end(self)
            self._count_pools()

    def forget_pools(self, pool: str | None = None, tenant: str = "") -> int:
        """Deletes the earlier answers of one pool, or of all of a tenant, in the folder, too; returns how
        many pools were there.

        A text that is being written enters its pool when it ends.
        """
        count = self.proposers.forget(tenant, pool)
        if self.state is not None and count:
            self.state.save()
        self._count_pools()
        return count

    def close(self) -> None:
        """Writes out what the record of rounds still holds, and what is kept across restarts."""
        if self.events is not None:
            self.events.close()
        if self.state is not None:
            self.state.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is accounted for."""
        self.scheduler.check_integrity()

    def _forget(self, ended: Ended) -> None:
        for seq, finish in ended:
            self.proposers.release(seq)
            self.policy.forget(seq)
            self.counters.finished[finish.reason] += 1
            seq.stats.prompts[seq.request.shape.name, seq.request.shape.marker] += 1
            self.counters.totals.add(seq.stats)
            request = self._requests[seq.request.id]
            request.stats.add(seq.stats)
            request.open -= 1
            if not request.open:
                seconds = perf_counter() - request.began
                log.info(log_line(seq.request.id, request.stats, seconds, finish.reason))
                del self._requests[seq.request.id]
        if ended:
            self._count_pools()
            if self.state is not None:
                self.state.tick()

    def _count_pools(self) -> None:
        self.counters.pools, self.counters.pool_tokens = self.proposers.remembered


def make_pool(
    target: Target, config: EngineConfig, pages: int, snapshots: int, reach: int | None
) -> BlockPool:
    """The owner of so many pages, and of the slots and snapshots of recurrent states."""
    sequences = config.max_num_seqs if target.recurrent else 0
    slots = StateSlots(sequences, snapshots, config.max_batch_tokens, target.by_row)
    prefix_cache = config.prefix_cache and (snapshots > 0 or not target.recurrent)
    return BlockPool(pages, config.block_size, prefix_cache, slots, target.prompts_apart, reach)


def account(counters: EngineCounters, costs: Costs, done: Round) -> None:
    """Counts a committed round, and books its time."""
    counters.steps += 1
    counters.rows += done.rows
    counters.repair_ms += done.repair_ms
    for method, call in done.calls.items():
        counters.proposals[method] += call.sequences
        counters.proposal_ms[method] += call.ms
    for span in done.spans:
        if not span.samples:
            continue
        stats, adapter = span.seq.stats, span.seq.request.adapter
        if adapter and span.draft.tokens:
            stats.count_under(adapter, len(span.draft.tokens), span.verdict.accepted)
        if not span.decodes:
            stats.record(span.draft, span.verdict)
            continue
        for method, _, draft in span.proposals:
            stats.propose(method, draft)
        methods = tuple(ask.method for ask in span.decision.asks) if span.asked else ()
        stats.record(span.draft, span.verdict, methods, span.why_plain)
    book(costs, done.decoding, done.draft_ms, done.timing.target_ms)


def book(costs: Costs, spans: list[Span], draft_ms: float, target_ms: float | None) -> None:
    """Books the ms of a round in which methods were asked, against those of plain steps of its batch size.

    Where prompts were computed beside, the cost model says what the step took without them.
    """
    batch, sharing = len(spans), sum(span.asked for span in spans)
    if not sharing or not costs.known:
        return
    lengths = [len(span.draft.tokens) for span in spans]
    step_ms = costs.step(batch, sum(map(bool, lengths)), sum(lengths)) if target_ms is None else target_ms
    row_ms = step_ms / sum(span.rows for span in spans)
    plain_ms = costs.plain(batch)
    for span in spans:
        stats = span.seq.stats
        plain = None if plain_ms is None else span.verdict.generated * plain_ms / batch
        stats.expect(span.estimate)
        stats.spend(draft_ms / sharing if span.asked else 0.0, row_ms * span.rows, plain)
