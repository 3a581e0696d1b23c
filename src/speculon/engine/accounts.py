"""What a round adds to the accounts of its sequences and of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculon.sequence import Round
from speculon.telemetry import EngineCounters

if TYPE_CHECKING:
    from speculon.control.cost import Costs


def account(counters: EngineCounters, costs: Costs, done: Round) -> None:
    """Counts a committed round, and books its time."""
    counters.steps += 1
    counters.rows += done.rows
    counters.repair_ms += done.repair_ms
    for method, call in done.calls.items():
        counters.proposals[method] += call.sequences
        counters.proposal_ms[method] += call.ms
    attempted = done.attempted()
    for span, verdict in zip(done.spans, done.verdicts, strict=True):
        if not span.samples:
            continue
        stats, attempt = span.seq.stats, attempted.get(span.seq.id)
        if attempt is None:
            stats.record(span.draft, verdict)
            continue
        for method, _, draft in attempt.proposals:
            stats.propose(method, draft)
        methods = tuple(ask.method for ask in attempt.decision.asks) if attempt.asked else ()
        stats.record(span.draft, verdict, methods, attempt.why_plain)
    book(costs, done)


def book(costs: Costs, done: Round) -> None:
    """Books the ms of a round in which methods were asked, against those of plain steps of its batch size.

    Where prompts were computed beside, the cost model says what the step took without them.
    """
    batch, asking = len(done.attempts), sum(attempt.asked for attempt in done.attempts)
    if not asking or not costs.known:
        return
    lengths = [len(attempt.span.draft.tokens) for attempt in done.attempts]
    measured = done.timing.target_ms
    step_ms = costs.step(batch, sum(map(bool, lengths)), sum(lengths)) if measured is None else measured
    row_ms = step_ms / sum(attempt.span.rows for attempt in done.attempts)
    plain_ms, tokens = costs.plain(batch), done.generated()
    for attempt in done.attempts:
        seq = attempt.span.seq
        plain = None if plain_ms is None else tokens[seq.id] * plain_ms / batch
        seq.stats.expect(attempt.estimate)
        seq.stats.spend(done.draft_ms / asking if attempt.asked else 0.0, row_ms * attempt.span.rows, plain)
