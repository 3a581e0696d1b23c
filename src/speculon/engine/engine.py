"""The loop: plan, reserve, budget, decide, ask lookups, ask models, forward, verify, commit, observe,
account, free what has ended.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from speculon.core.config import EngineConfig, RequestSpeculation, SamplingParams
from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.core.images import ImageInput
from speculon.core.telemetry import EngineCounters, RequestStats, Stopwatch, log_line
from speculon.core.types import Capability, Finish, Load
from speculon.decoding.rounds import Budget, Drafted, Judged, Round, Span
from speculon.decoding.sequence import Event, Sequence
from speculon.decoding.text.grammar import Grammars
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.decoding.verify import verify
from speculon.engine.admission import Admission
from speculon.engine.capabilities import capability_table
from speculon.engine.kept_costs import KeptCosts
from speculon.engine.messages import Ready
from speculon.engine.scheduler import Ended, Scheduler
from speculon.engine.state import EngineState
from speculon.speculation.control.policies import Policies
from speculon.speculation.drafting import Drafting
from speculon.speculation.events import Events
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.compose import Proposers

if TYPE_CHECKING:
    from filelock import FileLock
    from torch import Tensor

    from speculon.runtimes.base import Runtime, Step
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

    def __init__(self, runtime: Runtime, tokenizer: Tokenizer | None, config: EngineConfig):
        self.runtime, self.tokenizer, self.config = runtime, tokenizer, config
        facts = runtime.facts
        known = TargetFacts(facts.vocab_size, facts.max_context, facts.takes_trees)
        self.proposers = Proposers(config.speculation, known, runtime.drafters, runtime.refusals)
        self.scheduler = Scheduler(runtime.space, config.max_num_seqs, config.max_batch_tokens)
        self.policy = Policies(config.speculation)
        self.grammars = Grammars(tokenizer, facts.vocab_size, facts.eos_ids, config.threads)
        self.admission = Admission(config.speculation, self.proposers, self.grammars, tokenizer, runtime)
        self.counters = EngineCounters()  # `totals`: of ended sequences; `current_counters` has all
        self.events = Events.of(
            config,
            device=facts.form.get("device"),
            dtype=facts.form.get("dtype"),
            max_context=facts.max_context,
            pages=self.pages,
        )
        self.state: EngineState | None = None  # what is kept across restarts
        self._save_costs: Callable[[], object] = lambda: None
        self._requests: dict[str, _Request] = {}
        self._names = itertools.count()

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

    @property
    def max_context(self) -> int:
        return self.runtime.facts.max_context

    @property
    def pages(self) -> int:
        """Blocks of tokens that the runtime has in all."""
        return self.runtime.facts.capacity // self.runtime.space.block_size

    def facts(self) -> Ready:
        """What a server has to know of it."""
        facts, space = self.runtime.facts, self.runtime.space
        return Ready(
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
            max_num_seqs=self.config.max_num_seqs,
            pages=self.pages,
            page_tokens=space.block_size,
            method=self.proposers.default,
            drafters={m: path for m, path in self.config.speculation.drafts.items() if isinstance(path, str)},
            holds_context=space.most(facts.max_context) <= facts.capacity,
            memory=dict(self.runtime.memory()),
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
            raise InvalidParameter("request_id", request_id, "is in use by another open request")
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
        if self.runtime.between_rounds():
            self.policy.costs.doubt()
        watch = Stopwatch(self.counters.profile)
        spans, events = self._without_faults(self.scheduler.plan())
        if not spans:
            return events
        judged = self.round(spans, watch)
        new, ended = self.scheduler.free_ended(judged)
        self._forget(ended)
        watch.lap("settle")
        return [*events, *new]

    def _without_faults(self, spans: list[Span]) -> tuple[list[Span], list[Event]]:
        """Spans whose rows can be computed. A request with an image that cannot be read ends here, alone."""
        faults, events = dict[str, SpeculonError](), list[Event]()
        for span in spans:
            if fault := self.runtime.prepare_images(span):
                faults[span.seq.request.id] = fault
        for request_id, fault in faults.items():
            new, ended = self.scheduler.abort(request_id, Finish("error", error=fault))
            self._forget(ended)
            events += new
        return [span for span in spans if span.seq.request.id not in faults], events

    @torch.inference_mode()
    def round(self, spans: list[Span], watch: Stopwatch | None = None, counted: bool = True) -> list[Judged]:
        """Reserves, decides, drafts, verifies and commits one plan; returns what became of each span.

        An error leaves every sequence as it was before. One that is not `counted` is in no counter and in no
        record; its sequences, the drafters and the policy learn from it all the same.
        """
        watch = watch or Stopwatch(self.counters.profile if counted else None)
        load = self.scheduler.load
        with self.runtime.reserve(spans) as step:
            budgets = self.budgets(spans, step)
            watch.lap("prepare")
            decisions = self.policy.decide(budgets, load)
            watch.lap("decide")
            drafting = Drafting(self.proposers, self.policy, budgets, decisions)
            drafting.ask_lookups()
            drafting.ask_models()
            draft_ms = watch.lap("propose")
            judged = self.forward_and_verify(step, with_prompts(spans, drafting.drafted), watch)
            repair_ms = step.commit(judged)
            for one in judged:
                one.seq.advance(one.end, one.verdict.tokens, one.span.end)
        judged = [one.in_path_order for one in judged]
        watch.lap("commit")
        done = Round(load, judged, drafting.calls, draft_ms, watch.ms - draft_ms, repair_ms)
        self.proposers.observe(done.decoding)
        watch.lap("settle")
        self._learn(done, counted, watch)
        return judged

    def budgets(self, spans: list[Span], step: Step) -> list[Budget]:
        """How far each span that decodes may speculate, whatever its policy decides."""
        return [
            Budget.of(span, grant, self.proposers.unread(span.seq))
            for span, grant in zip(spans, step.grants, strict=True)
            if span.decodes
        ]

    def forward_and_verify(self, step: Step, drafted: list[Drafted], watch: Stopwatch) -> list[Judged]:
        """One target call for all spans and their drafts, and its verdicts. Commits nothing."""
        out = step.forward(drafted)
        watch.split("prepare", "forward", out.ms)
        judged = verify(drafted, out.logits, out.scored)
        watch.lap("verify")
        return judged

    @torch.inference_mode()
    def logits_after(self, seq: Sequence) -> Tensor:  # [V]
        """The target's logits after a sequence that nobody runs, computed as a prompt. Only its prefix cache
        keeps what was computed, if its request has one.
        """
        space = self.runtime.space
        seq.committed = space.open(seq)
        try:
            while True:
                span = Span.of(seq, seq.committed, space.chunk(seq, self.config.max_batch_tokens))
                with self.runtime.reserve([span]) as step:
                    out = step.forward([Drafted(span)])
                    if span.samples:  # not committed: the noise of the row is that of the next position
                        return out.logits[-1]
                    step.commit(verify([Drafted(span)], out.logits, out.scored))
                    seq.advance(span.end, (), 0)
        finally:
            space.close(seq)
            seq.committed = 0

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

    def abort(self, request_id: str) -> list[Event]:
        """Ends a request now; its pages are free at once."""
        events, ended = self.scheduler.abort(request_id)
        self._forget(ended)
        return events

    def keep_state(self, lock: FileLock | None = None) -> None:
        """Begins with what an engine like this one learned before, and keeps it, where the settings name a
        folder for that; `lock` is the one of the folder, where the caller holds it.
        """
        facts = self.runtime.facts
        self.state = EngineState.of(
            self.config,
            self.proposers,
            self.policy,
            vocab_size=facts.vocab_size,
            parameters=facts.parameters,
            machine=facts.form,
            adapters=facts.adapters,
            lock=lock,
        )
        if self.state is not None:
            self.counters.restored.update(self.state.load())
            self.state.save_at_end(self)
            self._count_pools()

    def keep_costs(self) -> KeptCosts:
        """Begins with what rounds cost an engine like this one before, unless that is known, and keeps what
        they cost, where there is a cache folder.
        """
        kept = KeptCosts.of(self.policy.costs, self.config, self.runtime.facts)
        kept.restore()
        self._save_costs = weakref.finalize(self, kept.save)
        return kept

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
        """Writes out what the record of rounds still holds, and what is kept across restarts and starts; ends
        the runtime.
        """
        if self.events is not None:
            self.events.close()
        if self.state is not None:
            self.state.close()
        self._save_costs()
        self.runtime.end()

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


def with_prompts(spans: list[Span], drafted: list[Drafted]) -> list[Drafted]:
    """All spans in their order: prompt chunks have no draft."""
    decoding = iter(drafted)
    return [next(decoding) if span.decodes else Drafted(span) for span in spans]


def account(counters: EngineCounters, costs: Costs, done: Round) -> None:
    """Counts a committed round, and books its time."""
    counters.steps += 1
    counters.rows += done.rows
    counters.repair_ms += done.repair_ms
    for method, call in done.calls.items():
        counters.proposals[method] += call.sequences
        counters.proposal_ms[method] += call.ms
    for one in done.judged:
        if not one.span.samples:
            continue
        stats, adapter, drafted = one.seq.stats, one.seq.request.adapter, one.drafted
        if adapter and one.draft.tokens:
            stats.count_under(adapter, len(one.draft.tokens), one.verdict.accepted)
        if not one.span.decodes:
            stats.record(one.draft, one.verdict)
            continue
        for method, _, draft in drafted.proposals:
            stats.propose(method, draft)
        stats.record(one.draft, one.verdict, drafted.asked, drafted.reason)
    book(costs, done.decoding, done.draft_ms, done.timing.target_ms)


def book(costs: Costs, judged: list[Judged], draft_ms: float, target_ms: float | None) -> None:
    """Books the ms of a round in which methods were asked, against those of plain steps of its batch size.

    Where prompts were computed beside, the cost model says what the step took without them.
    """
    batch, sharing = len(judged), sum(bool(one.drafted.asked) for one in judged)
    if not sharing or not costs.known:
        return
    lengths = [len(one.draft.tokens) for one in judged]
    step_ms = costs.step(batch, sum(map(bool, lengths)), sum(lengths)) if target_ms is None else target_ms
    row_ms = step_ms / sum(one.drafted.rows for one in judged)
    plain_ms = costs.plain(batch)
    for one in judged:
        stats, drafted = one.seq.stats, one.drafted
        plain = None if plain_ms is None else one.verdict.generated * plain_ms / batch
        stats.expect(drafted.estimate)
        stats.spend(draft_ms / sharing if drafted.asked else 0.0, row_ms * drafted.rows, plain)
