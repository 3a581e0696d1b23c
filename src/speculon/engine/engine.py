"""The loop: plan, decide, reserve, propose, trim, pack, forward, verify, cut, commit, learn, settle."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from speculon.batch import Batch
from speculon.config import GIVEN_DRAFTS, MAX_DRAFTS, EngineConfig, RequestSpeculation, SamplingParams
from speculon.control.gates import shape_of
from speculon.control.policies import Policies
from speculon.core import Decision, Event, Plan, Reason, Sequence, Span, Timing, Verdict
from speculon.engine.admission import check_request, read_prediction, refuse_text
from speculon.engine.events import Events
from speculon.engine.scheduler import Ended, Scheduler
from speculon.engine.state import State
from speculon.errors import InvalidParameter
from speculon.grammar import Grammars
from speculon.kv.blocks import BlockPool
from speculon.kv.budget import Budget
from speculon.kv.lease import Lease, Leases
from speculon.kv.store import PageStore
from speculon.proposers.base import TargetFacts
from speculon.proposers.compose import Proposers
from speculon.proposers.registry import OFF
from speculon.sampling import Rules
from speculon.telemetry import EngineCounters, RequestStats, Stopwatch, log_line
from speculon.text import StopStrings, Tokenizer
from speculon.verify import Ending, cut, verify

if TYPE_CHECKING:
    from speculon.models.target import Output, Target

SHAPE_TOKENS = 512  # of a prompt's end that are looked at for its kind

log = logging.getLogger("speculon")


@dataclass(slots=True)
class _Request:
    """Bookkeeping of one request until all of its samples have ended."""

    began: float
    open: int
    stats: RequestStats = field(default_factory=RequestStats)


class Engine:
    """Writes many texts at once with one target. One thread may use it at a time.

    Without a tokenizer it knows token ids alone, and refuses stop strings and bad words.
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
            fuse=config.fuse,
            compile=config.compile,
            model=target,
        )
        budget = Budget(config, target.needs(facts.rows, facts.scored), self.max_context, target.device)
        self.proposers = Proposers(config.speculation, facts, budget.promise)
        drafters = self.proposers.needs
        self.promise = budget.promise(drafters)
        target.capture(self.proposers.taps)
        layers = (*target.layers, *(layer for needs in drafters for layer in needs.layers))
        pages = budget.pages(drafters)
        self.pool = BlockPool(pages, config.block_size, config.prefix_cache)
        self.leases = Leases(self.pool, PageStore(layers, pages, config.block_size, target.device), drafts)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_batch_tokens)
        self.policy = Policies(config.speculation)
        self.grammars = Grammars(tokenizer, target.vocab_size, target.eos_ids, config.threads)
        self.counters = EngineCounters()
        self.events = Events.of(
            config, device=facts.device, dtype=facts.dtype, max_context=self.max_context, pages=pages
        )
        self.state: State | None = None  # what is kept across restarts
        self._facts = facts
        self._requests: dict[str, _Request] = {}
        self._ids, self._names = itertools.count(), itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self,
        prompt: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation | Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> str:
        """Admits a request or refuses it by name; nothing is started before every check has passed."""
        if request_id is None:
            request_id = next(name for i in self._names if (name := f"r-{i}") not in self._requests)
        if request_id in self._requests:
            raise InvalidParameter("request_id", request_id, "is in use")
        samples = self.prepare(prompt, params, speculation, request_id)
        self._requests[request_id] = _Request(perf_counter(), len(samples))
        self.counters.requests += 1
        self.counters.prompt_tokens += len(prompt)
        self.scheduler.add(samples)
        return request_id

    def prepare(
        self,
        prompt: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation | Mapping[str, Any] | None,
        request_id: str,
        written: Seq[int] = (),
    ) -> list[Sequence]:
        """The sequences of a request, checked but not queued; `written` is what their texts hold already."""
        max_len = check_request(
            prompt,
            params,
            vocab_size=self.target.vocab_size,
            max_context=self.max_context,
            pages=self.pool.num_blocks,
            block_size=self.pool.block_size,
            written=written,
        )
        text = self.tokenizer
        if text is None:
            refuse_text(params)
        if not isinstance(speculation, RequestSpeculation):
            speculation = RequestSpeculation(**(speculation or {}))
        method, k, off = self._speculation_of(speculation)
        prediction = read_prediction(speculation.prediction, text, self.target.vocab_size)
        grammar = self.grammars.matcher(params, written)
        given = self._given(off, {"grammar": grammar, "prediction": prediction})
        methods = self.proposers.methods_of(given, method)
        join = (
            self.config.speculation.chained_drafts
            if speculation.chained_drafts is None
            else speculation.chained_drafts
        )
        acceptance = speculation.acceptance or self.config.speculation.acceptance
        if acceptance == "auto":  # with a seed the text must not depend on the drafts
            acceptance = "rejection" if params.seed is None else "matching"
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        # a checkpoint may name, and a tokenizer may know, ids that no logit stands for
        known = range(self.target.vocab_size)
        words = text.bad_word_ids(params.bad_words) if text is not None and params.bad_words else []
        bad_words = tuple(word for word in words if all(token in known for token in word))
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.target.eos_ids
        )
        stop_ids = frozenset(token for token in stop_ids if token in known)
        rules = Rules.of(params, bad_words, tuple(sorted(stop_ids)))
        find_stop = None
        if text is not None and params.stop:
            stops = StopStrings(params.stop, text)
            find_stop = partial(stops.find, skip_special_tokens=params.skip_special_tokens)
        ending = Ending(stop_ids, params.min_tokens, find_stop)
        shape = shape_of(
            params.greedy, text.decode(prompt[-SHAPE_TOKENS:]) if text is not None and off is None else ""
        )
        return [
            Sequence(
                id=next(self._ids),
                request_id=request_id,
                tokens=[*prompt, *written],
                prompt_len=len(prompt),
                params=params if sample == 0 else params.model_copy(update={"prompt_logprobs": None}),
                seed=seed,
                max_len=max_len,
                rules=rules,
                ending=ending,
                stats=RequestStats(),
                sample=sample,
                method=method,
                k=k,
                off=off,
                given=given,
                methods=methods,
                lookups=self.proposers.lookups(methods),
                policy=speculation.policy or self.config.speculation.policy,
                join=join,
                shape=shape,
                given_k=(speculation.num_speculative_tokens or GIVEN_DRAFTS) if given else 0,
                prediction=prediction,
                pool=speculation.pool,
                tenant=speculation.tenant,
                grammar=grammar and grammar.fork(),
                rejection=acceptance == "rejection" and not params.greedy,
            )
            for sample in range(params.n)
        ]

    def step(self) -> list[Event]:
        """One round for everybody who can run. An error leaves every sequence as it was before."""
        watch = self.stopwatch()
        plan = self.scheduler.plan()
        if not plan.spans:
            return []
        verdicts = self.round(plan, watch)
        events, ended = self.scheduler.settle(plan.spans, verdicts)
        self._forget(ended)
        watch.lap("settle")
        return events

    @torch.inference_mode()
    def round(self, plan: Plan, watch: Stopwatch) -> list[Verdict]:
        """Drafts, judges and commits one plan; one verdict per span.

        An error leaves every sequence as it was before.
        """
        load = self.scheduler.load
        watch.lap("prepare")
        decisions = self.policy.decide([span.seq for span in plan.decoding], load)
        watch.lap("decide")
        with self.leases.reserve(plan, decisions) as lease:
            watch.lap("prepare")
            trim, confirm = self.policy.trim, self.policy.confirm
            drafts, decisions = self.proposers.propose(plan.decoding, lease.decisions, lease, trim, confirm)
            for span, draft in zip(plan.decoding, drafts, strict=True):
                span.draft, span.estimate = draft, self.policy.estimate(span.seq) if draft.tokens else None
            draft_ms = watch.lap("propose")
            out, verdicts = self.ask_target(plan.spans, lease, watch)
            lease.commit(verdicts)
        for span, verdict in zip(plan.spans, verdicts, strict=True):
            if span.seq.grammar is not None:
                span.seq.grammar.consume(verdict.tokens)
        watch.lap("commit")
        verdict_of = {span.seq.id: verdict for span, verdict in zip(plan.spans, verdicts, strict=True)}
        self.proposers.observe(plan.decoding, decisions, verdict_of, out.taps)
        watch.lap("settle")
        target_ms, decoded = watch.ms - draft_ms, [verdict_of[span.seq.id] for span in plan.decoding]
        alone = all(span.length == 1 for span in plan.spans)  # no prompt was computed beside
        timing = Timing(target_ms if alone else None, self.proposers.timings)
        self.policy.observe(plan.decoding, decoded, timing)
        watch.lap("decide")
        self._account(plan, decisions, verdicts)
        self._spend(plan.decoding, decisions, decoded, draft_ms, timing.target_ms)
        if self.events is not None:
            asked, profile = lease.decisions, self.counters.profile
            proposed, calls = self.proposers.proposed, timing.proposals
            self.events.round(load, plan, asked, decisions, proposed, verdicts, calls, target_ms, profile)
        self.proposers.proposed = []  # q of a draft is large, and the next round may be far
        return verdicts

    def ask_target(self, spans: list[Span], lease: Lease, watch: Stopwatch) -> tuple[Output, list[Verdict]]:
        """One target call for all spans and their drafts: pack, forward, verify, cut. Commits nothing."""
        batch = Batch.pack(spans, self.target.device)
        view = lease.view(batch)
        watch.lap("prepare")
        out = self.target.forward(batch, view)
        if out.taps is not None:
            self.proposers.keep(out.taps, view)
        watch.lap("forward")
        verdicts = cut(verify(batch, out.logits), spans)
        watch.lap("verify")
        return out, verdicts

    def stopwatch(self) -> Stopwatch:
        """Started now; its laps are booked in the counters."""
        return Stopwatch(self.counters.profile)

    def abort(self, request_id: str) -> list[Event]:
        """Ends a request now; its pages are free at once."""
        events, ended = self.scheduler.abort(request_id)
        self._forget(ended)
        return events

    def keep_state(self) -> None:
        """Begins with what an engine like this one learned before, and keeps it, where the settings name a
        folder for that.
        """
        self.state = State.of(
            self.config,
            self.proposers,
            self.policy,
            self._facts,
            parameters=self.target.num_parameters,
            threads=torch.get_num_threads(),
        )
        if self.state is not None:
            self.counters.restored.update(self.state.load())
            self.state.save_at_end_of(self)
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
        """Writes out what the record of rounds still holds, and what is kept across restarts.

        All else goes with the object.
        """
        if self.events is not None:
            self.events.close()
        if self.state is not None:
            self.state.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is accounted for."""
        self.scheduler.check_integrity()

    def _speculation_of(self, asked: RequestSpeculation) -> tuple[str | None, int, Reason | None]:
        """(method, K, why none) of a request: what it asks for, else what the engine is set to."""
        name = asked.method or self.proposers.default
        asked_k, default_k = asked.num_speculative_tokens, self.config.speculation.most(asked.policy)
        k = default_k if asked_k is None else asked_k
        if name != OFF and k:
            lacking = self.proposers.lacking(name)
            return (None, 0, lacking) if lacking else (name, k, None)
        by_request = asked.method is not None if name == OFF else asked_k is not None
        return None, 0, Reason.OFF_REQUEST if by_request else Reason.OFF_CONFIG

    def _given(self, off: Reason | None, brought: Mapping[str, object]) -> tuple[str, ...]:
        """The methods that draft from what a request brings, in the order they are asked: none where it wants
        no drafts.
        """
        if off in (Reason.OFF_REQUEST, Reason.OFF_CONFIG):
            return ()
        return tuple(name for name, what in brought.items() if what and not self.proposers.lacking(name))

    def _account(self, plan: Plan, decisions: list[Decision], verdicts: list[Verdict]) -> None:
        rows = sum(span.rows for span in plan.spans)
        self.counters.steps += 1
        self.counters.rows += rows
        for method, call in self.proposers.timings.items():
            self.counters.proposals[method] += call.texts
            self.counters.proposal_ms[method] += call.ms
        for method, seqs, drafts in self.proposers.proposed:
            for seq, draft in zip(seqs, drafts, strict=True):
                seq.stats.propose(method, draft)
        decided = {span.seq.id: decision for span, decision in zip(plan.decoding, decisions, strict=True)}
        for span, verdict in zip(plan.spans, verdicts, strict=True):
            if span.samples:
                span.seq.stats.record(decided.get(span.seq.id), span.draft, verdict)

    def _spend(
        self,
        spans: list[Span],
        decisions: list[Decision],
        verdicts: list[Verdict],
        draft_ms: float,
        target_ms: float | None,
    ) -> None:
        """Books the ms of a round in which anybody was asked for drafts, against those of plain steps of the
        same batch size.

        Without `target_ms` prompts were computed beside, which is no part of it: then the cost model says
        what the step took.
        """
        batch, costs = len(spans), self.policy.costs
        asking = sum(decision.method is not None for decision in decisions)
        if not asking or not costs.known:
            return
        plain_ms, lengths = costs.plain(batch), [len(span.draft.tokens) for span in spans]
        step_ms = costs.step(batch, sum(map(bool, lengths)), sum(lengths)) if target_ms is None else target_ms
        for span, decision, verdict in zip(spans, decisions, verdicts, strict=True):
            plainly = None if plain_ms is None else len(verdict.tokens) * plain_ms / batch
            row_ms = step_ms / sum(span.rows for span in spans)
            span.seq.stats.expect(span.estimate)
            span.seq.stats.spend(draft_ms / asking if decision.method else 0.0, row_ms * span.rows, plainly)

    def _forget(self, ended: Ended) -> None:
        for seq, finish in ended:
            self.proposers.release(seq)
            self.policy.forget(seq)
            self.counters.finished[finish.reason] += 1
            seq.stats.prompts[seq.shape.name, seq.shape.marker, seq.cold_matches] += 1
            self.counters.totals.add(seq.stats)
            request = self._requests[seq.request_id]
            request.stats.add(seq.stats)
            request.open -= 1
            if not request.open:
                log.info(
                    log_line(seq.request_id, request.stats, perf_counter() - request.began, finish.reason)
                )
                del self._requests[seq.request_id]
        if ended:
            self._count_pools()
            if self.state is not None:
                self.state.tick()

    def _count_pools(self) -> None:
        self.counters.pools, self.counters.pool_tokens = self.proposers.remembered
