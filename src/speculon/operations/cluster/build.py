"""The Ray Serve application: one deployment of engines, and the ingress in front of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from speculon import __version__
from speculon.core.config import EngineConfig
from speculon.core.logs import LogFormatter
from speculon.engine.client import EngineClient
from speculon.operations.cluster import config
from speculon.operations.cluster.engine import Replicas, ReplicatedEngine
from speculon.operations.cluster.handles import ServeReplicas
from speculon.operations.cluster.metrics import ClusterCollector
from speculon.operations.cluster.replica import Replica
from speculon.operations.cluster.router import PrefixRouter, routing_of
from speculon.server.app import create_app
from speculon.server.app_state import AppState
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.loader import ModelLoader
from speculon.server.pool.pool import ModelPool

HEALTH_SECONDS = 1.0  # between two checks; three that fail end a replica
HEALTH_TIMEOUT = 10.0
QUIET = LoggingConfig(enable_access_log=False)  # the server has a log of its own
CONNECTIONS = 100_000  # of an ingress: the queue's limit refuses requests, with an error of ours


class DeployedReplica(Replica):
    """One replica as Ray Serve makes it."""

    async def __init__(self, settings: dict[str, Any]):  # type: ignore[misc]
        log_to_stderr()
        super().__init__(serve.get_replica_context().replica_id.unique_id, settings)
        await self.start()

    async def __del__(self) -> None:
        await self.stop()


class ReplicaLoader(ModelLoader):
    """Its engines are the replicas that run already."""

    def __init__(self, replicas: Replicas):
        self._replicas = replicas

    def engine(self, settings: dict[str, Any], on_stage: Callable[[str], None]) -> EngineClient:
        return ReplicatedEngine(self._replicas, settings, on_stage)


class Ingress:
    """The HTTP application."""

    def __init__(self, engines: DeploymentHandle[Any], settings: dict[str, Any]):
        self._engines, self._settings = engines, settings
        log_to_stderr()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Returns once it can serve: before that, Ray Serve sends it no request."""
        replicas = ServeReplicas(self._engines, routing_of(self._settings["block_size"]))
        state = AppState(ModelPool(Catalogue.of_one(self._settings), ReplicaLoader(replicas)))
        state.metrics.register(ClusterCollector(state.pool.models))
        await state.pool.start()
        state.pool.check_open()
        state.pool.check_health()
        return create_app(state, __version__)


def build(given: Mapping[str, Any]) -> Application:
    """The application of these settings (`config.read`). Raises `ConfigError`."""
    cluster, settings = config.read(given)
    engine = EngineConfig(**settings)
    scaling: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=cluster.replicas,
                max_replicas=cluster.max_replicas,
                target_ongoing_requests=cluster.target_requests,
            )
        }
    drain = engine.serve.drain_timeout
    engines = serve.deployment(
        DeployedReplica,
        name="Engine",
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        max_ongoing_requests=engine.max_num_seqs + engine.serve.max_queue,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"block_size": engine.block_size, "limit": engine.max_num_seqs},
        ),
        logging_config=QUIET,
        **scaling,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=cluster.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=CONNECTIONS,
        logging_config=QUIET,
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(engines.bind(config.of_engine(settings)), settings)


def log_to_stderr() -> None:
    """Ray collects what a process writes there."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(message)s"))
    log = logging.getLogger("speculon")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
