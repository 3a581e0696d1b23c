"""`/metrics`: the engine's counters as they are, and histograms of what clients see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from speculon.core import Load, Reason
from speculon.engine.messages import Ready
from speculon.server.capture import Capture
from speculon.server.access_log import Record
from speculon.telemetry import EngineCounters

MATCHED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # tokens
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Reading(Protocol):
    """The engine as the metrics see it."""

    counters: EngineCounters
    load: Load
    facts: Ready | None

    @property
    def open_requests(self) -> int: ...


class Metrics:
    def __init__(self, engine: Reading, model: str, capture: Capture | None = None):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model))
        if capture is not None:
            self._registry.register(CaptureCollector(capture))
        own = self._registry
        self._answers = Counter("speculon_http_requests", "answers given", ["route", "status"], registry=own)
        self._finished = Counter(
            "speculon_requests", "requests that were served, by how they ended", ["finish"], registry=own
        )
        self._first = Histogram(
            "speculon_time_to_first_token_seconds",
            "from request to first token",
            buckets=SECONDS,
            registry=own,
        )
        self._gap = Histogram(
            "speculon_inter_token_seconds", "between two arrivals of tokens", buckets=SECONDS, registry=own
        )
        self._token = Histogram(
            "speculon_time_per_output_token_seconds",
            "per token after the first arrival",
            buckets=SECONDS,
            registry=own,
        )
        self._whole = Histogram(
            "speculon_request_seconds", "from request to end of answer", buckets=SECONDS, registry=own
        )

    def observe(self, record: Record) -> None:
        self._answers.labels(record.route, record.status).inc()
        if record.answer is None:
            return
        self._finished.labels(record.finish).inc()
        self._whole.observe(record.seconds)
        if record.first is not None:
            self._first.observe(record.first)
        if record.per_token is not None:
            self._token.observe(record.per_token)
        for gap in record.gaps:
            self._gap.observe(gap)

    def page(self) -> tuple[bytes, int, Mapping[str, str], str]:
        """(content, status, headers, media type)."""
        return generate_latest(self._registry), 200, {}, CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    """Cumulative counters as the engine keeps them; a text is counted once it has ended.

    Readers take differences.
    """

    def __init__(self, engine: Reading, model: str):
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        counters, load, facts = self._engine.counters, self._engine.load, self._engine.facts
        totals = counters.totals
        yield from self._vllm(counters)
        for name, text, value in (
            ("texts", "texts begun and ended", counters.finished.total()),
            ("prompt_tokens", "tokens of prompts", counters.prompt_tokens),
            (
                "prompt_tokens_cached",
                "found in the prefix cache, by every sample of a prompt",
                totals.cached_tokens,
            ),
            ("generated_tokens", "tokens written", totals.emitted),
            ("target_calls", "forwards of the target that wrote for a text", totals.target_calls),
            ("speculative_rounds", "of these, with drafts to verify", totals.rounds),
            ("preemptions", "texts that had to wait for pages", totals.preemptions),
            ("steps", "steps of the engine", counters.steps),
            ("step_rows", "rows computed in them", counters.rows),
            ("integrity_checks", "times at rest that every KV page was found accounted for", counters.checks),
        ):
            yield counter(name, text, {(): value})
        parts = by({part: ms / 1e3 for part, ms in counters.profile.items()})
        yield counter("step_seconds", "time in steps, by part", parts, "part")
        yield counter(
            "draft_tokens", "drafts verified, by what guessed them", by(totals.drafted_from), "source"
        )
        yield counter(
            "accepted_tokens", "drafts accepted, by what guessed them", by(totals.accepted_from), "source"
        )
        tokens = "tokens of drafts that were only watched, by method"
        yield counter(
            "shadow_rounds",
            "drafts that were watched instead of verified, by method",
            by(totals.watched),
            "method",
        )
        yield counter("shadow_draft_tokens", tokens, by(by_method(totals.watched_at)), "method")
        yield counter(
            "shadow_accepted_tokens",
            f"{tokens}, as the text went on",
            by(by_method(totals.stood_at)),
            "method",
        )
        yield counter("proposals", "texts a method was asked about", by(counters.proposals), "method")
        seconds = {method: ms / 1e3 for method, ms in counters.proposal_ms.items()}
        yield counter("proposal_seconds", "time these took", by(seconds), "method")
        stops: dict[tuple[str, ...], float] = {
            (method, stop): count for method, found in totals.stops.items() for stop, count in found.items()
        }
        yield counter(
            "proposal_stops",
            "proposals, by method and by why they ended where they did",
            stops,
            "method",
            "stop",
        )
        yield histogram(
            "match_tokens", "tokens of context that a lookup matched", totals.matches, "method", MATCHED
        )
        yield counter(
            "restored", "what an earlier process had learned: pools, policies", by(counters.restored), "part"
        )
        reasons = by({reason.value: totals.reasons[reason.value] for reason in Reason})
        yield counter("plain_rounds", "rounds without speculation, by reason", reasons, "reason")
        changes: dict[tuple[str, ...], float] = {(*change,): n for change, n in totals.changes.items()}
        yield counter(
            "changes", "rounds that went another way than the text's last", changes, "from", "to", "reason"
        )
        yield counter("span_ends", "how drafted spans ended", by(totals.kinds), "kind")
        expected: dict[tuple[str, ...], float] = {(): totals.expected}
        yield counter(
            "expected_accepted_tokens",
            "accepted drafts as policies estimated them, before verification",
            expected,
        )
        yield counter(
            "draft_price_tokens", "tokens that the time of these drafts' rows was worth", {(): totals.price}
        )
        prompts: dict[tuple[str, ...], float] = {
            (*map(str, prompt),): count for prompt, count in totals.prompts.items()
        }
        about = (
            "sequences that ended, by class of prompt, its marker, and matches before lookups are verified"
        )
        yield counter("prompts", about, prompts, "class", "marker", "cold_matches")
        saved = (totals.saved_ms or 0.0) / 1e3  # no counter: one that falls would be taken for a restart
        yield gauge(
            "saved_seconds", "saved by speculation, by its own estimate; negative where it cost more", saved
        )
        yield gauge(
            "history_pools", "pools of earlier answers, as of the last text that ended", counters.pools
        )
        yield gauge("history_pool_tokens", "tokens in them", counters.pool_tokens)
        yield gauge("requests_open", "requests that have not ended", self._engine.open_requests)
        yield gauge("texts_running", "texts being written", load.running)
        yield gauge("texts_waiting", "texts waiting for a place", load.waiting)
        if facts is not None:
            yield gauge("kv_pages", "pages of the KV pool", facts.pages)
            held = facts.pages - load.free_pages
            yield gauge(
                "kv_pages_held", "of these, held by texts; what the prefix cache keeps is free for them", held
            )
            yield gauge("kv_usage_ratio", "share of them held by texts", held / facts.pages)

    def _vllm(self, counters: EngineCounters) -> Iterator[Metric]:
        """The four counters that dashboards made for vLLM read, under their names."""
        totals, labels = counters.totals, (self._model, "0")
        for name, text, value in (
            ("drafts", "drafts", totals.rounds),
            ("draft_tokens", "draft tokens", totals.drafted_at.total()),
            ("accepted_tokens", "accepted tokens", totals.accepted),
        ):
            family = CounterMetricFamily(
                f"vllm:spec_decode_num_{name}", f"Number of {text}.", labels=["model_name", "engine"]
            )
            family.add_metric(labels, value)
            yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            labels=["model_name", "engine", "position"],
        )
        for position, accepted in sorted(totals.accepted_at.items()):
            family.add_metric((*labels, str(position)), accepted)
        yield family


class CaptureCollector(Collector):
    """What was captured; there is nothing of it where nothing is to be."""

    def __init__(self, capture: Capture):
        self._capture = capture

    def collect(self) -> Iterator[Metric]:
        capture = self._capture
        yield gauge("capturing", "1 while texts are captured, 0 once the disk has refused one", capture.open)
        yield counter("captured_texts", "texts written for training", {(): capture.texts})
        yield counter("captured_bytes", "bytes of them", {(): capture.bytes})
        yield counter(
            "capture_lost_texts", "texts that the disk refused or was too slow for", {(): capture.lost}
        )
        yield gauge(
            "capture_disk_bytes",
            "on the disk, in blocks, with what earlier processes captured",
            capture.taken,
        )


def by(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


def by_method(counts: Mapping[tuple[str, int], int]) -> Mapping[str, int]:
    """Sums over positions."""
    sums: dict[str, int] = {}
    for (method, _), count in counts.items():
        sums[method] = sums.get(method, 0) + count
    return sums


def counter(name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
    family = CounterMetricFamily(f"speculon_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(
    name: str, text: str, values: Mapping[str, Mapping[int, int]], label: str, bounds: tuple[int, ...]
) -> Metric:
    """`values`: label -> value -> how often."""
    family = HistogramMetricFamily(f"speculon_{name}", text, labels=[label])
    for key, counts in values.items():
        buckets = [
            (str(float(bound)), float(sum(n for value, n in counts.items() if value <= bound)))
            for bound in bounds
        ]
        buckets.append(("+Inf", float(sum(counts.values()))))
        family.add_metric([key], buckets, sum(value * n for value, n in counts.items()))
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"speculon_{name}", text, value=value)
