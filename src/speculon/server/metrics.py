"""`/metrics` for Prometheus: the engine's counters, and histograms of the latency that clients see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from speculon.core.telemetry import EngineCounters, RequestStats
from speculon.core.types import Reason
from speculon.server.access_log import AccessRecord
from speculon.server.capture import Capture

if TYPE_CHECKING:
    from speculon.engine.client import EngineClient
    from speculon.operations.cluster.messages import ReplicaStatistics
    from speculon.server.pool.pooled import PooledModel

    Engine = EngineClient | ReplicaStatistics

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)

# upper bounds of buckets
MATCH_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MODEL_STATES = ("unloaded", "loading", "loaded", "draining", "failed")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self, models: Mapping[str, PooledModel], capture: Capture | None = None):
        self._registry = CollectorRegistry()
        self._registry.register(PoolCollector(models))
        if capture is not None:
            self._registry.register(CaptureCollector(capture))
        count = partial(Counter, namespace="speculon", registry=self._registry)
        self._responses = count("http_requests", "HTTP responses", ["route", "status"])
        self._finished = count("requests", "requests with an answer, by finish reason", ["finish"])
        seconds = partial(Histogram, namespace="speculon", buckets=SECONDS, registry=self._registry)
        self._first = seconds("time_to_first_token_seconds", "from request to first token")
        self._gap = seconds("inter_token_seconds", "between two batches of tokens")
        self._token = seconds("time_per_output_token_seconds", "per token after the first batch")
        self._whole = seconds("request_seconds", "from request to the end of the answer")

    def register(self, collector: Collector) -> None:
        """Its series are on the page, too."""
        self._registry.register(collector)

    def observe(self, record: AccessRecord) -> None:
        self._responses.labels(record.route, record.status).inc()
        if record.answer is None:
            return
        self._finished.labels(record.finish).inc()
        self._whole.observe(record.seconds)
        if record.first_token is not None:
            self._first.observe(record.first_token)
        if record.per_token is not None:
            self._token.observe(record.per_token)
        for gap in record.gaps:
            self._gap.observe(gap)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class PoolCollector(Collector):
    """The series of each model's engine under its label `model`, and those of the pool."""

    def __init__(self, models: Mapping[str, PooledModel]):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}  # one for all models: a name has one type and one text
        for name, model in self._models.items():
            for labels, engine in replicas_or_engine(model.engine):
                for metric in engine_metrics(engine, name):
                    samples, metric.samples = metric.samples, []
                    family = families.setdefault(metric.name, metric)
                    family.samples += [with_labels(sample, name, labels) for sample in samples]
        yield from families.values()
        yield from self._pool()

    def _pool(self) -> Iterator[Metric]:
        models = self._models.items()
        loads = {name: model.loads for name, model in models}
        yield counter("model_loads", "loads that succeeded", loads, "model")
        failures = {name: model.failures for name, model in models}
        yield counter("model_failures", "loads that failed, and engines that ended", failures, "model")
        evictions = {name: model.evictions for name, model in models}
        yield counter("model_evictions", "times that it was ended for another model", evictions, "model")
        seconds = {name: model.load_seconds for name, model in models}
        yield gauge("model_load_seconds", "time of the latest load", seconds, "model")
        held = {name: model.held for name, model in models}
        yield gauge("model_memory_bytes", "share of the memory", held, "model")
        states = {
            (name, state): float(model.shown_state == state)
            for name, model in models
            for state in MODEL_STATES
        }
        yield gauge("model_state", "1 for its state", states, "model", "state")


def replicas_or_engine(engine: Engine) -> list[tuple[dict[str, str], Engine]]:
    """(labels, engine) of each replica, else of the engine itself."""
    replicas: Mapping[str, Engine] | None = getattr(engine, "replicas", None)
    if replicas is None:
        return [({}, engine)]
    return [({"replica": name}, replica) for name, replica in replicas.items()]


def with_labels(sample: Sample, model: str, more: Mapping[str, str]) -> Sample:
    labels = sample.labels if "model_name" in sample.labels else {**sample.labels, "model": model}
    return sample._replace(labels={**labels, **more})


