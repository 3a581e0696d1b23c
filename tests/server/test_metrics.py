"""`/metrics` has why proposals ended and how much lookups matched, as Prometheus reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from speculon.core.telemetry import EngineCounters, RequestStats
from speculon.core.types import Load, Stop, no_draft
from speculon.server.metrics import MATCH_TOKENS, Metrics

PROPOSALS = (
    ("suffix", Stop.LIMIT, 2),
    ("suffix", Stop.LIMIT, 5),
    ("suffix", Stop.FACTOR, 5),
    ("suffix", Stop.NO_MATCH, 0),
    ("plug-in", None, 99),
    ("draft_model", Stop.CONFIDENCE, 0),
)


def page(stats: RequestStats) -> dict[str, tuple[str, list[Sample]]]:
    """Name -> type and samples."""
    counters = EngineCounters()
    counters.totals.add(stats)
    engine = SimpleNamespace(
        counters=counters, load=Load(0, 0, 0), facts=None, open_requests=0, restarts=0, resumed=0
    )
    model = SimpleNamespace(
        engine=engine, shown_state="loaded", loads=1, failures=0, evictions=0, load_seconds=1.0, held=0
    )
    content = Metrics(cast(Any, {"demo": model})).page()
    return {
        family.name: (family.type, family.samples)
        for family in text_string_to_metric_families(content.decode())
    }


def test_proposals_are_counted_by_method_and_stop_and_matches_are_a_histogram() -> None:
    stats = RequestStats()
    for method, stop, match in PROPOSALS:
        stats.propose(method, no_draft(stop, match))
    found = page(stats)
    kind, samples = found["speculon_proposal_stops"]
    counts = {
        (s.labels["method"], s.labels["stop"]): s.value
        for s in samples
        if s.name == "speculon_proposal_stops_total"
    }
    assert kind == "counter" and counts == {
        ("suffix", "limit"): 2,
        ("suffix", "factor"): 1,
        ("suffix", "no_match"): 1,
        ("draft_model", "confidence"): 1,
    }
    kind, samples = found["speculon_match_tokens"]
    whole = {
        (s.name.removeprefix("speculon_match_tokens_"), s.labels["method"]): s.value
        for s in samples
        if "le" not in s.labels
    }
    assert kind == "histogram"
    assert whole == {
        ("count", "suffix"): 3,
        ("sum", "suffix"): 12,
        ("count", "plug-in"): 1,
        ("sum", "plug-in"): 99,
    }
    buckets = {
        float(s.labels["le"]): s.value for s in samples if s.labels["method"] == "suffix" and "le" in s.labels
    }
    assert buckets == {**{float(n): (n >= 2) + 2 * (n >= 5) for n in MATCH_TOKENS}, float("inf"): 3}
    beyond = [s.value for s in samples if s.labels["method"] == "plug-in" and "le" in s.labels]
    assert beyond == [*[0] * len(MATCH_TOKENS), 1], "a match beyond the last bound"
