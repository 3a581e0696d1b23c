"""What a round adds to the accounts of its sequences and of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculon.core.telemetry import EngineCounters
from speculon.decoding.sequence import Round, Span

if TYPE_CHECKING:
    from speculon.speculation.control.cost import Costs


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
        stats = span.seq.stats
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
