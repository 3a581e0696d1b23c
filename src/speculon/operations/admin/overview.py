"""Sums of the engines' counters, as the overview shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from speculon.core.telemetry import EngineCounters, RequestStats
from speculon.engine.client import EngineClient
from speculon.operations.admin.schemas import Counts, Engine, MethodCounts, MonitorView


def engine_of(engine: EngineClient) -> Engine | None:
    facts, load, counters = engine.facts, engine.load, engine.counters
    if facts is None:
        return None
    return Engine(
        **dict(counts_of([counters])),
        sequences_running=load.running,
        sequences_waiting=load.waiting,
        pages=facts.pages,
        pages_free=load.free_pages,
        page_tokens=facts.page_tokens,
        restarts=engine.restarts,
        steps=counters.steps,
        cost_curve=engine.costs,
        memory_bytes=facts.memory,
        monitor=MonitorView.model_validate(counters.monitor, from_attributes=True),
    )


def counts_of(engines: Iterable[EngineCounters]) -> Counts:
    """The sum over engines."""
    totals, proposals = RequestStats(), Counter[str]()
    for counters in engines:
        totals.add(counters.totals)
        proposals.update(counters.proposals)
    drafted, positions = totals.drafted_at.total(), sorted(totals.drafted_at)
    return Counts(
        emitted=totals.emitted,
        stop_tokens=totals.stop_tokens,
        target_calls=totals.target_calls,
        rounds=totals.rounds,
        drafted=drafted,
        accepted=totals.accepted,
        acceptance_rate=ratio(totals.accepted, drafted),
        tokens_per_target_call=ratio(totals.generated, totals.target_calls),
        saved_seconds=None if totals.saved_ms is None else totals.saved_ms / 1e3,
        methods=[
            of_method(method, totals, proposals[method])
            for method in sorted({*totals.drafted_from, *proposals})
        ],
        per_position=[totals.accepted_at[i] / totals.drafted_at[i] for i in positions],
        drafts_at=[totals.drafted_at[i] for i in positions],
        plain_rounds=dict(totals.reasons),
    )


def of_method(method: str, totals: RequestStats, proposals: int) -> MethodCounts:
    drafted, rounds = totals.drafted_from[method], totals.rounds_from[method]
    accepted, tokens = totals.accepted_from[method], totals.generated_from[method]
    return MethodCounts(
        method=method,
        proposals=proposals,
        drafted=drafted,
        accepted=accepted,
        acceptance_rate=ratio(accepted, drafted),
        rounds=rounds,
        tokens=tokens,
        tokens_per_target_call=ratio(tokens, rounds),
    )


def ratio(part: float, whole: float) -> float | None:
    """Without a whole there is no ratio."""
    return part / whole if whole > 0 else None