def engine_metrics(engine: Engine, model: str) -> Iterator[Metric]:
    """The engine's cumulative counters, with what running sequences have so far."""
    counters = engine.counters
    yield from vllm_metrics(counters.totals, model)
    yield from sum_metrics(counters)
    yield from draft_metrics(counters.totals)
    yield from proposal_metrics(counters)
    yield from decision_metrics(counters.totals)
    yield from state_metrics(engine)


def vllm_metrics(totals: RequestStats, model: str) -> Iterator[Metric]:
    """Four counters under vLLM's names, for dashboards made for vLLM."""
    for name, text, value in (
        ("drafts", "drafts", totals.rounds),
        ("draft_tokens", "draft tokens", totals.drafted_at.total()),
        ("accepted_tokens", "accepted tokens", totals.accepted),
    ):
        family = CounterMetricFamily(
            f"vllm:spec_decode_num_{name}", f"Number of {text}.", labels=["model_name", "engine"]
        )
        yield filled(family, {(model, "0"): value})
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        labels=["model_name", "engine", "position"],
    )
    yield filled(family, {(model, "0", at): count for at, count in sorted(totals.accepted_at.items())})


def sum_metrics(counters: EngineCounters) -> Iterator[Metric]:
    totals = counters.totals
    for name, text, value in (
        ("sequences", "sequences that have ended", counters.finished.total()),
        ("prompt_tokens", "tokens of prompts", counters.prompt_tokens),
        ("prompt_tokens_cached", "found in the prefix cache, by every sample", totals.cached_tokens),
        ("generated_tokens", "output tokens", totals.emitted),
        ("stop_tokens", "stop tokens, which end texts and are no part of them", totals.stop_tokens),
        ("target_calls", "target calls, counted once per sequence", totals.target_calls),
        ("speculative_rounds", "of these, with drafts to verify", totals.rounds),
        ("preemptions", "sequences that had to wait for pages", totals.preemptions),
        ("steps", "steps of the engine", counters.steps),
        ("step_rows", "rows computed in them", counters.rows),
        ("integrity_checks", "checks, when idle, that every KV page is accounted for", counters.checks),
    ):
        yield counter(name, text, value)
    parts = {part: ms / 1e3 for part, ms in counters.profile.items()}
    yield counter("step_seconds", "time in steps, by part", parts, "part")
    yield counter("restored", "pools and policies kept by an earlier process", counters.restored, "part")


def draft_metrics(totals: RequestStats) -> Iterator[Metric]:
    yield counter("draft_tokens", "draft tokens verified, by source", totals.drafted_from, "source")
    yield counter("accepted_tokens", "draft tokens accepted, by source", totals.accepted_from, "source")
    text = "draft tokens verified under an adapter of the target, by adapter"
    yield counter("adapter_draft_tokens", text, totals.drafted_under, "adapter")
    text = "of these, accepted; totals less these are those of the base"
    yield counter("adapter_accepted_tokens", text, totals.accepted_under, "adapter")
    text = "drafts measured in shadow, not verified, by method"
    yield counter("shadow_rounds", text, totals.watched, "method")
    drafted, accepted = by_method(totals.watched_at), by_method(totals.stood_at)
    yield counter("shadow_draft_tokens", "tokens of these drafts, by method", drafted, "method")
    text = "of these, equal to the tokens committed, by method"
    yield counter("shadow_accepted_tokens", text, accepted, "method")
    yield counter("span_outcomes", "how drafted spans ended", totals.outcomes, "outcome")


def proposal_metrics(counters: EngineCounters) -> Iterator[Metric]:
    text = "proposals: calls of a method, one per sequence"
    yield counter("proposals", text, counters.proposals, "method")
    seconds = {method: ms / 1e3 for method, ms in counters.proposal_ms.items()}
    yield counter("proposal_seconds", "time of proposals", seconds, "method")
    stops = {
        (method, stop): n for method, counts in counters.totals.stops.items() for stop, n in counts.items()
    }
    text = "proposals, by method and by why they ended"
    yield counter("proposal_stops", text, stops, "method", "stop")
    text = "tokens of context that a lookup matched"
    yield histogram("match_tokens", text, counters.totals.matches, "method", MATCH_TOKENS)


