"""Series of the cluster beside those of its engines: how requests were routed, and what the router keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from speculon.operations.cluster.engine import ReplicatedEngine
from speculon.operations.cluster.routing import LOAD, POOL, PREFIX
from speculon.server.metrics import counter, gauge


class ClusterCollector(Collector):
    """Of the one model that a cluster serves."""

    def __init__(self, models: Mapping[str, Any]):
        (self._model,) = models.values()

    def collect(self) -> Iterator[Metric]:
        engine: ReplicatedEngine = self._model.engine
        routing = engine.routing
        yield gauge("replicas", "replicas that serve", len(engine.replicas))
        text = "requests sent to replicas, by what chose the replica"
        routed = {name: routing.routed[name] for name in (PREFIX, POOL, LOAD)}
        yield counter("routed_requests", text, routed, "by")
        text = "choices in which a replica was at its limit"
        yield counter("routing_passed_over", text, routing.passed_over)
        yield gauge("routing_blocks", "prefixes that the router knows", routing.blocks)
        yield gauge("routing_pools", "users that the router knows", routing.pools)
        text = "requests that another replica continued"
        yield counter("requests_moved", text, engine.resumed)
