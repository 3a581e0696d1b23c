"""The counters of one engine, as the overview shows them."""

from __future__ import annotations

from speculon.engine.client import EngineClient
from speculon.server.admin.schemas import Acceptance, Engine, MonitorView
from speculon.telemetry import EngineCounters


def engine_of(engine: EngineClient) -> Engine | None:
    facts, load, counters = engine.facts, engine.load, engine.counters
    if facts is None:
        return None
    totals, monitor = counters.totals, counters.monitor
    positions = sorted(totals.drafted_at)
    return Engine(
        sequences_running=load.running,
        sequences_waiting=load.waiting,
        pages=facts.pages,
        pages_free=load.free_pages,
        page_tokens=facts.page_tokens,
        restarts=engine.restarts,
        steps=counters.steps,
        target_calls=totals.target_calls,
        rounds=totals.rounds,
        tokens_per_target_call=totals.emitted / totals.target_calls if totals.target_calls else None,
        saved_seconds=None if totals.saved_ms is None else totals.saved_ms / 1e3,
        methods=acceptance_of(counters),
        per_position=[totals.accepted_at[i] / totals.drafted_at[i] for i in positions],
        drafts_at=[totals.drafted_at[i] for i in positions],
        plain_rounds=dict(totals.reasons),
        cost_curve=engine.costs,
        memory_bytes=facts.memory,
        monitor=MonitorView(
            replayed=monitor.replayed,
            equal=monitor.equal,
            ties=monitor.ties,
            faults=monitor.faults,
            dropped=monitor.dropped,
            waiting=monitor.waiting,
        ),
    )


def acceptance_of(counters: EngineCounters) -> list[Acceptance]:
    totals = counters.totals
    methods = sorted({*totals.drafted_from, *counters.proposals})
    return [
        Acceptance(
            method=method,
            proposals=counters.proposals[method],
            drafted=(drafted := totals.drafted_from[method]),
            accepted=totals.accepted_from[method],
            acceptance_rate=totals.accepted_from[method] / drafted if drafted else None,
        )
        for method in methods
    ]