def decision_metrics(totals: RequestStats) -> Iterator[Metric]:
    reasons = {reason.value: totals.reasons[reason.value] for reason in Reason}
    yield counter("plain_rounds", "rounds without speculation, by reason", reasons, "reason")
    text = "rounds whose method differs from the sequence's last round"
    yield counter("changes", text, totals.changes, "from", "to", "reason")
    text = "accepted drafts as policies estimated them, before verification"
    yield counter("expected_accepted_tokens", text, totals.expected)
    yield counter("draft_price_tokens", "cost of these drafts' rows, in tokens", totals.price)
    text = "sequences that ended, by prompt class, its marker, and matches before lookups are verified"
    yield counter("prompts", text, totals.prompts, "class", "marker")
    saved = (totals.saved_ms or 0.0) / 1e3  # a gauge: a counter that falls is taken for a restart
    yield gauge("saved_seconds", "estimate of the time saved by speculation; may be negative", saved)


def state_metrics(engine: Engine) -> Iterator[Metric]:
    counters, load, facts = engine.counters, engine.load, engine.facts
    text = "processes of the engine that were started after one that died or hung"
    yield counter("engine_restarts", text, engine.restarts)
    yield counter("requests_resumed", "requests that such a process continued", engine.resumed)
    yield gauge("history_pools", "pools of earlier answers", counters.pools)
    yield gauge("history_pool_tokens", "tokens in them", counters.pool_tokens)
    yield gauge("requests_open", "requests that have not ended", engine.open_requests)
    yield gauge("sequences_running", "sequences in the batch", load.running)
    yield gauge("sequences_waiting", "sequences waiting for a place in the batch", load.waiting)
    if facts is not None:
        used = facts.pages - load.free_pages
        yield gauge("kv_pages", "pages of the KV pool", facts.pages)
        yield gauge("kv_pages_held", "of these, held by sequences; cached pages count as free", used)
        yield gauge("kv_usage_ratio", "share of the pages that sequences hold", used / facts.pages)


class CaptureCollector(Collector):
    """Counters of the capture, where there is one."""

    def __init__(self, capture: Capture):
        self._capture = capture

    def collect(self) -> Iterator[Metric]:
        capture = self._capture
        yield gauge("capturing", "1 while traffic is captured, 0 after a fault of the disk", capture.open)
        yield counter("captured_choices", "choices written, a line each", capture.written)
        yield counter("captured_bytes", "bytes of these lines", capture.bytes)
        text = "choices that were not written: the disk failed or was too slow"
        yield counter("capture_lost_choices", text, capture.lost)
        text = "bytes of captured files, in blocks of the disk, earlier processes included"
        yield gauge("capture_disk_bytes", text, capture.disk_bytes)


def by_method(counts: Mapping[tuple[str, int], int]) -> Mapping[str, int]:
    """Sums over positions."""
    return {method: sum(n for (name, _), n in counts.items() if name == method) for method, _ in counts}


Values = float | Mapping[Any, float]  # one, or by label, or by a tuple of labels


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return filled(CounterMetricFamily(f"speculon_{name}", text, labels=labels), values)


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return filled(GaugeMetricFamily(f"speculon_{name}", text, labels=labels), values)


def filled(family: F, values: Values) -> F:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([str(label) for label in ((key,) if isinstance(key, str) else key)], value)
    return family


def histogram(
    name: str, text: str, values: Mapping[str, Mapping[int, int]], label: str, bounds: tuple[int, ...]
) -> Metric:
    """`values`: label -> value -> count."""
    family = HistogramMetricFamily(f"speculon_{name}", text, labels=[label])
    for key, counts in values.items():
        buckets = [
            (str(float(bound)), float(sum(n for value, n in counts.items() if value <= bound)))
            for bound in bounds
        ]
        buckets.append(("+Inf", float(sum(counts.values()))))
        family.add_metric([key], buckets, sum(value * n for value, n in counts.items()))
    return family
